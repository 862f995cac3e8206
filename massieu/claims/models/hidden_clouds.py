"""Hidden states of a trained model: their means after layer normalization, and the fate of a Gaussian cloud."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from massieu import assets
from massieu.checks import UserError
from massieu.claims.claim import Curve, Evidence, Gap, Source, Trial, Verdict
from massieu.claims.experiment import widest
from massieu.claims.models.trained_model import BAND, out_of_band, over_band
from massieu.claims.registry import claim
from massieu.models.loading import load
from massieu.models.module_calls import block_input, hidden_tensors, with_input
from massieu.models.residual_stream import find_residual_stream

LENGTH = 64  # tokens of a passage
OFF_CENTER = 0.05  # twice the length of the mean of as many independent tokens of mean zero, 1 / sqrt(24 · 64)


@claim(
    "C22",
    source=Source.PAPER,
    place="section 3.3",
    title="Layer normalization recenters the hidden states",
    wording=(
        "The hidden states are assumed to be recentered around the origin through layer normalization or some other"
        " normalization."
    ),
    reading=(
        "Our reading, on a trained model: in its median layer, the states that the layer gets, taken through a layer"
        " normalization without gain and offset, have a mean over the tokens of at most 24 passages that is at most a"
        " twentieth as long as a token."
    ),
    reference="the mean over the features of one token, which layer normalization does remove",
    formula="mean over tokens of LN(x) = 0",
    correction=(
        "It centers the features of every token and leaves the tokens off center: in the embedded model by 0.2 to 0.8"
        " of the length of a token, hardly less or more than before."
    ),
    expected=Verdict.FAILS,
    on_model=True,
)
def recentering(trial: Trial) -> Evidence:
    """Relative length of a mean after the norm, of tokens and of features; the control leaves out the norm."""
    states = hidden_states(*reader(trial.model))

    def norm(x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, x.shape[-1:])

    def features(x: Tensor) -> Gap:
        return Gap(float((x.mean(-1).abs() / x.square().mean(-1).sqrt()).max()), 1e-3)

    def off_center(x: Tensor) -> float:
        return float(x.mean(0).norm() / x.square().sum(-1).mean().sqrt())

    normed = [norm(state) for state in states]
    found = [off_center(state) for state in normed]
    return Evidence(
        printed=Gap(statistics.median(found), OFF_CENTER),
        instead=features(torch.cat(normed)),
        control=features(torch.cat(trial.control(states, normed))),
        table={
            "tokens": float(len(states[0])),
            "mean token over a token, median layer": statistics.median(found),
            "in the layer closest to the center": min(found),
            "before the norm, median layer": statistics.median(map(off_center, states)),
        },
    )


@claim(
    "C46",
    source=Source.OURS,
    place="on section 6 of the paper: the experiment with learned weights that it calls useful",
    title="Gaussian tokens leave their law in a trained model",
    wording="Gaussian tokens do not stay Gaussian in the layers of a trained model.",
    reading=(
        "Gaussian tokens with the mean and covariance of what the first layer of a trained model gets (at most 24"
        " passages of 64) are within twice the band of kurtosis in which 19 of 20 Gaussian samples lie, and out of it"
        " after every layer but the last. In the control the layers leave the tokens as they are. In the embedded model"
        " the first layer already takes them more than ten times as far."
    ),
    reference="the band of Gaussian samples in closed form; the same tokens with random lengths are out of it too",
    formula="excess kurtosis of whitened projections ≠ 0",
    on_model=True,
)
def injected_cloud(trial: Trial) -> Evidence:
    """Kurtosis over its sampling band after every layer but the last, of tokens with the moments of the first input."""
    model, tokens = reader(trial.model)
    real = hidden_states(model, tokens)[0].double()
    centered = real - real.mean(0)
    mixing = torch.randn(len(real), len(real), generator=trial.generator, dtype=torch.float64) / len(real) ** 0.5
    cloud = real.mean(0) + mixing @ centered  # Gaussian, with the mean and the covariance of the real tokens
    lengths = torch.rand(len(real), 1, generator=trial.generator, dtype=torch.float64).rsqrt()
    found = [over_band(state) for state in (cloud, *hidden_states(model, tokens, cloud)[1:])]
    return Evidence(
        printed=widest(Gap(found[0], BAND), out_of_band(*found[1:], over_band(cloud * lengths))),
        control=out_of_band(*trial.control(found[:1], found[1:])),
        table={"injected": found[0], "after the last layer but one": found[-1], "after the first layer": found[1]},
        curve=Curve(range(len(found)), {"kurtosis over its band": found}, "layers passed", "of the band"),
    )


def reader(name: str | None) -> tuple[nn.Module, Tensor]:
    """Return a model and passages of the embedded text as its tokens, without special ones."""
    loaded = load(name or str(assets.MODEL))
    if loaded.tokenizer is None:
        raise UserError(f"{name} has no tokenizer, so it cannot read the text; choose a model of text")
    options: dict[str, Any] = {"truncation": True, "max_length": LENGTH, "add_special_tokens": False}
    encoded = loaded.tokenizer(assets.documents()[:24], **options)["input_ids"]
    return loaded.model, torch.tensor([row for row in encoded if len(row) == LENGTH])


@torch.no_grad()
def hidden_states(model: nn.Module, tokens: Tensor, first: Tensor | None = None) -> list[Tensor]:
    """Return the states between the layers, each ``(tokens, dim)``; ``first`` replaces the input of the first layer."""
    block = dict(model.named_modules())[find_residual_stream(model, {"input_ids": tokens[:1]}).blocks[0].name]

    def replace(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        stream = block_input(args, kwargs)
        assert stream is not None
        place, usual = stream
        return with_input(args, kwargs, place, usual if first is None else first.to(usual).view_as(usual))

    hook = block.register_forward_pre_hook(replace, with_kwargs=True)
    try:
        states = model(input_ids=tokens, output_hidden_states=True).hidden_states
    finally:
        hook.remove()
    return [state.flatten(0, 1) for state in states[:-1]]


def through(model: nn.Module, tokens: Tensor, paths: Iterable[str]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return inputs and outputs of modules in one pass, by their paths; of several calls the last."""
    modules, found = dict(model.named_modules()), dict[str, tuple[Tensor, Tensor]]()
    hooks = []
    for path in paths:

        def keep(_: nn.Module, args: Any, kwargs: Any, output: Any, path: str = path) -> None:
            stream = block_input(args, kwargs)
            if stream is not None:
                found[path] = stream[1], next(hidden_tensors(output))

        hooks.append(modules[path].register_forward_hook(keep, with_kwargs=True))
    try:
        model(input_ids=tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return found
