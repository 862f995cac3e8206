"""Section 3.1 of the paper: exponential families from an intrinsic measure, and attention as one of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from massieu.claims.claim import Evidence, Gap, Source, Trial, Verdict
from massieu.claims.experiment import apart, jacobian, linspace, normals, one, widest
from massieu.claims.registry import claim
from massieu.measures import Gamma, Points
from massieu.measures.measure import gradient
from massieu.statistics import attend, row_statistics


@claim(
    "C1",
    source=Source.PAPER,
    place="section 3.1, equations 1 and 2",
    title="Z is the Laplace transform of the intrinsic measure",
    wording="The normalizer of an exponential family is the Laplace transform of its intrinsic measure.",
    reading=(
        "Our reading: the transform ∫ h(x) e^{−s x} dx, at s = η as printed and at s = −η in the corrected form, for a"
        " Gamma density of random shape and scale and 11 values of η from −0.8 to 0.8 times the edge of the natural"
        " domain, to 1e-9."
    ),
    reference="integrals of the density of torch.distributions over a grid of log x",
    formula="Z(η) = (L h)(η)",
    correction=(
        "In the usual sign the two-sided transform is taken at −η, and only where the integral is finite: Z(η) = (L"
        " h)(−η). The integral that equation 2 writes out has the right sign."
    ),
    expected=Verdict.HOLDS_CORRECTED,
)
def laplace_transform(trial: Trial) -> Evidence:
    """Integrals of a Gamma law against its closed log normalizer, with both signs; the control integrates another."""
    shape, scale = 1.5 + torch.rand(2, generator=trial.generator, dtype=torch.float64)
    measure = Gamma(shape, scale)
    natural = linspace(-0.8, 0.8, 11)[:, None] / scale
    log_x = linspace(-40.0, 8.0, 1201) + scale.log()

    def gap(sign: float, shape: Tensor) -> Gap:
        log_density = torch.distributions.Gamma(shape, 1 / scale).log_prob(log_x.exp()) + log_x
        transform = torch.logsumexp(log_density - sign * natural * log_x.exp(), -1) + torch.log(log_x[1] - log_x[0])
        return apart(transform, measure.log_normalizer(natural))

    inside, outside = measure.contains(torch.stack([0.99 / scale, 1.01 / scale])[:, None]).tolist()
    return Evidence(
        printed=gap(1.0, shape),
        corrected=gap(-1.0, shape),
        control=gap(-1.0, trial.control(shape + 0.1, shape)),
        table={
            "finite below 1 / scale": float(inside),
            "finite above": float(outside),
            "log Z of Gamma(2.5, 0.7) at 0.6": float(Gamma(2.5, 0.7).log_normalizer(one(0.6))),
        },
    )


@claim(
    "C2",
    source=Source.PAPER,
    place="section 3.1, after equation 2",
    title="On finitely many points, Z is a sum of exponentials",
    wording="For the uniform discrete measure on finitely many points, the normalizer is the sum of the exponentials.",
    reading=(
        "Our reading: uniform means weight one for each point, since weights 1/N shift log Z by log N, which is the"
        " control. log Z of 12 random points in 4 dimensions (in full 512 in 64) at 5 natural parameters, to 1e-9."
    ),
    reference="exponentials added one by one by math.fsum",
    formula="Z(η) = Σ_n e^{x_n·η}",
)
def uniform_measure(trial: Trial) -> Evidence:
    """log Z of points against a sum term by term; the control makes the weights sum to one, which takes off log N."""
    normal = normals(trial)
    atoms, dim = trial.size(12, 512), trial.size(4, 64)
    support, natural = normal(atoms, dim), normal(5, dim)
    rows = (natural @ support.T).tolist()
    total = torch.tensor([math.log(math.fsum(map(math.exp, row))) for row in rows], dtype=torch.float64)
    counting = Points(support)
    probability = Points(support, torch.full((atoms,), -math.log(atoms), dtype=torch.float64))

    def gap(measure: Points) -> Gap:
        return apart(measure.log_normalizer(natural), total)

    return Evidence(
        printed=gap(counting),
        control=gap(trial.control(probability, counting)),
        table={
            "log N": math.log(atoms),
            "log Z, shift": float((probability.log_normalizer(natural) - total).mean()),
            "G*, shift": float((probability.conjugate(natural) - counting.conjugate(natural)).mean()),
            "mean, shift": apart(probability.mean(natural), counting.mean(natural)).measured,
        },
    )


@claim(
    "C3",
    source=Source.PAPER,
    place="section 3.1, equation 3",
    title="Attention weights form an exponential family",
    wording=(
        "With the query as natural parameter and the keys as points, exponential dot product weights are of the form"
        " of an exponential family."
    ),
    reading=(
        "Our reading: with scale one. The weights of attention for 10 random keys and 5 queries in 6 dimensions are"
        " those of equation 3, and their log odds at the sum of two queries are the sums of the log odds at both, to"
        " 1e-9. The control is attention over normalized queries."
    ),
    reference="exponentials of the scores divided by their sum",
    formula="p(k_j | q) = e^{k_j·q} / Z(q)",
)
def attention_weights(trial: Trial) -> Evidence:
    """Attention weights against equation 3, and log odds that add up over queries; the control is cosine attention."""
    normal = normals(trial)
    keys, first, second = normal(10, 6), normal(5, 6), normal(5, 6)

    def weights(query: Tensor, scale: float = 1.0) -> Tensor:
        return attend(query, keys, torch.eye(10, dtype=torch.float64), scale=scale).output

    def cosine_weights(query: Tensor) -> Tensor:
        return weights(torch.nn.functional.normalize(query, dim=-1))

    exponential = (first @ keys.T).exp()

    def gap(of: Callable[[Tensor], Tensor]) -> Gap:
        odds, more, both = (of(query).log().diff(dim=-1) for query in (first, second, first + second))
        return widest(apart(of(first), exponential / exponential.sum(-1, keepdim=True)), apart(odds + more, both))

    beta = 6**-0.5
    slope = gradient(lambda query: row_statistics(query, keys, scale=beta).log_normalizer, first)
    return Evidence(
        printed=gap(weights),
        control=gap(trial.control(cosine_weights, weights)),
        table={"∇log Z_β less β times attention": apart(slope, beta * weights(first, beta) @ keys).measured},
    )


@claim(
    "C4",
    source=Source.PAPER,
    place="section 3.1, equation 4",
    title="The mean statistic is ∇log Z and one-to-one in η",
    wording=(
        "The expected sufficient statistic is the gradient of log Z and can be written as a one-to-one function of η."
    ),
    reading=(
        "Our reading: one-to-one for any measure. At one random η and for one step of length 3 across all differences"
        " of 8 random keys in 16 dimensions: the mean must move by 1e-6, which decides the printed form for these keys"
        " and the conditional one for 64 random keys. The gradient is compared for both to 1e-9."
    ),
    reference="autograd through a log-sum-exp written out in torch, and a null direction by singular values",
    formula="E[u] = ∇log Z(η), injective",
    correction=(
        "One-to-one exactly if no hyperplane contains the support. With N ≤ D tokens one does: m(η + v) = m(η) for"
        " v ⟂ k_i − k_j."
    ),
    expected=Verdict.CONDITIONAL,
)
def one_to_one(trial: Trial) -> Evidence:
    """Motion of the mean when η moves along a null direction, or with keys that span; the control is flat."""
    normal = normals(trial)
    few, many, natural = normal(8, 16), normal(64, 16), normal(1, 16)
    null = torch.linalg.svd(few[1:] - few[:1]).Vh[-1:]

    def still(keys: Tensor) -> Gap:
        """Return the gap to the least motion that must be seen."""
        moved = Points(keys).mean(natural + 3 * null) - Points(keys).mean(natural)
        return Gap(1e-6 / max(float(moved.norm()), 1e-18), 1.0)

    def gap(keys: Tensor) -> Gap:
        slope = gradient(lambda eta: torch.logsumexp(eta @ keys.T, -1), natural)
        return widest(still(keys), apart(Points(keys).mean(natural), slope))

    return Evidence(
        printed=gap(few),
        conditional=gap(many),
        control=gap(trial.control(many - many @ null.T * null, many)),
        table={
            "null directions of 8 keys in 16 dimensions": 16.0
            - float(torch.linalg.matrix_rank(Points(few).affine_span()[0]))
        },
    )


@claim(
    "C5",
    source=Source.PAPER,
    place="section 3.1, after equation 4",
    title="Attention is the gradient of log Z",
    wording=(
        "For the exponential family defined by attention, attention averaging is exactly the gradient of the log"
        " normalizer."
    ),
    reading=(
        "Our reading: attention with values of its own, as transformers have it. For 20 random keys in 6 dimensions (in"
        " full 64) and 3 queries: free values decide the printed form; the keys as values, and other values as the"
        " derivative in a source field with its response to the query, decide the conditional one; all to 1e-9."
    ),
    reference="first and second derivatives by autograd through log-sum-exps written out in torch",
    formula="Σ_j p_j v_j = ∇log Z(q)",
    correction=(
        "Only if the values are the keys, which is what the paper averages. For any others it is the derivative in a"
        " source field: ∂_a log Σ_j e^{q·k_j + a·v_j} at a = 0, and it responds to the query with Cov(v, k)."
    ),
    expected=Verdict.CONDITIONAL,
)
def source_field(trial: Trial) -> Evidence:
    """Attention against the gradient of log Z: free values, values = keys, a source field; the control keeps 1/√d."""
    normal = normals(trial)
    dim, value_dim = trial.size(6, 64), trial.size(4, 64)
    keys, values, query = normal(20, dim), normal(20, value_dim), normal(3, dim)
    free = normal(20, dim)
    slope = gradient(lambda q: torch.logsumexp(q @ keys.T, -1), query)

    pair = Points(torch.cat([keys, values], -1))
    still = torch.cat([query, torch.zeros(3, value_dim, dtype=torch.float64)], -1)

    def with_source(eta: Tensor) -> Tensor:
        return gradient(lambda each: torch.logsumexp(each @ pair.support.T, -1), eta)[..., dim:]

    source, response = with_source(still), jacobian(with_source, still)[..., :dim]

    def gap(scale: float) -> Gap:
        def attention(q: Tensor) -> Tensor:
            return attend(q, keys, values, scale=scale).output

        return widest(
            apart(attend(query, keys, keys, scale=scale).output, slope),
            apart(attention(query), source),
            apart(pair.mean(still)[..., dim:], source),
            apart(jacobian(attention, query), response),
            apart(pair.fisher(still)[..., dim:, :dim], response),
        )

    return Evidence(
        printed=apart(attend(query, keys, free, scale=1.0).output, slope),
        conditional=gap(1.0),
        control=gap(trial.control(dim**-0.5, 1.0)),
    )


@claim(
    "C6",
    source=Source.PAPER,
    place="section 3.1, Proposition 1a",
    title="For atoms, ∇log Z is their softmax average",
    wording="For a sum of point masses, the gradient of log Z is the average of the points with softmax weights.",
    reading=(
        "Our reading: with weights of the points too. 9 random points in 5 dimensions (in full 64) at 4 natural"
        " parameters, with equal weights as printed and with random ones, to 1e-9."
    ),
    reference="autograd through sums of exponentials written out in torch",
    formula="∇log Z(η) = Σ_n softmax(x·η)_n x_n",
)
def softmax_average(trial: Trial) -> Evidence:
    """The mean of points against autograd, with equal weights and with others; the control forgets the weights."""
    normal = normals(trial)
    dim = trial.size(5, 64)
    support, log_weight, natural = normal(9, dim), normal(9), normal(4, dim)
    plain = gradient(lambda eta: (eta @ support.T).exp().sum(-1).log(), natural)
    weighted = gradient(lambda eta: ((eta @ support.T).exp() * log_weight.exp()).sum(-1).log(), natural)

    def gap(log_weight: Tensor) -> Gap:
        return widest(
            apart(Points(support).mean(natural), plain), apart(Points(support, log_weight).mean(natural), weighted)
        )

    return Evidence(printed=gap(log_weight), control=gap(trial.control(torch.zeros_like(log_weight), log_weight)))


@claim(
    "C13",
    source=Source.PAPER,
    place="section 3.1, equation 5",
    title="log Z of attention is the log-sum-exp of its scores",
    wording="The log normalizer of attention is the log of the sum of the exponentials of its scores.",
    reading=(
        "log Z of attend and of row_statistics with scale one, for 40 random keys in 8 dimensions (in full 4096 in"
        " 64) and queries of length up to hundreds, to 1e-9."
    ),
    reference="exponentials added one by one by math.fsum",
    formula="log Z(q_i) = log Σ_j e^{k_j·q_i}",
)
def log_sum_exp(trial: Trial) -> Evidence:
    """log Z of attention against sums term by term, for scores up to hundreds; the control keeps the usual 1/√d."""
    normal = normals(trial)
    atoms, dim = trial.size(40, 4096), trial.size(8, 64)
    keys = normal(atoms, dim)
    query = normal(6, dim) * torch.logspace(-2, 2, 6, dtype=torch.float64)[:, None]

    def term_by_term(row: list[float]) -> float:
        return max(row) + math.log(math.fsum(math.exp(score - max(row)) for score in row))

    total = torch.tensor([term_by_term(row) for row in (query @ keys.T).tolist()], dtype=torch.float64)

    def gap(scale: float) -> Gap:
        found, rows = attend(query, keys, keys, scale=scale).statistics, row_statistics(query, keys, scale=scale)
        assert found is not None
        return widest(apart(found.log_normalizer, total), apart(rows.log_normalizer, total))

    return Evidence(
        printed=gap(1.0),
        control=gap(trial.control(dim**-0.5, 1.0)),
        table={"largest score": float((query @ keys.T).max())},
    )
