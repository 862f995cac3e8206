"""Tokens on the sphere under self-attention with identity matrices: one point in the end, several for a long time."""

from __future__ import annotations

import math

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from massieu.checks import MissingPackageError, pip_install
from massieu.claims.claim import Curve, Evidence, Gap, Source, Trial
from massieu.claims.experiment import linspace, normals, widest
from massieu.claims.registry import claim
from massieu.dynamics import sphere_flow

Array = NDArray[numpy.float64]


def velocity(points: Array, beta: float) -> Array:
    kernel = numpy.exp(beta * (points @ points.T))
    pull = kernel @ points / kernel.sum(1, keepdims=True)
    moved: Array = pull - (pull * points).sum(1, keepdims=True) * points
    return moved


def solved(points: Tensor, beta: float, time: float) -> Tensor:
    """Return the flow at a time, by an adaptive method of order eight."""
    try:
        from scipy.integrate import solve_ivp
    except ModuleNotFoundError:
        raise MissingPackageError(f"this experiment needs scipy; {pip_install('verify')}") from None
    shape = points.shape

    def field(_: float, flat: Array) -> Array:
        return velocity(flat.reshape(shape), beta).ravel()

    found = solve_ivp(field, (0.0, time), points.numpy().ravel(), method="DOP853", rtol=1e-9, atol=1e-11)
    return torch.from_numpy(found.y[:, -1].reshape(shape))


