"""Section 3.3 and appendix B of the paper: attention beside a Hopfield memory, patterns fixed and moving."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from massieu.claims.claim import Curve, Evidence, Gap, Source, Trial
from massieu.claims.experiment import above, apart, linspace, normals, widest
from massieu.claims.registry import claim
from massieu.dynamics import OBSERVABLES, Regime, ascend, clusters, evolve, hopfield_step, hopfield_time, layer_norm
from massieu.measures import GaussianMixture
from massieu.measures.measure import gradient

RADII = (0.5, 1.0, 2.0, 3.0)


@claim(
    "C20",
    source=Source.PAPER,
    place="section 3.3, first paragraph",
    title="Attention without residual contracts and risks collapse",
    wording=(
        "Without a residual connection, repeated attention would contract the hidden states into the interior, risking"
        " a collapse to a single fixed point."
    ),
    reading=(
        "12 points on a sphere of radius R in 3 dimensions, which are also the keys, as in the paper: in 30 blocks (60"
        " in full) every block shrinks their diameter by the factor 1 − e^{−2 R^2} at least, and their extent in 50"
        " directions does not grow, for R = 0.5, 1, 2 and 3. The risk is real: for R = 0.5 and 1 they collapse to one"
        " point, to 1e-6 of the diameter. It is not a certainty within any fixed time: the page of `massieu verify"
        " --out` shows what is left for R = 3 and the fixed points of frozen keys. The control keeps the residual"
        " connection."
    ),
    reference="Dobrushin's contraction factor in closed form, and blocks by softmax averages written out in torch",
    formula="diam(m(X)) ≤ (1 − e^{−2 R^2}) diam(X), conv m(X) ⊂ conv X",
)
def collapse(trial: Trial) -> Evidence:
    """Diameters and extents under attention alone; the control keeps the residual connection."""
    normal = normals(trial)
    sphere, directions = (torch.nn.functional.normalize(normal(*size), dim=-1) for size in ((12, 3), (50, 3)))
    few, many = trial.size(30, 60), trial.size(60, 2000)

    def run(radius: float, steps: int, *, fixed: bool = False, residual: bool = False) -> dict[str, Tensor]:
        return _attended(radius * sphere, directions, steps, fixed=fixed, residual=residual)

    def left(seen: dict[str, Tensor]) -> Gap:
        return Gap(float(seen["diameter"][-1] / seen["diameter"][0]), 1e-6)

    def gap(residual: bool) -> Gap:
        seen = {radius: run(radius, few, residual=residual) for radius in RADII}
        return widest(left(seen[0.5]), left(seen[1.0]), *(_contracted(*each) for each in seen.items()))

    moving, fixed = {radius: run(radius, few) for radius in RADII}, run(5.0, many, fixed=True)
    return Evidence(
        printed=gap(residual=False),
        control=gap(residual=trial.control(True, False)),
        table={
            "fixed points of 12 fixed patterns": float(clusters(fixed["cloud"][-1], 1e-3)),
            "blocks to 1e-6 of the diameter, radius 0.5": float((moving[0.5]["diameter"] > 1e-6).sum()),
            "radius 1": float((moving[1.0]["diameter"] > 1e-6 * moving[1.0]["diameter"][0]).sum()),
            f"diameter left after {many} blocks, radius 3": left(run(3.0, many)).measured,
        },
        curve=Curve(
            list(range(few + 1)),
            {f"moving, radius {r:g}": x["diameter"].clamp(min=1e-16).tolist() for r, x in moving.items()}
            | {"fixed, radius 5": fixed["diameter"][: few + 1].tolist()},
            x_label="blocks",
            y_label="diameter",
            log_y=True,
        ),
    )


def _attended(start: Tensor, directions: Tensor, steps: int, *, fixed: bool, residual: bool) -> dict[str, Tensor]:
    """Return diameter, extents in some directions and the cloud itself after each block, over moving or fixed keys."""

    def extent(cloud: Tensor, regime: Regime) -> Tensor:
        return (cloud @ directions.T).amax(0)

    observe = {"diameter": OBSERVABLES["max_distance"], "extent": extent, "cloud": lambda cloud, regime: cloud}
    keys = start if fixed else None
    return evolve(start, steps=steps, keys=keys, residual=residual, observe=observe).observables


def _contracted(radius: float, seen: dict[str, Tensor]) -> Gap:
    """Return the excess over Dobrushin's bound, the growth of extents, and the error of three blocks written out."""
    cloud, diameter, extent = seen["cloud"][0], seen["diameter"], seen["extent"]
    for _ in range(3):
        cloud = torch.softmax(cloud @ cloud.T, -1) @ cloud
    bound = -math.expm1(-2 * radius**2) * diameter[:-1]
    within = widest(above(diameter[1:], bound), above(extent[1:], extent[:-1]))
    return widest(within, apart(seen["cloud"][3], cloud))


