"""Weights of a trained model that may be random, and weights that may not."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from massieu import assets
from massieu.claims.claim import Curve, Evidence, Gap, Source, Trial
from massieu.claims.models.hidden_clouds import reader
from massieu.claims.registry import claim

WIDTH = 128  # of the embedded model
FUSED = "qkv"  # order of the projections in its fused matrix


@claim(
    "X19",
    source=Source.PAPER,
    place="appendix B",
    title="Query and key weights are less sensitive than value weights",
    wording=(
        "It may be possible that some weights, those that transform the key and query spaces, are less sensitive or"
        " at least easier to train than others, such as value, output and fully connected weights."
    ),
    reading=(
        "Our reading of less sensitive, on the embedded model: normal weights of the same mean square in the place of"
        " W_Q and W_K of one layer raise the loss on 8 (full: 24) passages of its text, summed over layers, by less"
        " than half as much as in the place of W_V and W_O."
    ),
    reference=(
        "the loss of the model itself; turned values and outputs, which change weights as much and the model not at all"
    ),
    formula="Σ_l ΔL(W_Q, W_K) < ½ Σ_l ΔL(W_V, W_O)",
    trials=2,
)
def random_weights(trial: Trial) -> Evidence:
    """Share of queries and keys in the cost of both; the control turns the values of every head and back."""
    model, tokens = embedded()
    tokens = tokens[torch.randperm(len(tokens), generator=trial.generator)[: trial.size(8, 24)]]
    usual, layers = loss_of(model, tokens), range(len(model.h))

    def costs(parts: str) -> Tensor:
        found = []
        for layer in layers:
            with redrawn(model.h[layer], parts, trial.generator):
                found.append(loss_of(model, tokens) - usual)
        return torch.tensor(found)

    def gap(scores: Tensor, values: Tensor) -> Gap:
        first, second = (float(each.sum().clamp_min(0)) for each in (scores, values))
        return Gap(first / (first + second), 1 / 3)

    scores, values, turned, rest = (costs(parts) for parts in ("qk", "vo", "t", "f"))
    series: dict[str, Sequence[float]] = {"queries and keys": scores.tolist(), "values and outputs": values.tolist()}
    return Evidence(
        printed=gap(scores, values),
        control=gap(scores, trial.control(turned, values)),
        table={
            "loss": usual,
            "queries and keys cost, mean over layers": float(scores.mean()),
            "values and outputs": float(values.mean()),
            "fully connected layers": float(rest.mean()),
            "layers where queries and keys cost less": float((scores < values).double().mean()),
        },
        curve=Curve(layers, {**series, "fully connected": rest.tolist()}, "layer", "rise of the loss, nats"),
    )


@contextlib.contextmanager
def redrawn(block: Any, parts: str, generator: torch.Generator) -> Iterator[None]:
    """Replace some weights of a block by random ones of the same mean square, for a while.

    They are "q", "k", "v", "o", and "f" for both matrices of the fully connected layer; with "t" the values of every
    head are turned, and its outputs back.
    """
    attention, mlp = block.attn, block.mlp
    usual = copy.deepcopy(block.state_dict())
    with torch.no_grad():
        fused, output = attention.c_attn, attention.c_proj.weight
        places = {part: fused.weight[:, WIDTH * at : WIDTH * (at + 1)] for at, part in enumerate(FUSED)}
        places |= {"o": output, "f": mlp.c_fc.weight, "F": mlp.c_proj.weight}
        for part in parts.replace("f", "fF").replace("t", ""):
            place = places[part]
            place.copy_(torch.randn(place.shape, generator=generator) * place.square().mean().sqrt())
        if "t" in parts:
            turn_heads(places["v"], fused.bias[-WIDTH:], output, attention.num_heads, generator)
    try:
        yield
    finally:
        block.load_state_dict(usual)


def turn_heads(value: Tensor, bias: Tensor, output: Tensor, heads: int, generator: torch.Generator) -> None:
    """Turn the values of every head by a random rotation, and the rows of the output matrix back."""
    dim = WIDTH // heads
    turns = torch.linalg.qr(torch.randn(heads, dim, dim, generator=generator)).Q
    for turn, start in zip(turns, range(0, WIDTH, dim), strict=True):
        own = slice(start, start + dim)
        value[:, own], bias[own], output[own] = value[:, own] @ turn, bias[own] @ turn, turn.T @ output[own]


@torch.no_grad()
def loss_of(model: Any, tokens: Tensor) -> float:
    """Return nats per predicted token; the embedding is the readout."""
    logits = model(input_ids=tokens).last_hidden_state[:, :-1] @ model.wte.weight.T
    return float(nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))


@functools.lru_cache(maxsize=1)
def embedded() -> tuple[Any, Tensor]:
    """Return a copy of the embedded model that may be changed, and passages."""
    model, tokens = reader(str(assets.MODEL))
    return copy.deepcopy(model), tokens
