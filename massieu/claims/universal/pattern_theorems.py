"""Conditions of theorems on sparse attention besides those on the pattern."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from massieu.claims.claim import Curve, Evidence, Gap, Source, Trial, Verdict
from massieu.claims.experiment import normals
from massieu.claims.registry import claim
from massieu.claims.universal.pattern_conditions import without_derivative
from massieu.nn import Transformer
from massieu.patterns import Pattern, check_universality, dilated, probability_condition, ring, star_ring
from massieu.statistics import probabilities


@claim(
    "U5",
    source=Source.ZAHEER,
    place="theorem 1, for 1 < p < ∞, and lemma 1 of its proof (appendix A.2), for 1 ≤ p ≤ ∞",
    title="A quantizing construction is close in d_p for all p",
    wording=(
        "Sparse transformers approximate continuous functions in d_p, 1 < p < ∞, by quantized tokens, a contextual"
        " mapping and values looked up; the first step, a piecewise constant function, is as close as one likes for 1 ≤"
        " p ≤ ∞."
    ),
    reading=(
        "Our reading: the whole construction, not its first step alone, is close for p = ∞ too, which the source does"
        " not say. An imitation of it for two tokens, 64 cells and ramps of 1e-4 cells has a root mean square error and"
        " a largest error below 0.15 for a random function of three waves and root mean square one; under the"
        " condition, the root mean square error alone."
    ),
    reference="the function itself at 10 000 random points and at 2000 points within half a ramp of borders of cells",
    formula="(∫ ‖f − g‖_p^p)^{1/p} ≤ ε",
    correction=(
        "For this construction only p < ∞, as theorem 1 has it: between two cells the identifier passes through those"
        " of other sequences, where the error is as large as f. This says nothing of other networks at p = ∞."
    ),
    expected=Verdict.CONDITIONAL,
)
def largest_error(trial: Trial) -> Evidence:
    """Largest and mean square error of the construction for two tokens; the control has ramps as wide as a cell."""
    coefficients = normals(trial)(2, 3).numpy()

    def errors(cells: int, ramp: float) -> tuple[float, float]:
        generator = np.random.default_rng(trial.seed)
        anywhere, between = generator.random((10_000, 2)), generator.random((2_000, 2))
        between[:, 1] = (generator.integers(1, cells, 2_000) + ramp * (between[:, 1] - 0.5)) / cells
        miss, worse = (
            by_table(each, coefficients, cells, ramp) - smooth(each, coefficients) for each in (anywhere, between)
        )
        return float(np.sqrt((miss**2).mean())), float(max(np.abs(miss).max(), np.abs(worse).max()))

    counts = [4, 8, 16, 32, 64]
    found = [errors(cells, 1e-4) for cells in counts]
    return Evidence(
        printed=Gap(max(found[-1]), 0.15),
        conditional=Gap(found[-1][0], 0.15),
        control=Gap(errors(counts[-1], trial.control(1.0, 1e-4))[0], 0.15),
        table={f"largest error, {cells} cells": each[1] for cells, each in zip(counts, found, strict=True)},
        curve=Curve(
            counts,
            {"L2": [each[0] for each in found], "largest": [each[1] for each in found]},
            "cells",
            "error",
            log_x=True,
            log_y=True,
        ),
    )


@claim(
    "U6",
    source=Source.SLIDES,
    place="approximation, informal theorem of Yun et al. 2020",
    title="Every map from scores to weights will do",
    wording=(
        "Given unbounded depth, any sparse transformer that satisfies the three conditions is a universal "
        "approximator (informal)."
    ),
    reading=(
        "Our reading: 'any' includes the map from scores to weights, of which the slide says nothing. Tested is "
        "what approximation needs, that no output ignores a token: in three layers with random weights on a star "
        "and a ring of twelve tokens no derivative is exactly zero, for weights that are all on the first token "
        "of a list, and for softmax."
    ),
    reference="derivatives by autograd",
    formula="ρ(t v)_{j*} ≥ 1 − η for some t, whenever v_{j*} leads by ζ",
    correction=(
        "If the map tends to hardmax as scores grow, which is assumption 2 of Yun et al. 2020 and true of softmax,"
        " sparsemax and entmax. A map that ignores its scores may leave every token alone, whatever the pattern."
    ),
    expected=Verdict.CONDITIONAL,
)
def probability_maps(trial: Trial) -> Evidence:
    """Share of pairs without a derivative, for two maps to weights; the control has a dilated window."""
    normal = normals(trial)
    # With larger weights softmax or tanh may saturate, and a derivative underflow to zero.
    weights, x = normal(3, 3, 5, 5) / 5, normal(12, 5)

    def first(scores: Tensor) -> Tensor:
        """Put all weight on the diagonal: each token is the first of its own list."""
        return torch.eye(len(scores), dtype=scores.dtype)

    def gap(weigh: Callable[[Tensor], Tensor], pattern: Pattern) -> Gap:
        absent = pattern.log_weights(len(x), torch.float64)

        def layers(tokens: Tensor) -> Tensor:
            for query, value, inner in weights:
                attended = weigh(tokens @ query @ tokens.mT + absent) @ tokens @ value
                tokens = tokens + torch.tanh((tokens + attended) @ inner)
            return tokens

        return Gap(without_derivative(layers, x), 1e-9)

    return Evidence(
        printed=gap(first, star_ring()),
        conditional=gap(probabilities, star_ring()),
        control=gap(probabilities, trial.control(dilated(2, 2), star_ring())),
        table={
            "softmax meets the condition": float(probability_condition("softmax", 12).holds),
            "the first of a list meets it": float(
                probability_condition(lambda scores: torch.eye(scores.shape[-1])[0].expand_as(scores), 12).holds
            ),
        },
    )


@claim(
    "U8",
    source=Source.SLIDES,
    place="approximation, informal theorem of Yun et al. 2020",
    title="Sparse transformers do without positions",
    wording=(
        "Given unbounded depth, any sparse transformer that satisfies the three conditions is a universal "
        "approximator of sequence-to-sequence functions."
    ),
    reading=(
        "Our reading: 'any' includes one without positional encodings. On a ring of ten equal tokens a linear "
        "readout of a random transformer of two layers explains a random function of the position up to a share "
        "of 1e-6, without positions and with random ones."
    ),
    reference="least squares by the pseudoinverse",
    formula="f : R^{d×T} → R^{d×T}",
    correction=(
        "With trainable positions, which Yun et al. 2020 have. Without them a layer commutes with every "
        "permutation that keeps the pattern, such as the turns of a ring, and cannot tell positions apart."
    ),
    expected=Verdict.CONDITIONAL,
)
def positions_needed(trial: Trial) -> Evidence:
    """Share of a function that no readout explains; the control has the same vector at every position."""
    length = 10
    token = normals(trial)(1, 1, 16)
    target = normals(trial)(length)

    def gap(vectors: Tensor | None) -> Gap:
        model = Transformer(
            16,
            2,
            2,
            causal=False,
            pattern=ring(),
            positions=None if vectors is None else "learned",
            max_length=length,
            dtype=torch.float64,
            generator=torch.Generator().manual_seed(trial.seed),
        )
        if vectors is not None and model.positions is not None:
            model.positions.weight.data.copy_(vectors)
        with torch.no_grad():
            hidden = model(token.expand(1, length, 16))[0]
        centered, aim = hidden - hidden.mean(0), target - target.mean()
        explained = centered @ torch.linalg.pinv(centered, atol=1e-9) @ aim
        return Gap(float((aim - explained).norm() / aim.norm()), 1e-6)

    learned = normals(trial)(length, 16)
    return Evidence(
        printed=gap(None),
        conditional=gap(learned),
        control=gap(trial.control(learned[:1].expand(length, 16), learned)),
        table={"theorem for the ring applies": float(check_universality(ring(), length).theorem == "Yun 2020")},
    )


def smooth(points: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    """Evaluate a function of two tokens by a few waves, of root mean square one."""
    scale = np.sqrt(0.5 * (coefficients**2).sum())
    waves = np.sin(np.pi * points[:, :, None] * np.arange(1, 4) * 2 + np.array([0.0, 1.0])[None, :, None])
    found: np.ndarray = (waves * coefficients).sum((1, 2)) / scale
    return found


def by_table(points: np.ndarray, coefficients: np.ndarray, cells: int, ramp: float) -> np.ndarray:
    """Quantize both tokens by ramps of a width in cells, join them in one identifier, and look the value up."""
    edges = np.arange(1, cells)
    steps = np.clip((points[:, :, None] * cells - edges) / ramp + 0.5, 0, 1).sum(-1)
    identifier = np.rint(steps[:, 0] + cells * steps[:, 1]).astype(int).clip(0, cells**2 - 1)
    return smooth((np.stack([identifier % cells, identifier // cells], 1) + 0.5) / cells, coefficients)
