"""Attention of a decoder to an encoder: the patterns that stay as they are, and those that move."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from massieu.checks import MissingPackageError, pip_install
from massieu.claims.claim import Evidence, Gap, Source, Trial, Verdict
from massieu.claims.experiment import TIGHT, widest
from massieu.claims.registry import claim
from massieu.memory import Continuous
from massieu.taps import AttentionCall, tap

SIZES = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}  # of encoder and decoder


@claim(
    "X17",
    source=Source.PAPER,
    place="appendix B",
    title="Attention to an encoder has fixed patterns",
    wording=(
        "The decoder layers also add a second attention block which applies attention to the encoder input, fitting"
        " the Hopfield paper conditions."
    ),
    reading=(
        "Our reading of the conditions: patterns are fixed while states are updated, here from layer to layer. In a"
        " random encoder-decoder of three decoder layers (full: six), the keys of the second attention are the same"
        " in all layers, to 1e-9 of the largest."
    ),
    reference="keys of the observed attention calls of transformers' own encoder-decoder; the decoder's self-attention",
    formula="x_j^{(l+1)} = x_j^{(l)}",
    correction=(
        "Within a layer: its keys do not depend on the tokens and their number in the decoder, and updates repeated on"
        " them (those of the first layer) come to rest. Over layers only if their key projections are tied: otherwise"
        " each projects the same encoder states to other patterns."
    ),
    expected=Verdict.CONDITIONAL,
)
def fixed_patterns(trial: Trial) -> Evidence:
    """Relative changes of keys, and residuals of updates on them; the control is the decoder's self-attention."""
    model = encoder_decoder(trial.size(3, 6), trial.generator)
    source, target, other = torch.randint(50, (3, 1, 16), generator=trial.generator)
    usual, changed = observed(model, source, target), observed(model, source, other)
    short = observed(model, source, target[:, :6])
    memories = [Continuous(keys, usual.scale) for keys in usual.cross[0]]
    ends = [memory.retrieve(state, steps=2000) for memory, state in zip(memories, usual.queries, strict=True)]
    for layer in model.decoder.layers[1:]:
        layer.encoder_attn.k_proj.load_state_dict(model.decoder.layers[0].encoder_attn.k_proj.state_dict())
    tied = observed(model, source, target)

    def gap(keys: Tensor, others: Tensor) -> Gap:
        return Gap(float((keys - others).abs().max() / keys.abs().max()), TIGHT)

    return Evidence(
        printed=gap(usual.cross, usual.cross[:1]),
        conditional=widest(
            gap(usual.cross, changed.cross),
            gap(usual.cross, short.cross),
            gap(tied.cross, tied.cross[:1]),
            Gap(max(float(end.residual.max()) for end in ends), TIGHT),
        ),
        control=gap(*trial.control((usual.own, changed.own), (usual.cross, changed.cross))),
        table={
            "updates until rest, at most": float(max(end.steps.max() for end in ends)),
            "change of self-attention keys from layer to layer": gap(usual.own, usual.own[:1]).measured,
        },
    )


class Observed(NamedTuple):
    """Attention of a decoder in one pass.

    Attributes:
        cross: keys of the attention to the encoder, ``(layers, heads, atoms, dim)``.
        own: keys of the self-attention of the decoder, ``(layers, heads, tokens, dim)``.
        queries: of the first attention to the encoder, ``(heads, tokens, dim)``.
        scale: factor of the scores.
    """

    cross: Tensor
    own: Tensor
    queries: Tensor
    scale: float


def encoder_decoder(layers: int, generator: torch.Generator) -> Any:
    """Return a random BART of 32 features and four heads in float64."""
    try:
        from transformers import BartConfig, BartModel
    except ModuleNotFoundError:
        raise MissingPackageError(f"an encoder-decoder needs transformers; {pip_install('inspect')}") from None
    sizes: dict[str, Any] = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in SIZES.items()}
    with torch.random.fork_rng():
        model = BartModel(
            BartConfig(vocab_size=50, d_model=32, max_position_embeddings=32, **{**sizes, "decoder_layers": layers})
        )
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    return model.double().eval()


@torch.no_grad()
def observed(model: nn.Module, source: Tensor, target: Tensor) -> Observed:
    calls: list[AttentionCall] = []
    with tap(model, calls.append, this_thread=True):
        model(input_ids=source, decoder_input_ids=target, use_cache=False)
    keys = {
        stack: torch.stack([call.key[0] for call in calls if call.stack == stack and call.key is not None])
        for stack in ("cross", "decoder")
    }
    (query, scale) = next((call.query, call.scale) for call in calls if call.stack == "cross")
    assert query is not None
    return Observed(keys["cross"], keys["decoder"], query[0], scale)
