"""The primer of the slides on real models: positions, the residual stream as a sum over heads, and scaled scores."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from massieu.checks import UserError
from massieu.claims.claim import Curve, Evidence, Gap, Source, Trial, Verdict
from massieu.claims.experiment import TIGHT, apart, jacobian, linspace, normals, widest
from massieu.claims.models.hidden_clouds import reader, through
from massieu.claims.registry import claim
from massieu.models.head_weights import head_weights
from massieu.models.residual_stream import find_residual_stream
from massieu.taps import AttentionCall, tap
from massieu.taps.call_statistics import scores_at

SINGLE = 1e-6  # of norms that transformers computes in float32 whatever the precision of the model


@claim(
    "A1",
    source=Source.SLIDES,
    place="transformers primer, embeddings",
    title="The order of tokens enters through their positions",
    wording=(
        "Every token is mapped to a vector, and its position is added (in pictures: of the slide's text only the"
        " heading, embeddings, could be read)."
    ),
    reading=(
        "Our reading, for the purpose of positions: without them the order of tokens is lost. In a trained model in"
        " float64 with all positions equal, a permutation of the 63 tokens before the last of a passage (2 passages,"
        " full: 8) changes no state of the last token, to 1e-9 of its length."
    ),
    reference="the same passages with their positions",
    formula="f(x_π(1), …, x_π(T−1), x_T)_T = f(x_1, …, x_T)_T",
    correction=(
        "Where tokens see each other in both directions, at any depth. Behind a causal mask in the first block only:"
        " a token there sees the earlier ones, so that states of the second block depend on the order also without"
        " positions."
    ),
    expected=Verdict.CONDITIONAL,
    on_model=True,
)
def order_and_positions(trial: Trial) -> Evidence:
    """Largest change of the last states under permutations of the others; the control keeps the positions."""
    model, tokens = reader(trial.model)
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UserError("the model takes no position_ids, so its positions cannot be made equal; choose another model")
    model = copy.deepcopy(model).double()
    tokens = tokens[torch.randperm(len(tokens), generator=trial.generator)[: trial.size(2, 8)]]
    count, length = tokens.shape
    order = torch.cat([torch.randperm(length - 1, generator=trial.generator), torch.tensor([length - 1])])
    equal, usual = torch.zeros_like(tokens), torch.arange(length).expand(count, -1)
    open_ = torch.zeros(count, 1, length, length, dtype=torch.float64)

    @torch.no_grad()
    def changes(positions: Tensor, mask: Tensor | None) -> Tensor:
        options = {"position_ids": positions, "attention_mask": mask, "output_hidden_states": True}
        states = (model(input_ids=each, **options).hidden_states for each in (tokens, tokens[:, order]))
        pairs = zip(*([state[:, -1] for state in each] for each in states), strict=True)
        return torch.stack([((one - two).norm(dim=-1) / one.norm(dim=-1)).max() for one, two in pairs])[1:]

    masked, free = changes(equal, None), changes(equal, open_)
    kept = changes(trial.control(usual, equal), open_)
    return Evidence(
        printed=Gap(float(masked.max()), TIGHT),
        conditional=Gap(max(float(masked[0]), float(free.max())), TIGHT),
        control=Gap(float(kept.max()), TIGHT),
        table={"change behind the last block, with the mask": float(masked[-1]), "with positions": float(kept[-1])},
        curve=Curve(range(1, len(masked) + 1), {"with the mask": masked.tolist()}, "block", "relative change"),
    )


@claim(
    "A2",
    source=Source.SLIDES,
    place="transformers primer, residual stream",
    title="Attention adds the sum of its heads to the stream",
    wording="x̃_i = x_i + Σ_{j=0}^K h_j(X), and x̂_i = LN(x̃_i) is read by the feed-forward layer.",
    reading=(
        "On passages of 64 tokens (2, full: 8) through a trained model in float64: in every block the residual stream"
        " behind attention minus the stream before it is the sum over the heads of W_O p V, with p and V of the"
        " observed attention calls, to 1e-9 of its largest entry, and the feed-forward layer reads its layer"
        " normalization. In a model with root mean square norms, that norm stands for LN (to 1e-6 where it computes in"
        " float32); norms of other kinds are not judged."
    ),
    reference="the model's own residual stream, read by hooks; softmax, sums and norms written out",
    formula="x̃_i − x_i = Σ_h W_O^h Σ_j p^h_ij v^h_j",
    correction=(
        "Up to the bias of the output projection, one vector that all tokens share and the slides leave out. In a"
        " model with norms in front of its sublayers the heads read LN(x), and x̃, not x̂, goes on as the stream."
    ),
    expected=Verdict.HOLDS_CORRECTED,
    on_model=True,
)
def heads_add_up(trial: Trial) -> Evidence:
    """Stream minus heads, as it is and up to a vector that all tokens share; the control leaves out one head."""
    model, tokens = reader(trial.model)
    order = torch.randperm(len(tokens), generator=trial.generator)
    sums = list(residual_sums(copy.deepcopy(model).double(), tokens[order[: trial.size(2, 8)]]))
    if not sums:
        raise UserError("no block of the model has a norm that reads the sum of stream and attention; choose another")
    norms = [each.norm for each in sums if each.norm is not None]
    if not norms:
        raise UserError("the norms of the model are neither layer nor root mean square norms; choose another model")

    def gap(shared: bool, heads: slice) -> Gap:
        rests = [each.added - each.heads[heads].sum(0) for each in sums]
        rests = [rest - rest.mean((0, 1)) if shared else rest for rest in rests]
        off = [rest.abs().max() / each.added.abs().max() for rest, each in zip(rests, sums, strict=True)]
        return Gap(float(torch.stack(off).max()), TIGHT)

    every = slice(None)
    first = sums[0].heads
    return Evidence(
        printed=widest(gap(False, every), *norms),
        corrected=widest(gap(True, every), *norms),
        control=gap(True, trial.control(slice(1, None), every)),
        table={
            "blocks": float(len(sums)),
            "heads": float(len(first)),
            "norms written out": float(len(norms)),
            "shared vector over the rest, first block": float((sums[0].added - first.sum(0)).mean((0, 1)).norm())
            / float(first.sum(0).norm(dim=-1).mean()),
        },
    )


@claim(
    "A3",
    source=Source.SLIDES,
    place="transformers primer, scaling",
    title="Scores are divided by √d to avoid small gradients",
    wording="In practice scale by dimension to avoid small gradients.",
    reading=(
        "Our reading, on the gradient of the softmax in its scores: for 512 (full: 4096) queries and 32 sets of 64"
        " keys, Gaussian of unit variance in 16 to 1024 dimensions, the mean norm of the Jacobian changes by at most a"
        " tenth from the one in 16 dimensions if scores are divided by √d. Without, it is at 1024 the mean over the"
        " gap of the two largest scores, which falls as 1/√d, to a tenth."
    ),
    reference="the law of the gap of the two largest of 64 normal variables by quadrature; Jacobians by autograd",
    formula="E‖diag(p) − p p^T‖ → N (N − 1) ∫ φ² Φ^{N−2} / √d without scale, constant with it",
)
def scaled_gradients(trial: Trial) -> Evidence:
    """Ratios of mean norms to those at the smallest dimension and to the law; the control leaves out the scale."""
    normal, queries, dims = normals(trial), trial.size(512, 4096), (16, 64, 256, 1024)
    means = [jacobian_norms(normal(queries, dim) @ normal(32, 64, dim).mT, dim) for dim in dims]
    plain, scaled = (list(each) for each in zip(*means, strict=True))
    law = two_largest(64, dims[-1])
    scores = 3 * normal(5, 8)
    closed = torch.stack([p.diag() - torch.outer(p, p) for p in scores.softmax(-1)])

    def steady(norms: list[float]) -> Gap:
        return Gap(max(abs(each / norms[0] - 1) for each in norms), 0.1)

    return Evidence(
        printed=widest(
            steady(scaled),
            Gap(abs(plain[-1] / law - 1), 0.1),
            apart(norms_of(scores), closed.flatten(-2).norm(dim=-1)),
            apart(jacobian(lambda x: x.softmax(-1), scores), closed),
        ),
        control=steady(trial.control(plain, scaled)),
        table={"without scale, 1024 over 16": plain[-1] / plain[0], "law at 1024": law, "found there": plain[-1]},
        curve=Curve(dims, {"not scaled": plain, "scaled": scaled}, "dimension", "norm of the Jacobian", True, True),
    )


def jacobian_norms(scores: Tensor, dim: int) -> tuple[float, float]:
    return float(norms_of(scores).mean()), float(norms_of(scores / dim**0.5).mean())


def norms_of(scores: Tensor) -> Tensor:
    r"""Return Frobenius norms of :math:`\mathrm{diag}(p) - p p^\top` of every row, without the matrix."""
    square = scores.softmax(-1).square()
    total = square.sum(-1)
    norm: Tensor = (total - 2 * (square * square.sqrt()).sum(-1) + total.square()).clamp_min(0).sqrt()
    return norm


def two_largest(count: int, dim: int) -> float:
    """Return the mean norm of the Jacobian if only the two largest of many normal scores have weight."""

    def density(x: Tensor) -> Tensor:
        value: Tensor = torch.exp(-0.5 * x.square()) / (2 * math.pi) ** 0.5
        return value

    below, gap = linspace(-10, 10, 1001), linspace(0, 60, 1001)
    both = density(below) * torch.special.ndtr(below) ** (count - 2) * density(below + gap[:, None] / dim**0.5)
    chance = count * (count - 1) * torch.trapezoid(both, below) / dim**0.5
    return float(torch.trapezoid(chance * 2 * torch.sigmoid(gap) * torch.sigmoid(-gap), gap))


class ResidualSum(NamedTuple):
    """Sum that attention adds to the stream of one block.

    Attributes:
        added: the stream behind attention minus the stream before it, ``(batch, tokens, dim)``.
        heads: the outputs of each head in the stream, ``(heads, batch, tokens, dim)``.
        norm: largest difference of the next norm's output from that norm written out, over the largest entry; None for
            a norm of another kind than layer and root mean square.
    """

    added: Tensor
    heads: Tensor
    norm: Gap | None


@torch.no_grad()
def residual_sums(model: nn.Module, tokens: Tensor) -> Iterator[ResidualSum]:
    """Yield the sums of every block in which a norm reads the stream behind attention."""
    norms = {}
    for block in find_residual_stream(model, {"input_ids": tokens[:1]}).blocks:
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
            yield ResidualSum(after - seen[name][0], written(call, output), norm_gap(modules[norm], after, normed))


def written(call: AttentionCall, output: Tensor) -> Tensor:
    """Return the outputs of the heads of a call, ``(heads, batch, tokens, dim)``, by a softmax written out."""
    assert call.value is not None
    batch, heads, queries, _ = call.shape
    scores = scores_at(call, torch.arange(queries).expand(batch, -1))
    total = scores.logsumexp(-1, keepdim=True)
    if call.sink is not None:
        total = torch.logaddexp(total, call.sink.to(total)[:, None, None])
    value = call.value.repeat_interleave(heads // call.value.shape[1], 1)
    return torch.einsum("bhqk,bhkv,hdv->hbqd", (scores - total).exp(), value, output)


@torch.no_grad()
def norm_gap(norm: nn.Module, x: Tensor, found: Tensor) -> Gap | None:
    """Return the largest difference of a norm's output from the norm written out, over its largest entry."""
    expected = _normalized(norm, x)
    if expected is None:
        return None
    exact = isinstance(norm, (nn.LayerNorm, nn.RMSNorm))
    return Gap(float((found - expected).abs().max() / found.abs().max()), TIGHT if exact else SINGLE)


def _normalized(norm: nn.Module, x: Tensor) -> Tensor | None:
    """Write out a layer norm or a root mean square norm; None for other kinds."""
    if isinstance(norm, nn.LayerNorm):
        centered = x - x.mean(-1, keepdim=True)
        y = centered / (centered.square().mean(-1, keepdim=True) + norm.eps).sqrt()
        return y * (1 if norm.weight is None else norm.weight) + (0 if norm.bias is None else norm.bias)
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    known = type(norm).__name__.endswith(("RMSNorm", "T5LayerNorm")) and len([*norm.parameters()]) == 1
    if not known or not isinstance(weight, Tensor) or weight.shape != x.shape[-1:]:
        return None
    probe = copy.deepcopy(norm)
    for each in probe.parameters():
        each.zero_()
    offset = float(probe(x).any())  # Gemma's norms multiply by 1 + weight.
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    scaled: Tensor = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (offset + weight)
    return scaled
