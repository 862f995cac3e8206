"""The slides on attention as a support vector machine, point by point."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from massieu.claims.claim import Evidence, Gap, Source, Trial, Verdict
from massieu.claims.experiment import apart, normals, widest
from massieu.claims.registry import claim
from massieu.margin import (
    TokenSelection,
    Trajectory,
    descend,
    finite_component,
    max_margin,
    misalignment,
    random_problem,
)
from massieu.margin.program import one_thread, scipy_module
from massieu.statistics import attend

ALIGNED = 0.05  # one minus the correlation, where a direction is the one in question and not another


@claim(
    "T1",
    source=Source.SLIDES,
    place='optimization, "Norm divergence" and "Token separation"',
    title="Norm divergence and token separation give the optimal loss",
    wording=(
        "The optimal loss is reached, asymptotically, if and only if the norm of W diverges and the best token's"
        " logit exceeds all others."
    ),
    reading=(
        "For six sequences of five random tokens in 12 dimensions, weights of norm 1000 that satisfy both"
        " conditions, grown apart from all constraints, and weights of that norm along a separating direction: the"
        " loss above the optimum is at most 1e-6."
    ),
    reference="the logistic loss of the attention output, written out in torch",
    formula="L → L* ⟺ ‖W‖ → ∞ and x_opt^⊤ W z > x_τ^⊤ W z",
    correction=(
        "Not sufficient: the margins (x_opt − x_τ)^⊤ W z must all diverge, and weights may grow where no token sees"
        " them. Likewise for the softmax: differences of logits must diverge, not their norm."
    ),
    expected=Verdict.HOLDS_CORRECTED,
)
def norm_divergence(trial: Trial) -> Evidence:
    """Loss above the optimum at norm 1000 in two directions; the control separates all sequences but one."""
    problem = random_problem(6, 5, 12, generator=trial.generator)
    best = problem.selection()
    found = max_margin(problem).weights
    unseen = outside(problem, normals(trial)(*problem.shape))
    other = best.clone()
    other[0] = problem.scores[0].argmin()
    softplus = torch.nn.functional.softplus

    def gap(weights: Tensor) -> Gap:
        logits = torch.einsum("ntd,de,ne->nt", problem.tokens, weights, problem.queries)
        reached = (logits.softmax(-1) * problem.scores).sum(-1)
        loss = (softplus(-reached) - softplus(-problem.scores.amax(-1))).mean()
        return Gap(max(float(loss), 0.0), 1e-6)

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
    source=Source.SLIDES,
    place='optimization, "The only way to attain S(l)_t = 1"',
    title="The logits of a sequence and the sum of its softmax",
    wording="The logits are l = X^⊤ W z, and the sum over τ of S(l)_t is one.",
    reading=(
        "For six random tokens in six dimensions, where both forms have a shape, the output with these logits is"
        " attention with W z as its query, and the sum is one, to 1e-9."
    ),
    reference="the softmax and the sum, written out in torch, beside our attention",
    formula="x^att = X^⊤ S(X^⊤ W z); Σ_τ S(l)_t = 1",
    correction=(
        "l = X W z, as the slides write elsewhere, one logit for each row of X, and the sum is over t. The symbols were"
        " read from extracted text, so that the misprints may be those of the extraction."
    ),
    expected=Verdict.HOLDS_CORRECTED,
)
def logits_of_a_sequence(trial: Trial) -> Evidence:
    """The output with either logits against attention with the query W z; the control transposes W."""
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
    source=Source.SLIDES,
    place="primer, self-attention in four steps",
    title="Indices of the scores and of the attention output",
    wording=(
        "The scores q_j^⊤ k_i are normalized over i into a_ij, and the output of token i is the sum over j of a_ij"
        " v_j; together X̂ = S(Q K^⊤) V."
    ),
    reading=(
        "For seven random tokens, keys in four and values in three dimensions, the sum as printed is the output of"
        " attention to 1e-9."
    ),
    reference="both sums written out in torch, beside our attention",
    formula="e_ij = q_j^⊤ k_i, a_·j = S(e_·j), x̂_i = Σ_j a_ij v_j; X̂ = S(Q K^⊤) V",
    correction=(
        "x̂_j = Σ_i a_ij v_i; the matrix a is the transpose of the slides' own S(Q K^⊤). The indices were read from"
        " extracted text."
    ),
    expected=Verdict.HOLDS_CORRECTED,
)
def indices_of_attention(trial: Trial) -> Evidence:
    """Both sums against attention by our kernel; the control normalizes over the queries."""
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
    source=Source.SLIDES,
    place="optimization, theorem 2 (regularization path)",
    title="The regularization path tends to the max-margin direction",
    wording=(
        "For a smooth, strictly decreasing loss, unique optimal tokens and a feasible program, minimizers of the"
        " loss in a ball of radius R tend in direction to the max-margin solution."
    ),
    reading=(
        "Six sequences of six random tokens in 10 dimensions and the loss −(x − c)^3, with c at the best score of"
        " one sequence and beyond all scores: the minimizer on the sphere of radius 1000, the best end of two"
        " starts of L-BFGS, has one minus correlation at most 1e-3."
    ),
    reference="L-BFGS on the loss over the sphere, by autograd",
    formula="lim_{R→∞} W_R / R = W^mm / ‖W^mm‖",
    correction=(
        "If ℓ′ < 0 on the range of the scores. A loss may decrease strictly with ℓ′ = 0 at a best token's score, like"
        " −(x − c)^3: margins of that sequence then count three times, and the limit is another direction."
    ),
    expected=Verdict.CONDITIONAL,
)
def path_direction(trial: Trial) -> Evidence:
    """One minus the correlation of minimizers on a large sphere, for two losses; the control has a small one."""
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

    def gap(center: Tensor, radius: float, direction: Tensor) -> Gap:
        least = least_cubic_loss(problem, center, radius, [solution.weights, thrice])
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
    source=Source.SLIDES,
    place='optimization, "No unique optimal token per sequence"',
    title="Several optimal tokens get equal logits",
    wording=(
        "If a sequence has a set of optimal tokens, the direction is the solution of the program that gives them"
        " equal logits and all others less by one."
    ),
    reading=(
        "Our reading: the slides leave open when several tokens are optimal, so both cases are tested. Five"
        " sequences of five random tokens in 10 dimensions, two of them tied under a linear head (normalized"
        " descent) or targets of a cross-entropy (gradient descent): one minus the correlation of the weights with"
        " the solution is at most 0.05 after 500 steps, 5000 at full size."
    ),
    reference="the weights that training reaches, which use no program",
    formula="(x_t − x_t′)^⊤ W z = 0 for t, t′ ∈ R_i, (x_t − x_τ)^⊤ W z ≥ 1 for τ ∉ R_i",
    correction=(
        "For cross-entropy with mass on several tokens, whose optimum is inside. Where scores are tied under a linear"
        " head, one of the tied tokens is picked, and nothing is asked of the others."
    ),
    expected=Verdict.CONDITIONAL,
)
def several_best_tokens(trial: Trial) -> Evidence:
    """One minus the correlation with the equality program; the control takes the program that picks."""
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
    source=Source.SLIDES,
    place='optimization, "Conjecture" on better models',
    title="Weights are a finite part plus a growing multiple",
    wording=(
        "It is conjectured that W_k ≈ W^fin + C_k W^mm with C_k → ∞, where W^fin gives the selected tokens the log"
        " ratios of their attention."
    ),
    reading=(
        "Our reading: the printed form as a difference in norm, at most 0.1 of W^fin, since the slides do not say"
        " in which sense it is meant. Five sequences of six random tokens in 12 dimensions, two of them with mass"
        " in the targets, 1000 steps of gradient descent (10000 at full size)."
    ),
    reference=("the weights that gradient descent reaches, the targets, and log 10 for the growth over a decade"),
    formula="W_k ≈ W^fin + C_k W^mm, (x_t − x_τ)^⊤ W^fin z = log s*_t / s*_τ",
    correction=(
        "In projection and in direction, not in norm: Π W_k → W^fin on the span of (x_t − x_τ) z^⊤ within the selected"
        " sets, where W^fin is unique and orthogonal to W^mm, and C_k ~ log k; the residual does not vanish."
    ),
    expected=Verdict.HOLDS_CORRECTED,
)
def finite_part(trial: Trial) -> Evidence:
    """The residual, the projection and the growth of C_k; the control exchanges the targets of a sequence."""
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


def outside(problem: TokenSelection, drawn: Tensor) -> Tensor:
    """Return the part of a matrix orthogonal to every constraint, which changes no difference of logits."""
    edges = problem.differences(problem.selection())
    rows = torch.einsum("ntd,ne->ntde", edges, problem.queries).reshape(-1, drawn.numel())
    _, sizes, basis = torch.linalg.svd(rows, full_matrices=False)
    seen = basis[sizes > 1e-10 * sizes[0]]
    inside: Tensor = seen.mT @ (seen @ drawn.reshape(-1))
    return drawn - inside.reshape(drawn.shape)


def least_cubic_loss(problem: TokenSelection, center: Tensor, radius: float, starts: list[Tensor]) -> Tensor:
    """Return weights of a given norm and least loss −(x − center)^3, in logarithms: the best end of several starts."""
    best = problem.scores.gather(1, problem.selection()[:, None])
    log_lead = (best - problem.scores).masked_fill(problem.best, 0.0).log()
    height = best[:, 0] - center

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
