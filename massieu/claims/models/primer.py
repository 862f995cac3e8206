"""The primer of the slides on real models: positions, the residual stream as a sum over heads, and scaled scores."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from massieu.checks import UserError
from massieu.claims.claim import Evidence, Gap, Trial, Verdict
from massieu.claims.experiment import TIGHT, widest
from massieu.claims.models.states import reader, through
from massieu.claims.registry import claim
from massieu.claims.sources import SLIDES
from massieu.inspection.anatomy import read_anatomy
from massieu.inspection.rows import scores_at
from massieu.inspection.weights import head_weights
from massieu.taps import AttentionCall, tap


@claim(
    "A2",
    source=SLIDES,
    place="transformers primer, residual stream",
    title="Attention adds the sum of its heads to the stream",
    wording="x̃_i = x_i + Σ_{j=0}^K h_j(X), and x̂_i = LN(x̃_i) is read by the feed-forward layer.",
    reading=(
        "On passages of 64 tokens (2, full: 8) through a trained model in float64: in every block the residual stream"
        " behind attention minus the stream before it is the sum over the heads of W_O p V, with p and V of the"
        " observed attention calls, to 1e-9 of its largest entry, and the feed-forward layer reads its layer"
        " normalization."
    ),
    reference="the model's own residual stream, read by hooks; softmax and sums written out",
    formula="x̃_i − x_i = Σ_h W_O^h Σ_j p^h_ij v^h_j",
    correction=(
        "Up to the bias of the output projection, one vector that all tokens share and the slides leave out. In a"
        " model with norms in front of its sublayers the heads read LN(x), and x̃, not x̂, goes on as the stream."
    ),
    expected=Verdict.HOLDS_CORRECTED,
    trials=1,
    on_model=True,
)
def heads_add_up(trial: Trial) -> Evidence:
    """Stream minus heads, as it is and up to a vector that all tokens share; the control leaves out one head."""
    model, tokens = reader(trial.model)
    order = torch.randperm(len(tokens), generator=trial.generator)
    sums = list(residual_sums(copy.deepcopy(model).double(), tokens[order[: trial.size(2, 8)]]))
    if not sums:
        raise UserError("no block of the model has a norm that reads the sum of stream and attention; choose another")

    def gap(shared: bool, heads: slice) -> Gap:
        rests = [each.added - each.heads[heads].sum(0) for each in sums]
        rests = [rest - rest.mean((0, 1)) if shared else rest for rest in rests]
        off = [rest.abs().max() / each.added.abs().max() for rest, each in zip(rests, sums, strict=True)]
        return Gap(float(torch.stack(off).max()), TIGHT)

    every = slice(None)
    first = sums[0].heads
    return Evidence(
        printed=gap(False, every),
        corrected=widest(gap(True, every), Gap(max(each.norm_error for each in sums), TIGHT)),
        control=gap(True, trial.control(slice(1, None), every)),
        table={
            "blocks": float(len(sums)),
            "heads": float(len(first)),
            "shared vector over the rest, first block": float((sums[0].added - first.sum(0)).mean((0, 1)).norm())
            / float(first.sum(0).norm(dim=-1).mean()),
        },
    )


class ResidualSum(NamedTuple):
    """What attention adds to the stream of one block.

    Attributes:
        added: the stream behind attention minus the stream before it, ``(batch, tokens, dim)``.
        heads: what each head writes, ``(heads, batch, tokens, dim)``.
        norm_error: largest difference of the next norm's output from a layer normalization written out; else zero.
    """

    added: Tensor
    heads: Tensor
    norm_error: float


@torch.no_grad()
def residual_sums(model: nn.Module, tokens: Tensor) -> Iterator[ResidualSum]:
    """Streams and heads of every block in which a norm reads the stream behind attention."""
    norms = {}
    for block in read_anatomy(model, {"input_ids": tokens[:1]}).blocks:
        attention, feed_forward = block.find("attention"), block.find("mlp")
        entry = None if feed_forward is None else feed_forward.entry
        place = None if attention is None else attention.stream_norm or entry
        if place is not None and not block.parallel and block.number == place.call == 0:
            norms[block.stack, block.layer] = block.name, f"{block.name}.{place.path}"
    calls: dict[tuple[str, int], AttentionCall] = {}
    with tap(model, lambda call: calls.setdefault((call.stack, call.layer), call), this_thread=True):
        seen = through(model, tokens, {path for pair in norms.values() for path in pair})
    outputs = {(each.stack, each.layer): each.output for each in head_weights(model, {"input_ids": tokens[:1]})}
    modules = dict(model.named_modules())
    for key, (name, norm) in norms.items():
        after, normed = seen[norm]
        call, output = calls[key], outputs[key]
        if call.value is not None and output is not None:
            error = float((normed - _normalized(modules[norm], after, normed)).abs().max())
            yield ResidualSum(after - seen[name][0], written(call, output), error)


def written(call: AttentionCall, output: Tensor) -> Tensor:
    """The outputs of the heads of a call in the stream, ``(heads, batch, tokens, dim)``, by a softmax written out."""
    assert call.value is not None
    batch, heads, queries, _ = call.shape
    scores = scores_at(call, torch.arange(queries).expand(batch, -1))
    total = scores.logsumexp(-1, keepdim=True)
    if call.sink is not None:
        total = torch.logaddexp(total, call.sink.to(total)[:, None, None])
    value = call.value.repeat_interleave(heads // call.value.shape[1], 1)
    return torch.einsum("bhqk,bhkv,hdv->hbqd", (scores - total).exp(), value, output)


def _normalized(norm: nn.Module, x: Tensor, otherwise: Tensor) -> Tensor:
    """A layer normalization written out; of other norms what they returned."""
    if not isinstance(norm, nn.LayerNorm):
        return otherwise
    centered = x - x.mean(-1, keepdim=True)
    y = centered / (centered.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    return y * (1 if norm.weight is None else norm.weight) + (0 if norm.bias is None else norm.bias)
