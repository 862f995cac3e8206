"""Sections 2.1, 2.2 and 4 of the paper: contrastive losses and boosting as exponential families."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from massieu.claims.claim import Evidence, Gap, Source, Trial, Verdict
from massieu.claims.experiment import apart, minimized, normals, widest
from massieu.claims.registry import claim
from massieu.contrast import (
    adaboost_step,
    classical_mds,
    info_nce,
    mutual_information_bound,
    nca,
    nce_loss,
    negative_sampling,
    neighbor_probabilities,
    pca,
    skip_gram,
)
from massieu.measures import Points
from massieu.measures.measure import gradient
from massieu.statistics import attend

FITTED = 1e-5  # of parameters that a search in float64 found at a smooth minimum


@claim(
    "C29",
    source=Source.PAPER,
    place="section 4",
    title="Boosting weights as an intrinsic measure",
    wording="In boosting, the previous model defines an intrinsic measure of unnormalized weights on the examples.",
    reading=(
        "Our reading: the weights up to a common factor. After three rounds of boosting with two binary learners and a"
        " real one on 40 examples (in full 2000) they are e^{−t F(x)} of the model that the rounds built, normalized;"
        " E[u] = 0 in every round, and the steps of the binary learners are in closed form, all to 1e-9."
    ),
    reference=(
        "the weights of the summed model, the slope of a log-sum-exp by autograd, and the closed step of binary"
        " learners"
    ),
    formula="w_i = e^{−t_i F(x_i)}",
)
def boosting(trial: Trial) -> Evidence:
    """Weights after rounds of boosting against the model they built, and E[u] = 0; the control turns its sign."""
    normal = normals(trial)
    label = normal(trial.size(40, 2000)).sign()
    learners = [normal(len(label)).sign(), normal(len(label)) + 0.3 * label, (normal(len(label)) + label).sign()]
    log_weight, model = torch.zeros_like(label), torch.zeros_like(label)
    gaps, falls = [], []
    for learner in learners:
        margin = label * learner
        found = adaboost_step(margin, log_weight)
        slope = gradient(lambda a, u=-margin, w=log_weight: torch.logsumexp(w + a * u, -1), found.alpha)  # type: ignore[misc]
        gaps.append(apart(slope, torch.zeros_like(slope)))
        if bool((margin.abs() == 1).all()):
            right = log_weight.exp()[margin > 0].sum() / log_weight.exp().sum()
            gaps.append(apart(found.alpha, 0.5 * torch.log(right / (1 - right))))
        falls.append(float(found.log_normalizer))
        log_weight, model = found.log_weight, model + found.alpha * learner

    def gap(sign: float) -> Gap:
        return widest(apart(log_weight, torch.log_softmax(sign * label * model, -1)), *gaps)

    return Evidence(
        printed=gap(-1.0),
        control=gap(trial.control(1.0, -1.0)),
        table={"log Z after three rounds": sum(falls), "largest fall": min(falls)},
    )


@claim(
    "C30",
    source=Source.PAPER,
    place="section 2.2",
    title="NCA compares a distance with those to non-neighbors",
    wording=(
        "Neighborhood components analysis models the probability of a neighbor by comparing the exponential of minus"
        " its squared distance to the sum of those to non-neighbors."
    ),
    reading=(
        "Our reading: compared means divided by, and the non-neighbors of a point are those of another class. 16"
        " random points in 5 dimensions (in full 256) of four classes under a map to 3 dimensions, to 1e-9: the printed"
        " rows must sum to one; the corrected ones must too, and agree with the library's and its loss."
    ),
    reference="both sums written out over a matrix of distances",
    formula="p_ij = e^{−‖Ax_i − Ax_j‖^2} / Σ_{k not a neighbor} e^{−‖Ax_i − Ax_k‖^2}",
    correction=(
        "The sum runs over all k ≠ i, otherwise it is no probability. Row i is then an exponential family with"
        " natural parameter 2Ax_i and the carrier e^{−‖Ax_j‖^2}, atom i absent."
    ),
    expected=Verdict.HOLDS_CORRECTED,
)
def neighbors(trial: Trial) -> Evidence:
    """Both sums written out against the exponential family; the control leaves its carrier out."""
    normal = normals(trial)
    count = trial.size(16, 256)
    points, transform = normal(count, 5), 0.5 * normal(3, 5)
    labels = torch.arange(count) % 4
    closeness = (-torch.cdist(points @ transform.T, points @ transform.T).square()).exp().fill_diagonal_(0.0)
    same = labels[:, None] == labels
    total = closeness.sum(-1, keepdim=True)
    strangers = (closeness / closeness.masked_fill(same, 0.0).sum(-1, keepdim=True)).sum(-1)
    loss = -((closeness / total) * same).sum(-1).log()

    def gap(carrier: bool) -> Gap:
        found = neighbor_probabilities(points, transform, carrier=carrier)
        return widest(
            apart(found, closeness / total),
            apart(found.sum(-1), torch.ones_like(strangers)),
            apart(nca(points, labels, transform, reduction="none"), loss),
        )

    return Evidence(
        printed=apart(strangers, torch.ones_like(strangers)),
        corrected=gap(carrier=True),
        control=gap(carrier=trial.control(False, True)),
        table={
            "probabilities as printed add up to": float(strangers.max()),
            "without the carrier": gap(carrier=False).measured,
        },
    )


@claim(
    "C31",
    source=Source.PAPER,
    place="section 2.1",
    title="Word2vec is a softmax of inner products",
    wording=(
        "The skip-gram model of word2vec predicts neighboring words with a normalized exponential of inner products."
    ),
    reading=(
        "Our reading: over all words, and so its gradient in the context is attention over the word vectors less the"
        " vector of the word. 30 random words in 6 dimensions (in full 1000 in 64) and 8 contexts, to 1e-9. Negative"
        " sampling, with which word2vec is often trained, is the control."
    ),
    reference="a log-softmax written out in torch, and autograd through it",
    formula="∇_c (−log p(w | c)) = Σ_j p_j u_j − u_w",
)
def words(trial: Trial) -> Evidence:
    """The slope of the softmax loss by autograd against attention; the control is negative sampling."""
    normal = normals(trial)
    count, dim = trial.size(30, 1000), trial.size(6, 64)
    vectors, context = normal(count, dim), normal(8, dim)
    targets = torch.arange(8)
    pull = attend(context, vectors, vectors, scale=1.0).output - vectors[targets]
    negatives = vectors[8:13].expand(8, 5, dim)

    def written(c: Tensor) -> Tensor:
        return -torch.log_softmax(c @ vectors.T, -1)[targets, targets]

    def whole(c: Tensor) -> Tensor:
        return skip_gram(c, vectors, targets, reduction="none")

    def sampled(c: Tensor) -> Tensor:
        return negative_sampling(c, vectors[targets], negatives, reduction="none")

    def gap(loss: Callable[[Tensor], Tensor]) -> Gap:
        slope = gradient(written, context)
        return widest(apart(gradient(loss, context), slope), apart(pull, slope), apart(loss(context), written(context)))

    drawn = candidates(torch.softmax(normal(20), -1).reshape(4, 5))

    def expected_loss(scores: Tensor) -> Tensor:
        loss = negative_sampling(scores[drawn.query], drawn.positive, drawn.negatives, reduction="none")
        return drawn.weight @ loss

    slope_there = gradient(expected_loss, drawn.information - math.log(2))
    return Evidence(
        printed=gap(whole),
        control=gap(trial.control(sampled, whole)),
        table={"slope of negative sampling at PMI − log 2": float(slope_there.abs().max())},
    )


@claim(
    "C32",
    source=Source.PAPER,
    place="section 2.2",
    title="The N-pair probability is consistent with NCE",
    wording=(
        "Sohn's exponential dot product probability over several examples is mathematically consistent with NCE for"
        " multiple distributions."
    ),
    reading=(
        "Our reading: the expected loss is least where the scores are log p(x | c) / p(x) + const(c), and its"
        " negatives' law tilted by them is p(x | c). Slope zero there (the loss is convex in the scores), for a random"
        " joint law of 4 contexts and 5 words (in full 24) with two negatives, all outcomes enumerated, to 1e-9."
    ),
    reference="sums over every outcome with a log-softmax written out in torch, and the conditional law itself",
    formula="argmin L: f(x, c) = log p(x | c) / p(x) + const(c)",
)
def several_examples(trial: Trial) -> Evidence:
    """Slope of the expected loss at those scores, by enumeration; the control has other negatives."""
    normal = normals(trial)
    joint = torch.softmax(normal(trial.size(20, 96)), -1).reshape(4, -1)
    conditional, marginal = joint / joint.sum(1, keepdim=True), joint.sum(0)
    scores = candidates(joint).information + normal(4, 1)
    other = torch.softmax(normal(len(marginal)), -1)

    def expected_loss(scores: Tensor, noise: Tensor) -> Tensor:
        drawn = candidates(joint, noise)
        loss = info_nce(scores[drawn.query], drawn.positive, drawn.negatives, reduction="none")
        return drawn.weight @ loss

    def term_by_term(scores: Tensor, noise: Tensor) -> Tensor:
        drawn = candidates(joint, noise)
        three = torch.cat([drawn.positive[:, None], drawn.negatives], 1) @ scores[drawn.query][..., None]
        return -(drawn.weight @ torch.log_softmax(three[..., 0], -1)[:, 0])

    def gap(noise: Tensor) -> Gap:
        slope = gradient(lambda each: expected_loss(each, noise), scores)
        tilted = Points(torch.eye(len(noise), dtype=torch.float64), noise.log()).probabilities(scores)
        return widest(
            apart(slope, torch.zeros_like(slope)),
            apart(tilted, conditional),
            apart(expected_loss(scores, noise), term_by_term(scores, noise)),
        )

    information = (joint * candidates(joint).information).sum()
    return Evidence(
        printed=gap(marginal),
        control=gap(trial.control(other, marginal)),
        table={
            "log 3 − L": float(mutual_information_bound(expected_loss(scores, marginal), 3)),
            "mutual information": float(information),
        },
    )


@claim(
    "C33",
    source=Source.PAPER,
    place="section 2.2",
    title="NCE learns by a logistic model of data and noise",
    wording=(
        "Noise-contrastive estimation mixes data with noise, which turns an unsupervised problem into one with labels,"
        " and models these by a logistic distribution."
    ),
    reading=(
        "Our reading: at the minimum the model is the law of the data and its free constant is log Z. Random counts of"
        " data and noise over 5 states, with as many parameters, minimized by L-BFGS, to 1e-5."
    ),
    reference="frequencies of the data, and log Z at the parameters found",
    formula="log p = η·u(x) − c: at the minimum c = log Z(η)",
)
def noise_contrast(trial: Trial) -> Evidence:
    """A model and its free constant against counts of data; the control has a wrong density of the noise."""
    normal = normals(trial)
    counts, noise = (torch.randint(5, 60, (5,), generator=trial.generator) for _ in range(2))
    support = normal(5, 4)  # with the constant, as many parameters as states: the minimum is exact
    log_noise, wrong = (noise / noise.sum()).double().log(), torch.log_softmax(normal(5), -1)
    data, drawn = (torch.repeat_interleave(torch.arange(5), each) for each in (counts, noise))
    frequency = (counts / counts.sum()).double()

    def fitted(believed: Tensor) -> Tensor:
        def loss(parameters: Tensor) -> Tensor:
            model = support @ parameters[:4] - parameters[4]
            return nce_loss(model[data], believed[data], model[drawn], believed[drawn])

        return minimized(loss, torch.zeros(5, dtype=torch.float64))

    def gap(parameters: Tensor) -> Gap:
        natural, constant = parameters[None, :4], parameters[4:]
        measure = Points(support)
        return widest(
            apart(measure.log_normalizer(natural), constant, FITTED),
            apart(measure.probabilities(natural)[0], frequency, FITTED),
        )

    found = fitted(log_noise)
    return Evidence(
        printed=gap(found),
        control=gap(fitted(trial.control(wrong, log_noise))),
        table={"c": float(found[4]), "log Z": float(Points(support).log_normalizer(found[None, :4]))},
    )


@claim(
    "C34",
    source=Source.PAPER,
    place="section 2.2",
    title="Scaling of Euclidean distances amounts to inner products",
    wording=(
        "Multidimensional scaling of Euclidean distances is equivalent to calculating covariance terms using dot"
        " products."
    ),
    reading=(
        "Our reading: for any kind of scaling, two coordinates are the principal components. For 20 random points in 5"
        " dimensions (in full 200), to 1e-9: 300 steps of least stress decide the printed form by the distances of"
        " their result, classical scaling the conditional one, with the Gram matrix of all coordinates."
    ),
    reference="the Gram matrix of the centered points, and majorization of the stress written out",
    formula="MDS(‖x_i − x_j‖) = PCA(x)",
    correction=(
        "For classical scaling: −½ J D^{(2)} J is the Gram matrix of the centered points. Scaling by stress, with"
        " the same distances, leads elsewhere, and so do distances that are not Euclidean."
    ),
    expected=Verdict.CONDITIONAL,
)
def scaling(trial: Trial) -> Evidence:
    """Two coordinates by principal components, classical scaling and least stress; the control has city blocks."""
    normal = normals(trial)
    points = normal(trial.size(20, 200), 5) * torch.tensor([2.0, 1.5, 1.0, 0.8, 0.6])
    distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    principal, centered = pca(points, 2), points - points.mean(0)
    stressed = least_stress(distances, principal.points)

    def gap(distances: Tensor) -> Gap:
        classical, whole = classical_mds(distances, 2), classical_mds(distances, 5).points
        return widest(
            apart(classical.points, principal.points),
            apart(classical.eigenvalues[:5], principal.eigenvalues),
            apart(whole @ whole.T, centered @ centered.T),
        )

    def stress(found: Tensor) -> float:
        return float((torch.pdist(found) - torch.pdist(points)).square().sum().sqrt())

    return Evidence(
        printed=apart(torch.pdist(stressed), torch.pdist(principal.points)),
        conditional=gap(distances),
        control=gap(trial.control(torch.cdist(points, points, p=1.0), distances)),
        table={"stress of principal components": stress(principal.points), "least stress": stress(stressed)},
    )


def least_stress(distances: Tensor, start: Tensor) -> Tensor:
    """Return points of nearly the given distances, by 300 steps of majorization from a start."""
    found = start
    for _ in range(300):
        between = torch.cdist(found, found, compute_mode="donot_use_mm_for_euclid_dist").fill_diagonal_(1.0)
        ratio = distances / between
        found = (torch.diag(ratio.sum(-1)) - ratio) @ found / len(found)
    return found


class NegativeDraws(NamedTuple):
    """Every draw of a context with its partner and two negatives, with its probability."""

    query: Tensor
    positive: Tensor
    negatives: Tensor
    weight: Tensor
    information: Tensor


def candidates(joint: Tensor, noise: Tensor | None = None) -> NegativeDraws:
    """Return all outcomes for a law ``(contexts, words)`` and negatives of the noise; None for the law of words."""
    contexts, words = joint.shape
    noise = joint.sum(0) if noise is None else noise
    c, x, first, second = torch.cartesian_prod(*(torch.arange(each) for each in (contexts, words, words, words))).T
    one_hot = torch.eye(words, dtype=joint.dtype)
    negatives = torch.stack([one_hot[first], one_hot[second]], 1)
    information = (joint / (joint.sum(1, keepdim=True) * joint.sum(0))).log()
    return NegativeDraws(c, one_hot[x], negatives, joint[c, x] * noise[first] * noise[second], information)
