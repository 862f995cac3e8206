"""Section 3.3 and appendix B of the paper: attention beside a Hopfield memory, patterns fixed and moving."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from massieu.claims.claim import Curve, Evidence, Gap, Trial, Verdict
from massieu.claims.experiment import above, apart, linspace, normals, widest
from massieu.claims.measures.families import PAPER
from massieu.claims.registry import claim
from massieu.dynamics import ascend, clusters, evolve, hopfield_step, hopfield_time, layer_norm
from massieu.measures import GaussianMixture
from massieu.measures.measure import gradient


@claim(
    "C20",
    source=f"{PAPER}, section 3.3",
    statement="Without a residual connection, repeated attention contracts the hidden states to a single point.",
    formula="diam(m(X)) < diam(X) → 0",
    correction=(
        "Moving patterns do, diam' ≤ (1 − e^{−2 R^2}) diam in a ball of radius R, if after a time exponential in R^2."
        " Fixed patterns do not: there are several fixed points."
    ),
    expected=Verdict.CONDITIONAL,
)
def collapse(trial: Trial) -> Evidence:
    """Diameters under attention alone, patterns fixed and moving; the control keeps the residual connection."""
    normal = normals(trial)
    sphere = torch.nn.functional.normalize(normal(12, 3), dim=-1)
    few, many = 30, trial.size(60, 2000)

    def run(radius: float, rounds: int, *, fixed: bool = False, residual: bool = False) -> tuple[Tensor, Tensor]:
        cloud = radius * sphere
        keys = cloud if fixed else None
        found = evolve(cloud, steps=rounds, keys=keys, residual=residual, observe=["max_distance"])
        return found.observables["max_distance"], found.cloud

    def left(diameters: Tensor) -> Gap:
        return Gap(float(diameters[-1] / diameters[0]), 1e-6)

    def seen(residual: bool) -> dict[float, Tensor]:
        return {radius: run(radius, few, residual=residual)[0] for radius in (0.5, 1.0, 2.0, 3.0)}

    def gap(moving: dict[float, Tensor]) -> Gap:
        bounds = [above(each[1:], -math.expm1(-2 * radius**2) * each[:-1]) for radius, each in moving.items()]
        return widest(left(moving[0.5]), left(moving[1.0]), *bounds)

    moving = seen(residual=False)
    fixed, state = run(5.0, many, fixed=True)
    return Evidence(
        printed=left(fixed),
        conditional=gap(moving),
        control=gap(seen(residual=trial.control(True, False))),
        table={
            "fixed points of 12 fixed patterns": float(clusters(state, 1e-3)),
            "blocks to 1e-6 of the diameter, radius 0.5": float((moving[0.5] > 1e-6 * moving[0.5][0]).sum()),
            "radius 1": float((moving[1.0] > 1e-6 * moving[1.0][0]).sum()),
            f"diameter left after {many} blocks, radius 3": left(run(3.0, many)[0]).measured,
        },
        curve=Curve(
            list(range(few + 1)),
            {f"moving, radius {r:g}": x.clamp(min=1e-16).tolist() for r, x in moving.items()}
            | {"fixed, radius 5": fixed[: few + 1].tolist()},
            x_label="blocks",
            y_label="diameter",
            log_y=True,
        ),
    )


@claim(
    "C38",
    source=f"{PAPER}, section 6 and appendix B",
    statement="The quadratic term of the Hopfield energy keeps its partition function finite and models the skip.",
    formula="∫ e^{−E} = (2π)^{D/2} Σ_n e^{‖x_n‖^2 / 2}; η + s m = (1 + s) [(1 − τ) η + τ m], τ = s / (1 + s)",
    expected=Verdict.HOLDS,
)
def quadratic_term(trial: Trial) -> Evidence:
    """An integral over the plane, both updates, and falls of the energy; the control leaves the quadratic term out."""
    normal = normals(trial)
    patterns, state = 1.5 * torch.tanh(normal(6, 2)), 2 * normal(trial.size(200, 5000), 2)
    line = linspace(-12.0, 12.0, 241)
    plane = torch.cartesian_prod(line, line)

    def energy(xi: Tensor, quadratic: float = 0.5) -> Tensor:
        return quadratic * xi.square().sum(-1) - torch.logsumexp(xi @ patterns.T, -1)

    def same(step: float) -> Gap:
        inner = hopfield_step(state, patterns, tau=hopfield_time(step))
        return apart((1 + step) * inner, ascend(state, patterns, step=step))

    def fall(tau: float, quadratic: float) -> Gap:
        square = gradient(lambda xi: energy(xi, quadratic), state).square().sum(-1)
        moved = hopfield_step(state, patterns, tau=tau)
        return above(energy(moved, quadratic), energy(state, quadratic) - tau * (1 - tau / 2) * square)

    def gap(quadratic: float) -> Gap:
        integral = torch.logsumexp(-energy(plane, quadratic), -1) + 2 * torch.log(line[1] - line[0])
        closed = math.log(2 * math.pi) + torch.logsumexp(patterns.square().sum(-1) / 2, -1)
        falls = [fall(tau, quadratic) for tau in (0.1, 0.5, 1.0, 1.5, 1.9)]
        return widest(apart(integral, closed), *falls, *(same(step) for step in (0.1, 1.0, 10.0)))

    rise = energy(ascend(state, patterns)) > energy(state)
    return Evidence(
        printed=gap(0.5),
        control=gap(trial.control(0.0, 0.5)),
        table={"share of states whose energy rises by residual attention": float(rise.double().mean())},
    )


@claim(
    "X10",
    source="mathematics of this project, on appendix B of the paper",
    statement="After a layer norm, residual attention of any step is a step of a Hopfield memory, of another length.",
    formula="LN(η + s m(η)) = LN((1 − τ) η + τ m(η)), τ = s / (1 + s + sσ^2)",
    expected=Verdict.HOLDS,
)
def hopfield_dictionary(trial: Trial) -> Evidence:
    """Both after layer norm for steps 0.01 to 100 and keys that are points or Gaussians; the control has τ = s."""
    normal = normals(trial)
    atoms, dim = trial.size(16, 512), trial.size(6, 64)
    patterns, state = normal(atoms, dim), normal(30, dim)
    steps = (0.01, 0.1, 1.0, 10.0, 100.0)

    spread = 0.7
    around = spread * torch.eye(dim, dtype=torch.float64).expand(atoms, dim, dim)
    smooth = GaussianMixture(torch.zeros(atoms, dtype=torch.float64), patterns, around)

    def gap(time: Callable[[float, float], float]) -> Gap:
        def off(moved: Tensor, tau: float) -> Gap:
            return apart(layer_norm(moved), layer_norm(hopfield_step(state, patterns, tau=tau)))

        return widest(
            off(state + 2.0 * smooth.mean(state), time(2.0, spread)),
            *(off(ascend(state, patterns, step=step), time(step, 0.0)) for step in steps),
        )

    return Evidence(
        printed=gap(hopfield_time),
        control=gap(trial.control(lambda step, _: step, hopfield_time)),
        table={f"τ for s = {step:g}": hopfield_time(step) for step in steps},
    )
