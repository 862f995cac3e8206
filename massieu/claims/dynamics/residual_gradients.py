"""Section 2.3 of the paper: gradients through stacks of attention, with and without residual connections."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from massieu.claims.claim import Curve, Evidence, Gap, Source, Trial, Verdict
from massieu.claims.experiment import normals, widest
from massieu.claims.registry import claim
from massieu.dynamics import layer_norm
from massieu.statistics import attend

KEPT = math.log(100)  # of a norm, for any gain: at a depth of 32 others reach e^12 or e^−45
GAINS = (0.25, 1.0, 4.0)  # of the values: standard deviation of the entries of W_V, times √dim


@claim(
    "C56",
    source=Source.PAPER,
    place="section 2.3, first paragraph",
    title="Residual connections keep gradients from vanishing",
    wording=(
        "A shortcut connection deals with vanishing and exploding gradients in an LSTM, and residual connections"
        " similarly make a hidden layer an update of an identity mapping, without gates."
    ),
    reading=(
        "Our reading, on attention in the place of recurrent and convolutional networks: through 32 blocks of random"
        " self-attention over 8 tokens in 16 dimensions (64 blocks in full) with residual connections, gradients of"
        " the output in the input neither vanish nor explode: their norms, mean logarithm of 16 stacks, stay within a"
        " factor of 100 of that behind the last block. As printed, for values of gain 1/4 and 1. Under the conditions,"
        " with a layer normalization in front of attention for gains of 1/4, 1 and 4, and with the gain 1/√L at a depth"
        " of L; nowhere do they vanish. The control leaves the residual connection out."
    ),
    reference="the gradient of the identity, whose norm is the same at every depth",
    formula="‖∂x_L / ∂x_0^⊤ u‖ ≈ ‖u‖ for x_{l+1} = x_l + g Attn_l(x_l)",
    correction=(
        "Against vanishing gradients they are enough. Gradients explode all the same, at unit gain about as 2^{L/2},"
        " unless attention reads the layer normalization of the stream or its gain falls as 1/√L. Without residual"
        " connections gradients vanish as g^L for small gains."
    ),
    expected=Verdict.CONDITIONAL,
)
def kept_gradients(trial: Trial) -> Evidence:
    """Logarithms of gradient norms through random stacks, with norms and without; the control has no residual."""
    depth = trial.size(32, 64)
    log_norm = functools.partial(gradient_log_norm, trial.seed)

    def kept(residual: bool) -> Gap:
        normed = [log_norm(depth, gain, residual, True) for gain in GAINS]
        return Gap(max(map(abs, [*normed, log_norm(depth, depth**-0.5, residual, False)])), KEPT)

    plain = [log_norm(depth, gain, True, False) for gain in GAINS[:2]]
    depths = [2**power for power in range(6)]
    series: dict[str, Sequence[float]] = {
        "norm in front, gain 4": [log_norm(each, 4.0, True, True) for each in depths],
        "gain 1/√L": [log_norm(each, each**-0.5, True, False) for each in depths],
        "gain 1": [log_norm(each, 1.0, True, False) for each in depths],
        "gain 1/4, no residual": [log_norm(each, 0.25, False, False) for each in depths],
    }
    return Evidence(
        printed=Gap(max(map(abs, plain)), KEPT),
        conditional=widest(kept(True), Gap(max(0.0, -min(plain)), KEPT)),
        control=kept(trial.control(False, True)),
        table={f"log norm at a depth of 32, {name}": values[-1] for name, values in series.items()},
        curve=Curve(depths, series, x_label="blocks", y_label="log norm of the gradient", log_x=True),
    )


def gradient_log_norm(seed: int, depth: int, gain: float, residual: bool, norm: bool) -> float:
    """Return the mean log norm of a gradient in the input of random stacks, over that behind the last block."""
    copies, tokens, dim = 16, 8, 16
    normal = normals(Trial(seed))
    start = normal(copies, tokens, dim).requires_grad_()
    behind, x = normal(copies, tokens, dim), start
    for _ in range(depth):
        query, key, value = (normal(copies, dim, dim) / dim**0.5 for _ in range(3))
        read: Tensor = layer_norm(x) if norm else x
        update = gain * attend(read @ query, read @ key, read @ value, scale=dim**-0.5).output
        x = x + update if residual else update
    (slope,) = torch.autograd.grad((x * behind).sum(), start)
    return float((slope.flatten(1).norm(dim=-1) / behind.flatten(1).norm(dim=-1)).log().mean())
