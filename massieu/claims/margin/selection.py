"""The slides on attention as an SVM, point by point: what holds, what needs a condition, and what is true instead."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from massieu.checks import UserError
from massieu.claims.claim import Curve, Evidence, Gap, Trial, Verdict
from massieu.claims.experiment import apart, normals, widest
from massieu.claims.registry import claim
from massieu.margin import (
    MaxMargin,
    TokenSelection,
    Trajectory,
    descend,
    finite_component,
    locally_optimal,
    log_gap,
    max_margin,
    misalignment,
    random_problem,
)
from massieu.margin.program import one_thread, scipy_module
from massieu.statistics import attend

SLIDES = 'slides "A perspective on the fundamentals of transformers"'
ALIGNED = 0.05  # one minus the correlation, where a direction is the one in question and not another
RATE = 0.15  # of an exponent that is read off two decades


@claim(
    "T1",
    source=f"{SLIDES}, optimisation: norm divergence and token separation",
    statement="The optimal loss is reached if and only if the weights diverge and the best tokens have the top logits.",
    formula="L → L* ⟺ ‖W‖ → ∞ and x_opt^⊤ W z > x_τ^⊤ W z",
    correction=(
        "The margins (x_opt − x_τ)^⊤ W z must all diverge; weights may grow where no token sees them. Likewise for the"
        " softmax: differences of logits must diverge, not their norm."
    ),
    expected=Verdict.HOLDS_CORRECTED,
)
def norm_divergence(trial: Trial) -> Evidence:
    """Loss above the optimum at norms up to 1000: weights that grow apart from the constraints, and along a separating
    direction; the control separates all sequences but one."""
    problem = random_problem(6, 5, 12, generator=trial.generator)
    best = problem.selection()
    found = max_margin(problem).weights
    unseen = outside(problem, normals(trial)(*problem.shape))
    other = best.clone()
    other[0] = problem.scores[0].argmin()

    def gap(weights: Tensor) -> Gap:
        return Gap(max(log_gap(problem, weights, best).value, 0.0), 1e-6)

    def grown(direction: Tensor) -> Tensor:
        return torch.nn.functional.normalize(direction.reshape(-1), dim=0).reshape(direction.shape) * 1000

    printed = grown(unseen) + 0.1 * found
    return Evidence(
        printed=gap(printed),
        corrected=gap(grown(found)),
        control=gap(grown(trial.control(max_margin(problem, selection=other).weights, found))),
        table={
            "norm of the weights as printed": float(printed.norm()),
            "their least margin": float(problem.margins(printed).min()),
            "loss above the optimum at 0.1 W^mm": gap(0.1 * found).measured,
        },
    )


@claim(
    "T2",
    source=f"{SLIDES}, optimisation: softmax and its logits",
    statement="The logits of a sequence are l = X^⊤ W z, and the sum of S(l)_t over τ is one.",
    formula="x^att = X^⊤ S(X^⊤ W z); Σ_τ S(l)_t = 1",
    correction="l = X W z, one logit for each row of X, and the sum is over t.",
    expected=Verdict.HOLDS_CORRECTED,
)
def logits_of_a_sequence(trial: Trial) -> Evidence:
    """The output with either logits, for as many tokens as dimensions, against attention with W z as its query; the
    control transposes W."""
    normal = normals(trial)
    tokens, weights, query = normal(6, 6), normal(6, 6), normal(6)
    expected = attend((weights @ query)[None], tokens, tokens, scale=1.0).output[0]

    def gap(rows: Tensor, weights: Tensor) -> Gap:
        attention = torch.softmax(rows @ weights @ query, -1)
        return widest(apart(tokens.mT @ attention, expected), apart(attention.sum(), torch.ones(())))

    attention = torch.softmax(tokens @ weights @ query, -1)
    return Evidence(
        printed=gap(tokens.mT, weights),
        corrected=gap(tokens, weights),
        control=gap(tokens, trial.control(weights.mT, weights)),
        table={"largest sum over τ, which is 6 S(l)_t": float(6 * attention.max())},
    )


@claim(
    "T3",
    source=f"{SLIDES}, primer: self-attention in four steps",
    statement="Scores q_j^⊤ k_i are normalised over the keys i, and the output of token i is the sum of a_ij v_j.",
    formula="e_ij = q_j^⊤ k_i, a_·j = S(e_·j), x̂_i = Σ_j a_ij v_j; X̂ = S(Q K^⊤) V",
    correction="x̂_j = Σ_i a_ij v_i; the matrix a is the transpose of the slides' own S(Q K^⊤).",
    expected=Verdict.HOLDS_CORRECTED,
)
def indices_of_attention(trial: Trial) -> Evidence:
    """Both sums against attention by our kernel; the control normalises over the queries."""
    normal = normals(trial)
    queries, keys, values = normal(7, 4), normal(7, 4), normal(7, 3)
    expected = attend(queries, keys, values, scale=1.0).output

    def weights(axis: int) -> Tensor:
        return torch.softmax(torch.einsum("jd,id->ij", queries, keys), axis)

    def gap(formula: str, axis: int) -> Gap:
        return apart(torch.einsum(formula, weights(axis), values), expected)

    return Evidence(
        printed=gap("ij,jd->id", 0),
        corrected=gap("ij,id->jd", 0),
        control=gap("ij,id->jd", trial.control(1, 0)),
        table={"largest sum of a_ij over j": float(weights(0).sum(1).max())},
    )


@claim(
    "T4",
    source=f"{SLIDES}, theorem 2 (regularization path)",
    statement="For a smooth, strictly decreasing loss the minimisers of norm R tend to the max-margin direction.",
    formula="lim_{R→∞} W_R / R = W^mm / ‖W^mm‖",
    correction=(
        "If ℓ′ < 0 on the range of the scores. A loss may decrease strictly with ℓ′ = 0 at a best token's score, like"
        " −(x − c)^3: margins of that sequence then count three times, and the limit is another direction."
    ),
    expected=Verdict.CONDITIONAL,
)
def path_direction(trial: Trial) -> Evidence:
    """One minus the correlation of minimisers on a large sphere, for ℓ flat at the best score of the sequence that
    matters most and for ℓ flat beyond all scores; the control has a small sphere."""
    problem = random_problem(6, 6, 10, generator=trial.generator)
    solution = max_margin(problem)
    best = problem.scores.gather(1, problem.selection()[:, None])
    leader = int(solution.dual.sum(-1).argmax())
    twisted = TokenSelection(
        problem.tokens,
        problem.queries * (1 + 2 * torch.nn.functional.one_hot(torch.tensor(leader), 6)[:, None]),
        scores=problem.scores,
    )
    thrice = max_margin(twisted).weights

    def gap(centre: Tensor, radius: float, direction: Tensor) -> Gap:
        least = least_cubic_loss(problem, centre, radius, [solution.weights, thrice])
        return Gap(misalignment(least, direction), 1e-3)

    inside, beyond, radius = best[leader, 0], best.max() + 1, 1000.0
    return Evidence(
        printed=gap(inside, radius, solution.weights),
        conditional=gap(beyond, radius, solution.weights),
        instead=gap(inside, radius, thrice),
        control=gap(beyond, trial.control(1.0, radius), solution.weights),
    )


@claim(
    "T5",
    source=f"{SLIDES}, no unique optimal token",
    statement="With several optimal tokens, training tends to the program that gives them equal logits.",
    formula="(x_t − x_t′)^⊤ W z = 0 for t, t′ ∈ R_i, (x_t − x_τ)^⊤ W z ≥ 1 for τ ∉ R_i",
    correction=(
        "For cross-entropy with mass on several tokens, whose optimum is inside. Where scores are tied under a linear"
        " head, one of the tied tokens is picked, and nothing is asked of the others."
    ),
    expected=Verdict.CONDITIONAL,
)
def several_best_tokens(trial: Trial) -> Evidence:
    """One minus the correlation with the equality program, for tied scores and for shared targets; the control takes
    the program that picks for shared targets."""
    steps = trial.size(500, 5000)
    tied = random_problem(5, 5, 10, kind="tied", generator=trial.generator)
    soft = random_problem(5, 5, 10, kind="soft", generator=trial.generator)
    picked = descend(tied, "ngd", step=10.0, steps=steps, record=[steps])
    shared = descend(soft, "gd", step=10.0, steps=steps, record=[steps])

    def gap(problem: TokenSelection, run: Trajectory, ties: str) -> Gap:
        return Gap(misalignment(run.weights, max_margin(problem, ties=ties).weights), ALIGNED)

    equal, pick = (max_margin(tied, ties=ties) for ties in ("equal", "pick"))
    return Evidence(
        printed=gap(tied, picked, "equal"),
        conditional=gap(soft, shared, "equal"),
        instead=Gap(misalignment(picked.weights, picked.local.weights), 1e-3),
        control=gap(soft, shared, trial.control("pick", "equal")),
        table={
            "norm of the equality program": float(equal.weights.norm()),
            "norm of the best pick": float(pick.weights.norm()),
            "1 − corr with the best pick": misalignment(picked.weights, pick.weights),
        },
    )


@claim(
    "T6",
    source=f"{SLIDES}, conjecture on better models",
    statement="With several tokens selected, the weights are a finite part and a growing multiple of the margin's.",
    formula="W_k ≈ W^fin + C_k W^mm, (x_t − x_τ)^⊤ W^fin z = log s*_t / s*_τ",
    correction=(
        "In projection and in direction, not in norm: Π W_k → W^fin on the span of (x_t − x_τ) z^⊤ within the selected"
        " sets, where W^fin is unique and orthogonal to W^mm, and C_k ~ log k; the residual does not vanish."
    ),
    expected=Verdict.HOLDS_CORRECTED,
)
def finite_part(trial: Trial) -> Evidence:
    """The residual over the finite part; the projection, the growth of C_k over a decade and the equations of W^fin;
    the control exchanges the targets of each sequence's two tokens."""
    problem = random_problem(5, 6, 12, kind="soft", generator=trial.generator)
    steps = trial.size(1000, 10000)
    run = descend(problem, "gd", step=10.0, steps=steps, record=[steps // 10])
    swapped = torch.where(problem.best, 1 - problem.scores, 0.0)
    exchanged = TokenSelection(problem.tokens, problem.queries, targets=swapped)

    def gap(problem: TokenSelection) -> Gap:
        finite = finite_component(problem)
        before, after = (finite.split(weights) for weights in run.snapshots[1:])
        growth = (after.coefficient - before.coefficient) / math.log(10)
        return widest(
            Gap(after.error / float(finite.weights.norm()), ALIGNED),
            Gap(abs(growth - 1), ALIGNED),
            Gap(misalignment(run.weights, finite.solution.weights), ALIGNED),
            Gap(abs(float((finite.weights * finite.solution.weights).sum())), 1e-6),
            apart(finite.attention, problem.scores),  # which are the targets
        )

    finite = finite_component(problem)
    splits = [finite.split(weights) for weights in run.snapshots[1:]]
    sizes = [float(split.residual.norm()) for split in splits]
    return Evidence(
        printed=Gap(sizes[-1] / float(finite.weights.norm()), 0.1),
        corrected=gap(problem),
        control=gap(trial.control(exchanged, problem)),
        table={
            "‖W^fin‖": float(finite.weights.norm()),
            "residual": sizes[-1],
            "residual ten times earlier": sizes[0],
            "C_k": splits[-1].coefficient,
        },
    )


@claim(
    "T7",
    source=f"{SLIDES}, what about GD",
    statement="Gradient descent diverges in the direction of the max-margin solution.",
    formula="W_k / ‖W_k‖ → W^mm / ‖W^mm‖",
    correction=(
        "In that of the tokens that it selects, which need not be the best: the selection is locally optimal, its"
        " program feasible and its support tokens of lower score."
    ),
    expected=Verdict.HOLDS_CORRECTED,
)
def local_selection(trial: Trial) -> Evidence:
    """One minus the correlation with the direction of the best and of the selected tokens, for normalised descent that
    settled elsewhere; the control looks at where it started."""
    steps = trial.size(300, 3000)
    problem, run, tried = stuck(trial, steps)
    local = locally_optimal(problem, run.selection)

    def gap(weights: Tensor) -> Gap:
        return widest(Gap(misalignment(weights, local.solution.weights), 1e-2), Gap(float(not local.optimal), 0.5))

    return Evidence(
        printed=Gap(misalignment(run.weights, run.best.weights), 1e-2),
        corrected=gap(run.weights),
        control=gap(trial.control(run.snapshots[0], run.weights)),
        table={
            "sequences": float(len(run.selection)),
            "of which not on their best token": float((run.selection != problem.selection()).sum()),
            "runs until one settled elsewhere": float(tried),
        },
    )


@claim(
    "T8",
    source=f"{SLIDES}, summary of optimisation, 6",
    statement="Optimizers of practice reach the same solution at a faster rate.",
    formula="W_k / ‖W_k‖ → W^mm / ‖W^mm‖ for Adam",
    correction=(
        "Normalised descent and Polyak's steps do. Adam and sign descent go elsewhere: towards the largest margin for"
        " the norm of the largest entry."
    ),
    expected=Verdict.FAILS,
)
def practical_optimizers(trial: Trial) -> Evidence:
    """One minus the correlation at the end of Adam, and of normalised descent and Polyak; the control takes the signs
    of the gradient."""
    problem = random_problem(4, 4, 16, kind="equal", generator=trial.generator)
    steps = trial.size(500, 2000)
    runs = {
        method: descend(problem, method, step=step, steps=steps, record=4)
        for method, step in (("adam", 0.1), ("sign", 0.1), ("ngd", 10.0), ("polyak", 10.0))
    }

    def gap(*methods: str) -> Gap:
        return widest(*(Gap(float(runs[each].history.misalignment_best.iloc[-1]), ALIGNED) for each in methods))

    signs = runs["sign"].weights
    return Evidence(
        printed=gap("adam"),
        instead=gap("ngd", "polyak"),
        control=gap(trial.control("sign", "ngd"), "polyak"),
        table={
            "1 − corr of sign descent": gap("sign").measured,
            "of normalised descent": gap("ngd").measured,
            "of Polyak": gap("polyak").measured,
            "share of the ℓ∞ margin that sign descent has": float(problem.margins(signs / signs.abs().max()).min())
            / entrywise_margin(problem, max_margin(problem)),
        },
        curve=along({name: run.history.misalignment_best.iloc[1:] for name, run in runs.items()}, runs["ngd"]),
    )


@claim(
    "T9",
    source=f"{SLIDES}, faster optimizers (VDT24)",
    statement="For nearly orthogonal tokens and equal scores but the best, normalised descent and Polyak are fast.",
    formula="⟨W_k / ‖W_k‖, W^mm / ‖W^mm‖⟩ ≥ 1 − C log^2 k / k",
    expected=Verdict.HOLDS,
)
def fast_rate(trial: Trial) -> Evidence:
    """How much slower than log^2 k / k one minus the correlation falls over two decades, as an exponent; the control
    is plain descent. An upper bound: what is measured falls like 1 / k^2 (T10)."""
    generator, steps = trial.generator, trial.size(1000, 3000)
    noise = torch.randn(12, 24, generator=generator, dtype=torch.float64)
    rows = torch.linalg.qr(noise.mT).Q.mT + 2e-3 * noise
    queries = torch.randn(4, 24, generator=generator, dtype=torch.float64)
    scores = torch.tensor([[1.0, 0.0, 0.0]]).expand(4, 3)
    problem = TokenSelection(rows.reshape(4, 3, 24), torch.nn.functional.normalize(queries, dim=-1), scores=scores)
    runs = {method: descend(problem, method, step=100.0, steps=steps, record=8) for method in ("gd", "ngd", "polyak")}

    def excess(method: str) -> Gap:
        history = runs[method].history.iloc[1:]
        bound = np.log(history.step + 1) ** 2 / history.step
        return Gap(max(0.0, exponent(history.step, history.misalignment_best / bound)), 0.05)

    return Evidence(
        printed=widest(excess("ngd"), excess("polyak")),
        control=widest(excess(trial.control("gd", "ngd")), excess("polyak")),
        table={
            "nearly orthogonal": float(problem.assumptions().near_orthogonal),
            **{f"exponent, {name}": rate(run, "misalignment_best") for name, run in runs.items()},
        },
        curve=along({name: run.history.misalignment_best.iloc[1:] for name, run in runs.items()}, runs["ngd"]),
    )


def rate(run: Trajectory, column: str, decades: int = 2) -> float:
    """Exponent of a column of a run's history over the last decades of steps."""
    history = run.history.iloc[1:]
    return exponent(history.step, history[column], decades)


def exponent(steps: Any, values: Any, decades: int = 2) -> float:
    """Slope of the logarithms of values over the last decades of steps, by least squares.

    Example:
        >>> round(exponent(np.array([1, 10, 100, 1000]), np.array([5.0, 1e-2, 1e-4, 1e-6])), 9)
        -2.0
    """
    steps, values = np.asarray(steps, dtype=float), np.asarray(values, dtype=float)
    late = steps >= steps[-1] / 10**decades
    return float(np.polyfit(np.log(steps[late]), np.log(values[late]), 1)[0])


def along(series: dict[str, Any], run: Trajectory) -> Curve:
    """One minus the correlation against the measured steps of a run."""
    values: dict[str, Sequence[float]] = {name: [float(value) for value in each] for name, each in series.items()}
    return Curve(run.history.step.tolist()[1:], values, "step", "1 − corr", log_x=True, log_y=True)


def stuck(trial: Trial, steps: int) -> tuple[TokenSelection, Trajectory, int]:
    """The first random problem whose normalised descent from a large start settles within 100 steps, and on tokens that
    are not best; the run; and how many were tried."""
    for tried in range(1, 51):
        problem = random_problem(6, 8, 10, generator=trial.generator)
        start = 3 * torch.randn(*problem.shape, generator=trial.generator, dtype=torch.float64)
        early = descend(problem, "ngd", step=5.0, steps=100, start=start, record=[100])
        if early.history.selects_best.iloc[-1]:
            continue
        run = descend(problem, "ngd", step=5.0, steps=steps, start=start, record=10)
        if bool((run.selection == early.selection).all()):
            return problem, run, tried
    raise UserError("none of 50 runs settled early on tokens that are not best; draw larger problems")


def outside(problem: TokenSelection, drawn: Tensor) -> Tensor:
    """The part of a matrix that is orthogonal to every constraint, so that no difference of logits sees it."""
    edges = problem.differences(problem.selection())
    rows = torch.einsum("ntd,ne->ntde", edges, problem.queries).reshape(-1, drawn.numel())
    _, sizes, basis = torch.linalg.svd(rows, full_matrices=False)
    seen = basis[sizes > 1e-10 * sizes[0]]
    inside: Tensor = seen.mT @ (seen @ drawn.reshape(-1))
    return drawn - inside.reshape(drawn.shape)


def least_cubic_loss(problem: TokenSelection, centre: Tensor, radius: float, starts: list[Tensor]) -> Tensor:
    """Weights of a given norm and least loss −(x − centre)^3, in logarithms; the best end of several starts."""
    best = problem.scores.gather(1, problem.selection()[:, None])
    log_lead = (best - problem.scores).masked_fill(problem.best, 0.0).log()
    height = best[:, 0] - centre

    def log_loss(direction: Tensor) -> Tensor:
        weights = radius * direction / direction.norm()
        log_short = torch.logsumexp(problem.logits(weights).log_softmax(-1) + log_lead, -1)
        reached = height - log_short.exp()
        # b³ − a³ = (b − a)(b² + ab + a²), of which nothing but (b − a)³ is left at b = 0.
        steep = (height.square() + height * reached + reached.square()).clamp(min=1e-300).log()
        return torch.logsumexp(log_short + torch.where(height == 0, 2 * log_short, steep), -1) / max(1.0, radius)

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        at = torch.from_numpy(flat.copy()).reshape(problem.shape).requires_grad_()
        value = log_loss(at)
        return float(value.detach()), torch.autograd.grad(value, at)[0].numpy().ravel()

    ends = []
    with one_thread():
        for start in starts:
            first = (start / start.norm()).numpy().ravel()
            options = {"maxiter": 400, "ftol": 1e-15, "gtol": 1e-9}
            ends.append(
                scipy_module("optimize").minimize(objective, first, jac=True, options=options, method="L-BFGS-B")
            )
    return torch.from_numpy(min(ends, key=lambda end: end.fun).x).reshape(problem.shape)


def entrywise_margin(problem: TokenSelection, solution: MaxMargin) -> float:
    """The largest margin of weights whose entries are at most one, by linear programming."""
    rivals = solution.rivals.nonzero()
    edges = problem.differences(solution.selection)[rivals[:, 0], rivals[:, 1]]
    rows = torch.einsum("cd,ce->cde", edges, problem.queries[rivals[:, 0]]).flatten(1).numpy()
    size = rows.shape[1]
    found = scipy_module("optimize").linprog(
        np.append(np.zeros(size), -1.0),
        A_ub=np.hstack([-rows, np.ones((len(rows), 1))]),
        b_ub=np.zeros(len(rows)),
        bounds=[(-1, 1)] * size + [(None, None)],
    )
    return float(found.x[-1])
