"""Sections 3.2 and 5 and appendix B of the paper: the weights of a head, several heads, and the context of a walk."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from massieu.claims.claim import Curve, Evidence, Gap, Source, Trial, Verdict
from massieu.claims.dynamics.equilibrium import covariance
from massieu.claims.experiment import TIGHT, above, apart, jacobian, linspace, minimized, normals, widest
from massieu.claims.registry import claim
from massieu.geometry import LowRank, floored_spectrum, whitened_head
from massieu.measures import Convolution, GaussianMixture, Points
from massieu.measures.measure import gradient
from massieu.statistics import attend


@claim(
    "C19",
    source=Source.PAPER,
    place="section 3.2, last paragraph",
    title="Query and key weights multiply to an inverse covariance",
    wording=(
        "An affine approximation of the map from hidden states to keys is Σ^{-1} h_j, which suggests that query and key"
        " weights multiply to about Σ^{-1}."
    ),
    reading=(
        "Our reading: Σ is the covariance Λ of the hidden states, and keys T h_j follow the mean map if its Jacobian at"
        " the origin is T again. For 32 hidden states in 8 dimensions (256 in 64 in full): a head of rank 2 (8 in full)"
        " that does so differs from Λ^{-1}, so that consistency alone does not give it; the one of full rank is Λ^{-1},"
        " and heads of low rank with Σ_h P_h = I are consistent each and add up to it, to 1e-9. In the control one head"
        " is random."
    ),
    reference="T = Λ^{-1/2} P Λ^{-1/2} from eigenvectors, against the covariance of attention over the keys",
    formula="W_q^⊤ W_k = T ≈ Λ^{-1}, Λ = Cov(hidden)",
    correction=(
        "The Jacobian of the mean map is the key map if T = T Λ T. All solutions are T = Λ^{-1/2} P Λ^{-1/2} with a"
        " projector P, and only the one of full rank is Λ^{-1}; heads with Σ_h P_h = I add up to it."
    ),
    expected=Verdict.CONDITIONAL,
)
def inverse_covariance(trial: Trial) -> Evidence:
    """Jacobians of attention at the origin against the key map; in the control, one head is random."""
    normal = normals(trial)
    dim, rank = trial.size(8, 64), trial.size(2, 8)
    hidden = normal(4 * dim, dim) @ (torch.eye(dim, dtype=torch.float64) + 0.5 * normal(dim, dim) / dim**0.5)
    hidden = hidden - hidden.mean(0)
    spectrum = floored_spectrum(hidden.T @ hidden / len(hidden), floor=0.0)
    frames = torch.linalg.qr(normal(dim, dim)).Q.T.reshape(-1, rank, dim) @ spectrum.power(-0.5)
    heads, full = frames.mT @ frames, spectrum.power(-1)
    origin = torch.zeros(1, dim, dtype=torch.float64)

    def inconsistency(key_map: Tensor) -> Gap:
        return apart(Points(hidden @ key_map.T).fisher(origin)[0], key_map)

    def gap(first: Tensor) -> Gap:
        every = torch.cat([first[None], heads[1:]])
        return widest(inconsistency(full), *map(inconsistency, every), apart(every.sum(0), full))

    random = normal(dim, rank) @ normal(rank, dim)
    random = random * heads[0].norm() / random.norm()
    found = whitened_head(LowRank(frames[0], frames[0]), spectrum)
    return Evidence(
        printed=apart(heads[0], full),
        conditional=gap(heads[0]),
        control=gap(trial.control(random, heads[0])),
        table={
            "rank of a head": float(rank),
            "trace of Λ^{1/2} T Λ^{1/2}": float(found.trace),
            "idempotency": float(found.idempotency),
            "standard deviation of its logits": float(found.logit_sd),
        },
    )


@claim(
    "C39",
    source=Source.PAPER,
    place="section 5",
    title="Different heads make attention incoherent",
    wording=(
        "If heads are different distortions of space, multi-head attention is incoherent: it combines gradient updates"
        " from different spatial transformations."
    ),
    reading=(
        "Our reading: the sum of the heads is not the gradient of one function, its Jacobian is not symmetric. Three"
        " heads of rank 2 in 4 dimensions with 5 keys each, at 6 queries: as printed, asymmetric by a hundredth"
        " whatever they write with; as corrected, symmetric to 1e-9 if they write with the maps that they read with, up"
        " to a factor for each head, and asymmetric if they write with others, even where all read alike. Tied heads"
        " are also attention over the 125 sums of their keys. The control unties them."
    ),
    reference="Jacobians by autograd, and a softmax over the 125 sums of keys written out in torch",
    formula="Σ_h B_h m_h(A_h^⊤ η) is no gradient if the A_h differ",
    correction=(
        "It is not that the heads distort differently, but that a head writes with another map than it reads with. If"
        " B_h = c_h A_h for every head, the sum is the gradient of Σ_h c_h log Z_h(A_h^⊤ η): for c_h = 1 the mean map"
        " of the convolution, the law of Σ_h A_h x^{(h)} for independent heads."
    ),
    expected=Verdict.HOLDS_CORRECTED,
)
def convolution(trial: Trial) -> Evidence:
    """Asymmetry of summed heads, maps tied or free, and tied ones as points at all sums; the control unties them."""
    normal = normals(trial)
    maps, keys, natural, free = normal(3, 4, 2), normal(3, 5, 2), 0.5 * normal(6, 4), normal(3, 4, 2)
    factors, alike = torch.tensor([0.5, 1.0, 2.0]).double()[:, None, None], maps[:1].expand_as(maps)
    measures = [Points(each) for each in keys]
    tied = Convolution(list(maps), measures)
    first, second, third = keys @ maps.mT
    sums = (first[:, None, None] + second[:, None] + third).reshape(-1, 4)
    mean = torch.softmax(natural @ sums.T, -1) @ sums
    asymmetry = functools.partial(_asymmetry, measures, natural)

    def incoherent(read: Tensor, write: Tensor) -> Gap:
        """Return the gap between the asymmetry and a hundredth, which it must reach."""
        return Gap(max(0.01 - asymmetry(read, write), 0.0), TIGHT)

    def gap(write: Tensor) -> Gap:
        return widest(
            incoherent(maps, free),
            incoherent(alike, free),
            Gap(asymmetry(maps, write), TIGHT),
            Gap(asymmetry(maps, factors * write), TIGHT),
            apart(_summed(measures, maps, write, natural), mean),
            apart(tied.mean(natural), mean),
            apart(tied.log_normalizer(natural), torch.logsumexp(natural @ sums.T, -1)),
        )

    pairs = {"tied heads": (maps, maps), "free heads": (maps, free), "free heads that read alike": (alike, free)}
    return Evidence(
        printed=widest(incoherent(maps, free), incoherent(maps, maps)),
        corrected=gap(maps),
        control=gap(trial.control(free, maps)),
        table={
            "points": float(len(sums)),
            **{f"asymmetry of {name}": asymmetry(*pair) for name, pair in pairs.items()},
            "free dimensions of B for 3 heads": float(_gradient_dimensions(measures, maps, natural)),
        },
    )


def _summed(measures: Sequence[Points], read: Tensor, write: Tensor, eta: Tensor) -> Tensor:
    heads = [measure.mean(eta @ a) @ b.T for measure, a, b in zip(measures, read, write, strict=True)]
    return torch.stack(heads).sum(0)


def _asymmetry(measures: Sequence[Points], natural: Tensor, read: Tensor, write: Tensor) -> float:
    """Return the relative antisymmetric part of the Jacobian of the summed heads at some queries."""
    slope = jacobian(lambda eta: _summed(measures, read, write, eta), natural)
    return float((slope - slope.mT).norm() / slope.norm())


def _gradient_dimensions(measures: Sequence[Points], maps: Tensor, natural: Tensor) -> int:
    """Count the independent families of output maps that make the Jacobian symmetric at all queries at once."""
    heads, dim, rank = maps.shape
    covariances = torch.stack([each.fisher(natural @ a) for each, a in zip(measures, maps, strict=True)])
    basis = torch.eye(heads * dim * rank, dtype=torch.float64).reshape(-1, heads, dim, rank)
    slope = torch.einsum("bhdk,hqkl,hel->bqde", basis, covariances, maps)
    equations = (slope - slope.mT).flatten(1)
    return len(basis) - int(torch.linalg.matrix_rank(equations, rtol=1e-9))


@claim(
    "C54",
    source=Source.PAPER,
    place="section 5; appendix A, Proposition 3",
    title="The bound of a Gaussian mixture models several heads",
    wording=(
        "As a model of several heads, a lower bound approximates the log normalizer of a mixture of Gaussians somewhat"
        " more consistently than gradient updates from different distortions of the space."
    ),
    reading=(
        "Our reading: the gradient of the bound, a sum over heads of linear maps of the query with fixed weights,"
        " approximates the gradient of the log normalizer. Four Gaussian heads in 4 dimensions with means and"
        " covariances of their own. As printed, for 50 queries of length one, within a tenth of its length: it does"
        " not. What holds: the bound lies below log Z; where all heads have the same normalizer, so that"
        " responsibilities are the weights, bound and gradient are those of log Z, to 1e-9; and the weighted mean of"
        " four heads over 5000 tokens each (50000 in full), each with a softmax of its own, is the gradient of the"
        " bound within a tenth. In the control one softmax runs over the tokens of all heads, which gives the gradient"
        " of the log normalizer instead."
    ),
    reference="autograd through the closed normalizers of the Gaussians, and attention over tokens drawn from them",
    formula="log Z(η) ≥ Σ_n π_n g_n(η), ∇log Z(η) ≈ Σ_n π_n (μ_n + Σ_n η)",
    correction=(
        "It is the limit of many tokens of heads that have a softmax each and are averaged. The gradient of the log"
        " normalizer of the mixture it is only where the responsibilities r_n(η) are the weights π_n."
    ),
    expected=Verdict.CONDITIONAL,
)
def bound_of_heads(trial: Trial) -> Evidence:
    """Gradients of the bound against those of log Z, and of heads with a softmax each or one for all."""
    normal = normals(trial)
    mixture, drawn = _gaussian_heads(normal, trial.size(5000, 50000))
    queries = torch.nn.functional.normalize(normal(50, 4), dim=-1)
    tight = linspace(-2.0, 2.0, 9)[:, None] * torch.eye(4, dtype=torch.float64)[0]

    log_z = functools.partial(_log_z, mixture)

    slope = functools.partial(gradient, log_z)

    def gap(shared: bool) -> Gap:
        return widest(
            above(mixture.lower_bound(queries), log_z(queries)),
            apart(mixture.lower_bound(tight), log_z(tight)),
            apart(mixture.lower_bound_gradient(tight), slope(tight)),
            apart(mixture.mean(queries), slope(queries)),
            Gap(_far(_averaged(mixture, drawn, queries, shared), mixture.lower_bound_gradient(queries)), 0.1),
        )

    lengths = [0.0, 0.5, 1.0, 1.5]
    scaled = [length * queries for length in lengths]
    linear, exact = ([field(eta) for eta in scaled] for field in (mixture.lower_bound_gradient, slope))
    apiece, together = ([_averaged(mixture, drawn, eta, shared) for eta in scaled] for shared in (False, True))
    series: dict[str, Sequence[float]] = {
        "bound against log Z": [_far(*pair) for pair in zip(linear, exact, strict=True)],
        "a softmax each against the bound": [_far(*pair) for pair in zip(apiece, linear, strict=True)],
        "one softmax against log Z": [_far(*pair) for pair in zip(together, exact, strict=True)],
    }
    return Evidence(
        printed=Gap(series["bound against log Z"][2], 0.1),
        conditional=gap(shared=False),
        control=gap(shared=trial.control(True, False)),
        table={f"{name}, relative": values[2] for name, values in series.items()},
        curve=Curve(lengths, series, x_label="‖η‖", y_label="relative difference of gradients"),
    )


def _gaussian_heads(normal: Callable[..., Tensor], tokens: int) -> tuple[GaussianMixture, Tensor]:
    """Four heads in 4 dimensions, N(1/2, 1) each in the first one, and tokens drawn from each of them."""
    dim = 4
    identity = torch.eye(dim, dtype=torch.float64)
    log_weights, locations = torch.log_softmax(0.5 * normal(dim), -1), 1.5 * normal(dim, dim)
    roots = identity + 0.4 * torch.tanh(normal(dim, dim, dim))
    locations[:, 0], roots[:, 0] = 0.5, identity[0]
    drawn = locations[:, None] + normal(dim, tokens, dim) @ roots.mT
    return GaussianMixture(log_weights, locations, roots @ roots.mT), drawn


def _far(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def _log_z(mixture: GaussianMixture, eta: Tensor) -> Tensor:
    """The log normalizer of a mixture of Gaussians, written out."""
    exponents = eta @ mixture.locations.T + 0.5 * torch.einsum("qd,nde,qe->qn", eta, mixture.covariances, eta)
    return torch.logsumexp(exponents + mixture.log_weight.exp().log(), -1)


def _averaged(mixture: GaussianMixture, drawn: Tensor, eta: Tensor, shared: bool) -> Tensor:
    """Averaged attention over the tokens of each head, or one softmax over all of them."""
    weights = mixture.log_weight.exp()
    if shared:
        keys, log_weight = drawn.flatten(0, 1), weights.log().repeat_interleave(drawn.shape[1])
        return attend(eta, keys, keys, log_weight, scale=1.0).output
    each = attend(eta.expand(len(drawn), -1, -1), drawn, drawn, scale=1.0).output
    return torch.einsum("n,nqd->qd", weights, each)


@claim(
    "C42",
    source=Source.PAPER,
    place="appendix B, last paragraph",
    title="Hidden states parallel a random walk around a context",
    wording=(
        "The continuous law that hidden states come from is unclear; it draws parallels to Arora's random walk of"
        " language around a context vector."
    ),
    reading=(
        "Our reading: as in that walk, log Z of a context of length 4 hardly depends on its direction, and is log N +"
        " ‖c‖^2 / (2 D). 5000 Gaussian keys in 64 dimensions (50000 in full), 264 directions, within six standard"
        " errors: for isotropic centered keys, and as printed for keys of unequal variances. In the control the keys"
        " are off center by one."
    ),
    reference="the closed form for isotropic Gaussian keys, written out",
    formula="log Z(c) ≈ log N + ‖c‖^2 / (2 D)",
    correction="Only if the keys are centered and isotropic; Gaussian keys in general give log N + c·μ + ½ c^⊤ Σ c.",
    expected=Verdict.CONDITIONAL,
)
def context_walk(trial: Trial) -> Evidence:
    """log Z over directions of the context, axes among them, against its law; the control moves the keys off center."""
    normal = normals(trial)
    atoms, dim, length = trial.size(5000, 50000), 64, 4.0
    identity = torch.eye(dim, dtype=torch.float64)
    directions = torch.nn.functional.normalize(torch.cat([normal(200, dim), identity]), dim=-1)
    isotropic, center = normal(atoms, dim) / dim**0.5, torch.nn.functional.normalize(normal(1, dim), dim=-1)
    variances = 1 / torch.arange(1, dim + 1, dtype=torch.float64)

    def law(length: float) -> Tensor:
        return torch.tensor(math.log(atoms) + length**2 / (2 * dim), dtype=torch.float64)

    def gap(keys: Tensor) -> Gap:
        # Six times the standard error of a log mean of lognormals: 264 directions exceed it once in a million runs.
        allowed = 6 * math.sqrt(math.expm1(length**2 / dim) / atoms)
        return apart(Points(keys).log_normalizer(length * directions), law(length), allowed)

    lengths = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    found = [Points(isotropic).log_normalizer(each * directions) for each in lengths]
    return Evidence(
        printed=gap(isotropic * (variances / variances.mean()).sqrt()),
        conditional=gap(isotropic),
        control=gap(trial.control(isotropic + center, isotropic)),
        table={"mean": float(found[3].mean()), "deviation": float(found[3].std()), "law": float(law(length))},
        curve=Curve(
            x=lengths,
            series={
                "log N + ‖c‖^2 / (2 D)": [float(law(each)) for each in lengths],
                "largest": [float(each.max()) for each in found],
                "smallest": [float(each.min()) for each in found],
            },
            x_label="‖c‖",
            y_label="log Z",
        ),
    )


@claim(
    "X12",
    source=Source.PAPER,
    place="section 3.2, last paragraph",
    title="The weights of a denoiser are an inverse covariance",
    wording=(
        "An affine approximation of the map from hidden states to keys is Σ^{-1} h_j, which suggests that query and key"
        " weights multiply to about Σ^{-1}."
    ),
    reading=(
        "Our reading: training makes them so in a head that removes noise, y = x_n + ε, from 6 points in the plane."
        " Fitted on exact expectations from the identity: without the carrier the product differs from the precision"
        " S^{-1} of the noise; with it, it is S^{-1} within 1e-4, and the head is Bayes' formula at 50 noisy points. In"
        " the control the noise of the fit has another covariance."
    ),
    reference="the inverse of the covariance of the noise, and Bayes' formula from densities of torch.distributions",
    formula="W_q^⊤ W_k = S^{-1}",
    correction=(
        "In a denoiser of y = x_n + ε it is the precision of the noise, and only with the carrier −½ x^⊤ W x in the"
        " scores: the posterior is softmax(y^⊤ S^{-1} x_n − ½ x_n^⊤ S^{-1} x_n)."
    ),
    expected=Verdict.CONDITIONAL,
)
def denoiser(trial: Trial) -> Evidence:
    """One head fitted to noisy points, with and without the carrier; the control has other noise."""
    normal = normals(trial)
    points = 1.5 * torch.tanh(normal(6, 2))
    noise, other = (0.5 * covariance(normal, 2) for _ in range(2))
    line = linspace(-6.0, 6.0, trial.size(49, 121))

    precision = torch.linalg.inv(noise)

    def off(head: Tensor) -> Gap:
        return Gap(float((head - precision).norm() / precision.norm()), 1e-4)

    seen = 2 * normal(50, 2)
    density = torch.distributions.MultivariateNormal(points, noise).log_prob(seen[:, None])
    bayes = torch.softmax(density, -1) @ points

    def gap(spread: Tensor) -> Gap:
        head = _fitted(points, spread, line, carrier=True)
        return widest(off(head), apart(Points(points, _bias(points, head)).mean(seen @ head), bayes, 1e-4))

    hidden = torch.linalg.inv(torch.cov(points.T, correction=0) + noise)
    return Evidence(
        printed=off(_fitted(points, noise, line, carrier=False)),
        conditional=gap(noise),
        control=gap(trial.control(2 * other, noise)),
        table={"the inverse covariance of the hidden states, relative error": off(hidden).measured},
    )


def _bias(points: Tensor, head: Tensor, carrier: bool = True) -> Tensor:
    return -0.5 * ((points @ head) * points).sum(-1) * float(carrier)


def _fitted(points: Tensor, spread: Tensor, line: Tensor, carrier: bool) -> Tensor:
    """The head of least square error on noisy points, with expectations over a grid of the noise."""
    plane = torch.cartesian_prod(line, line)
    weight = torch.softmax(-0.5 * plane.square().sum(-1), -1)
    noisy = points[:, None] + plane @ torch.linalg.cholesky(spread).T

    def loss(head: Tensor) -> Tensor:
        output = torch.softmax(noisy @ head @ points.T + _bias(points, head, carrier), -1) @ points
        return ((output - points[:, None]).square().sum(-1) @ weight).mean()

    return minimized(loss, torch.eye(2, dtype=torch.float64))
