"""Section 3.3 and appendix B of the paper: attention beside a Hopfield memory, patterns fixed and moving."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from massieu.claims.claim import Curve, Evidence, Gap, Trial, Verdict
from massieu.claims.families import PAPER, above, apart, linspace, normals, widest
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
    rounds = trial.size(60, 2000)

    def run(radius: float, *, fixed: bool = False, residual: bool = False) -> tuple[Tensor, Tensor]:
        cloud = radius * sphere
        keys = cloud if fixed else None
        found = evolve(cloud, steps=rounds, keys=keys, residual=residual, observe=["max_distance"])
        return found.observables["max_distance"], found.cloud

    def left(diameters: Tensor) -> Gap:
        return Gap(float(diameters[-1] / diameters[0]), 1e-6)

    moving = {radius: run(radius)[0] for radius in (0.5, 1.0, 2.0, 3.0)}
    bounds = [above(seen[1:], -math.expm1(-2 * radius**2) * seen[:-1]) for radius, seen in moving.items()]
    fixed, state = run(5.0, fixed=True)
    return Evidence(
        printed=left(fixed),
        conditional=widest(left(moving[0.5]), left(moving[1.0]), *bounds),
        control=left(run(0.5, residual=True)[0][:12]),
        table={
            "fixed points of 12 fixed patterns": float(clusters(state, 1e-3)),
            "blocks to 1e-6 of the diameter, radius 0.5": float((moving[0.5] > 1e-6 * moving[0.5][0]).sum()),
            "radius 1": float((moving[1.0] > 1e-6 * moving[1.0][0]).sum()),
            f"diameter left after {rounds} blocks, radius 3": float(moving[3.0][-1] / moving[3.0][0]),
        },
        curve=Curve(
            list(range(31)),
            {f"moving, radius {r:g}": x[:31].clamp(min=1e-16).tolist() for r, x in moving.items()}
            | {"fixed, radius 5": fixed[:31].tolist()},
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

    def integral(quadratic: float) -> Tensor:
        return torch.logsumexp(-energy(plane, quadratic), -1) + 2 * torch.log(line[1] - line[0])

    closed = math.log(2 * math.pi) + torch.logsumexp(patterns.square().sum(-1) / 2, -1)
    square = gradient(energy, state).square().sum(-1)
    falls, dictionary = [], []
    for tau in (0.1, 0.5, 1.0, 1.5, 1.9):
        moved = hopfield_step(state, patterns, tau=tau)
        falls.append(above(energy(moved), energy(state) - tau * (1 - tau / 2) * square))
    for step in (0.1, 1.0, 10.0):
        inner = hopfield_step(state, patterns, tau=hopfield_time(step))
        dictionary.append(apart((1 + step) * inner, ascend(state, patterns, step=step)))

    rise = energy(ascend(state, patterns)) > energy(state)
    return Evidence(
        printed=widest(apart(integral(0.5), closed), *falls, *dictionary),
        control=apart(integral(0.0), closed),
        table={"share of states whose energy rises by residual attention": float(rise.double().mean())},
    )


@claim(
    "X10",
    source=f"{PAPER}, appendix B",
    statement="Residual attention is a step of a Hopfield memory: after a layer norm they are the same.",
    formula="LN(η + s m(η)) = LN((1 − τ) η + τ m(η)), τ = s / (1 + s + sσ^2)",
    expected=Verdict.HOLDS,
)
def hopfield_dictionary(trial: Trial) -> Evidence:
    """Both after layer norm for steps 0.01 to 100 and keys that are points or Gaussians; the control has τ = s."""
    normal = normals(trial)
    atoms, dim = trial.size(16, 512), trial.size(6, 64)
    patterns, state = normal(atoms, dim), normal(30, dim)
    steps = (0.01, 0.1, 1.0, 10.0, 100.0)

    def gap(step: float, tau: float) -> Gap:
        memory = layer_norm(hopfield_step(state, patterns, tau=tau))
        return apart(layer_norm(ascend(state, patterns, step=step)), memory)

    spread = 0.7
    around = spread * torch.eye(dim, dtype=torch.float64).expand(atoms, dim, dim)
    smooth = GaussianMixture(torch.zeros(atoms, dtype=torch.float64), patterns, around)
    memory = layer_norm(hopfield_step(state, patterns, tau=hopfield_time(2.0, spread)))
    return Evidence(
        printed=widest(
            apart(layer_norm(state + 2.0 * smooth.mean(state)), memory),
            *(gap(step, hopfield_time(step)) for step in steps),
        ),
        control=gap(0.5, 0.5),
        table={f"τ for s = {step:g}": hopfield_time(step) for step in steps},
    )