@claim(
    "R5",
    source=Source.GESHKOVSKI,
    place='"A mathematical perspective on transformers", section 6.1, lemma on cone collapse (6.4, number from memory)',
    title="Tokens in a hemisphere converge to one point",
    wording=(
        "Under self-attention with identity matrices on the sphere, tokens that start in an open hemisphere converge"
        " exponentially fast to one point, for every β ≥ 0."
    ),
    reading=(
        "Our reading: for 12 random tokens with x·w ≥ 0.3 in 3 dimensions (36 in 8 with full sizes) and β = 0, 1 and 2,"
        " Euler steps of h = 0.1 bring the diameter below 0.001 by time 25; over the last fifth it falls by the factor"
        " 1 − h in a step, that of the flow linearized at one point, with 0.1 % in the exponent; at time 2, steps of h"
        " and h / 2 extrapolate to the exact flow within h^2. The control starts at the vertices of a regular simplex,"
        " which no open hemisphere contains."
    ),
    reference="scipy's solve_ivp of order eight on the field in numpy, and the rate of the linearized flow",
    formula="‖x_i(t) − x*‖ ≤ C e^{−λ t}",
    correction="",
)
def one_point(trial: Trial) -> Evidence:
    """Diameters, their exponent at the end, and distances to the exact flow; the control starts at a simplex."""
    normal = normals(trial)
    count, dim = trial.size(12, 36), trial.size(3, 8)
    tokens = normal(count, dim)
    # As high as a uniform point of the hemisphere, but not below 0.3: opposite tokens at its rim rest for long (R13).
    high = 0.3 + 0.7 * (tokens[:, :1] / tokens.norm(dim=-1, keepdim=True)).abs()
    tokens = torch.cat([high, (1 - high.square()).sqrt() * normalize(tokens[:, 1:], dim=-1)], -1)
    # The vertices sum to zero: whatever w is, one of them has x·w ≤ 0.
    corners = torch.eye(dim + 1, dtype=torch.float64) - 1 / (dim + 1)
    simplex = (corners @ torch.linalg.svd(corners)[0][:, :dim]).repeat(count // (dim + 1), 1)
    size, steps, betas = 0.1, 250, (0.0, 1.0, 2.0)

    def run(start: Tensor, beta: float) -> tuple[Gap, Tensor]:
        found = sphere_flow(start, beta=beta, steps=steps, step_size=size, observe=["max_distance"], every=steps // 5)
        diameters = found.observables["max_distance"]
        # Near one point all weights are equal, and a step shortens every difference by the factor 1 − h.
        rate = float((diameters[-1] / diameters[-2]).log()) / (steps / 5 * math.log1p(-size))
        once, twice = (
            sphere_flow(start, beta=beta, steps=count, step_size=2.0 / count, observe=[], every=count).cloud
            for count in (20, 40)
        )
        # Extrapolation takes the error of order h away and leaves that of order h^2.
        off = float((2 * twice - once - solved(normalize(start, dim=-1), beta, 2.0)).abs().max())
        return widest(Gap(float(diameters[-1]), 1e-3), Gap(abs(rate - 1), 1e-3), Gap(off, size**2)), diameters

    found, broken = ({beta: run(start, beta) for beta in betas} for start in (tokens, simplex))
    return Evidence(
        printed=widest(*(gap for gap, _ in found.values())),
        control=widest(*(gap for gap, _ in trial.control(broken, found).values())),
        curve=Curve(
            [0.0, 5.0, 10.0, 15.0, 20.0, 25.0],
            {f"β = {beta:g}": diameters.tolist() for beta, (_, diameters) in found.items()},
            x_label="time",
            y_label="diameter",
            log_y=True,
        ),
    )


@claim(
    "R13",
    source=Source.GESHKOVSKI_2024,
    place='"Dynamic metastability in the self-attention model", section 2, theorem on metastability (from memory)',
    title="Clusters persist for a time exponential in beta",
    wording=(
        "Tokens that start in well separated caps of the sphere collapse within their caps and stay there for a time"
        " exponential in β, although all of them converge to one point in the end."
    ),
    reading=(
        "Our reading: three caps 1 − x·w ≤ ε = 0.01 around orthogonal axes in 3 dimensions (5 with full sizes), 3"
        " random tokens in each, β = 20: at the time (ε / 9) e^{(1 − α) β} = 221, α the largest inner product between"
        " caps of height 2ε, all tokens are within caps of that height, each cap with a squared diameter below"
        " 2 e^{−β / 5}; the constants of both bounds are the theorem's from memory. Two clusters of 1 to 4 tokens at an"
        " angle from 1.2 to 1.5 need to halve it, at β = 4 and 8, the time of the equation for their angle to 2 %. The"
        " control has β = 1 in the place of 20."
    ),
    reference="the bounds of the theorem, from memory, and quadrature of the equation for the angle of two clusters",
    formula=(
        "T = ∫_{θ/2}^{θ} dφ / ((p_12 + p_21) sin φ) ~ e^{β (1 − cos θ)},"
        " p_ab = n_b e^{β cos φ} / (n_a e^β + n_b e^{β cos φ})"
    ),
    correction="",
)
def metastable(trial: Trial) -> Evidence:
    """Heights and diameters of caps at the time of the theorem, and lifetimes of pairs of clusters."""
    normal, generator = normals(trial), trial.generator
    dim, height = trial.size(3, 5), 0.01
    axes = torch.linalg.qr(normal(dim, dim))[0][:3].repeat_interleave(3, 0)
    along = 1 - height * torch.rand(9, 1, generator=generator, dtype=torch.float64)
    across = normal(9, dim)
    across = normalize(across - (across * axes).sum(-1, keepdim=True) * axes, dim=-1)
    tokens = along * axes + (1 - along.square()).sqrt() * across
    closest = math.cos(math.pi / 2 - 2 * math.acos(1 - 2 * height))
    until = height / 9 * math.exp((1 - closest) * 20)

    def caps(beta: float) -> Gap:
        steps = math.ceil(until / 0.5)
        state = sphere_flow(tokens, beta=beta, steps=steps, step_size=until / steps, observe=[], every=steps).cloud
        wide = max(float(torch.pdist(cap).max()) ** 2 for cap in state.split(3))
        out = float((1 - (state * axes).sum(-1)).max())
        return widest(Gap(out, 2 * height), Gap(wide, 2 * math.exp(-20 / 5)))

    angle = 1.2 + 0.3 * float(torch.rand((), generator=generator))
    counts = torch.randint(1, 5, (2,), generator=generator).tolist()
    lives = {beta: life(angle, counts, beta, trial.size(300, 1000)) for beta in (4.0, 8.0)}
    return Evidence(
        printed=widest(caps(20.0), *(Gap(abs(found / expected - 1), 0.02) for found, expected in lives.values())),
        control=caps(trial.control(1.0, 20.0)),
        table={
            "growth of log T from β = 4 to 8": math.log(lives[8.0][0] / lives[4.0][0]),
            "4 (1 − cos θ)": 4 * (1 - math.cos(angle)),
        },
    )


def life(angle: float, counts: list[int], beta: float, steps: int) -> tuple[float, float]:
    """Return the time in which two clusters halve their angle: of the flow, and by quadrature."""
    phi = linspace(angle / 2, angle, 2001)
    near, far = math.exp(beta), torch.exp(beta * torch.cos(phi))
    first, second = counts
    pull = second * far / (first * near + second * far) + first * far / (second * near + first * far)
    expected = float(torch.trapezoid(1 / (pull * torch.sin(phi)), phi))

    corners = torch.tensor([[1.0, 0.0], [math.cos(angle), math.sin(angle)]], dtype=torch.float64)
    start, size = corners.repeat_interleave(torch.tensor(counts), 0), 1.2 * expected / steps
    found = sphere_flow(start, beta=beta, steps=steps, step_size=size, observe=["max_distance"])
    angles = 2 * torch.asin(found.observables["max_distance"] / 2)
    after = int((angles <= angle / 2).nonzero()[0])
    part = float((angles[after - 1] - angle / 2) / (angles[after - 1] - angles[after]))
    return (after - 1 + part) * size, expected