@claim(
    "C38",
    source=Source.PAPER,
    place="section 6; appendix B, last paragraph",
    title="The quadratic term of the Hopfield energy keeps Z finite",
    wording=(
        "The residual connection is the initial point of a gradient update; the Hopfield energy has a quadratic term"
        " instead, which keeps its partition function finite and suggests Gaussian distributions."
    ),
    reading=(
        "For 6 patterns in the plane: the integral of e^{−E} on a grid is that of a mixture of Gaussians around the"
        " patterns, and e^{−E} its density, to 1e-9. At 200 states (5000 in full) residual attention is a step up log Z"
        " from the state, a Hopfield step is one down E, of which E falls by at least τ (1 − τ / 2) ‖∇E‖^2 for five τ"
        " up to 1.9; one is the other up to a factor 1 + s, for s = 0.1, 1 and 10. The control leaves the quadratic"
        " term out. M11 has the sentence that the term models the skip connection."
    ),
    reference="a sum over a grid, torch.distributions, and gradients of the energy by autograd",
    formula="∫ e^{−E} = (2π)^{D/2} Σ_n e^{‖x_n‖^2 / 2} < ∞; η + s ∇log Z(η); ξ − τ ∇E(ξ) = (1 − τ) ξ + τ m(ξ)",
)
def quadratic_term(trial: Trial) -> Evidence:
    """An integral and a density, both updates by autograd, falls of the energy; the control has no quadratic term."""
    normal = normals(trial)
    patterns, state = 1.5 * torch.tanh(normal(6, 2)), 2 * normal(trial.size(200, 5000), 2)
    line = linspace(-12.0, 12.0, 241)
    plane = torch.cartesian_prod(line, line)

    def energy(xi: Tensor, quadratic: float = 0.5) -> Tensor:
        return quadratic * xi.square().sum(-1) - torch.logsumexp(xi @ patterns.T, -1)

    def same(step: float) -> Gap:
        """Residual attention as ascent from the state, and as a Hopfield step up to a factor."""
        moved, inner = ascend(state, patterns, step=step), hopfield_step(state, patterns, tau=hopfield_time(step))
        slope = gradient(lambda xi: -energy(xi, 0.0), state)
        return widest(apart(moved, state + step * slope), apart((1 + step) * inner, moved))

    def fall(tau: float, quadratic: float) -> Gap:
        slope = gradient(lambda xi: energy(xi, quadratic), state)
        moved = hopfield_step(state, patterns, tau=tau)
        least = energy(state, quadratic) - tau * (1 - tau / 2) * slope.square().sum(-1)
        return widest(apart(moved, state - tau * slope), above(energy(moved, quadratic), least))

    def gap(quadratic: float) -> Gap:
        integral = torch.logsumexp(-energy(plane, quadratic), -1) + 2 * torch.log(line[1] - line[0])
        closed = math.log(2 * math.pi) + torch.logsumexp(patterns.square().sum(-1) / 2, -1)
        mixture = torch.distributions.MixtureSameFamily(
            torch.distributions.Categorical(logits=patterns.square().sum(-1) / 2),
            torch.distributions.MultivariateNormal(patterns, torch.eye(2, dtype=torch.float64)),
        )
        density = apart(-energy(state, quadratic) - closed, mixture.log_prob(state))
        falls = [fall(tau, quadratic) for tau in (0.1, 0.5, 1.0, 1.5, 1.9)]
        return widest(apart(integral, closed), density, *falls, *(same(step) for step in (0.1, 1.0, 10.0)))

    rise = energy(ascend(state, patterns)) > energy(state)
    return Evidence(
        printed=gap(0.5),
        control=gap(trial.control(0.0, 0.5)),
        table={"share of states whose energy rises by residual attention": float(rise.double().mean())},
    )


@claim(
    "X10",
    source=Source.OURS,
    place="on section 6 and appendix B of the paper",
    title="After a layer norm, residual and Hopfield steps agree",
    wording="After a layer norm, residual attention of any step is a step of a Hopfield memory, of another length.",
    reading=(
        "30 states and 16 patterns in 6 dimensions (512 in 64 in full), steps 0.01 to 100 over keys that are points,"
        " and one of 2 over Gaussian keys of variance 0.7 against τ = s / (1 + s + s σ^2): equal after layer norm to"
        " 1e-9. In the control τ = s."
    ),
    reference="a gradient of the energy by autograd for the Hopfield step",
    formula="LN(η + s m(η)) = LN((1 − τ) η + τ m(η)), τ = s / (1 + s + sσ^2)",
)
def hopfield_dictionary(trial: Trial) -> Evidence:
    """Both after layer norm for steps 0.01 to 100 and keys that are points or Gaussians; the control has τ = s."""
    normal = normals(trial)
    atoms, dim = trial.size(16, 512), trial.size(6, 64)
    patterns, state = normal(atoms, dim), normal(30, dim)

    def energy(xi: Tensor) -> Tensor:
        return 0.5 * xi.square().sum(-1) - torch.logsumexp(xi @ patterns.T, -1)

    steps = (0.01, 0.1, 1.0, 10.0, 100.0)

    spread = 0.7
    around = spread * torch.eye(dim, dtype=torch.float64).expand(atoms, dim, dim)
    smooth = GaussianMixture(torch.zeros(atoms, dtype=torch.float64), patterns, around)

    def gap(time: Callable[[float, float], float]) -> Gap:
        def off(moved: Tensor, tau: float) -> Gap:
            return apart(layer_norm(moved), layer_norm(state - tau * gradient(energy, state)))

        return widest(
            off(state + 2.0 * smooth.mean(state), time(2.0, spread)),
            *(off(ascend(state, patterns, step=step), time(step, 0.0)) for step in steps),
        )

    return Evidence(
        printed=gap(hopfield_time),
        control=gap(trial.control(lambda step, _: step, hopfield_time)),
        table={f"τ for s = {step:g}": hopfield_time(step) for step in steps},
    )
