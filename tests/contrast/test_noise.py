"""Noise-contrastive estimation recovers the log normalizer, negative sampling the shifted information."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.testing import assert_close

from massieu.checks import UserError
from massieu.contrast import nce_loss, negative_sampling

DOUBLE = torch.float64


def gaussian_nodes(mean: float, deviation: float, count: int = 120) -> tuple[Tensor, Tensor]:
    nodes, weight = np.polynomial.hermite_e.hermegauss(count)
    return mean + deviation * torch.tensor(nodes), torch.tensor(weight / weight.sum())


def log_gaussian(x: Tensor, mean: float, deviation: float) -> Tensor:
    return -0.5 * ((x - mean) / deviation) ** 2 - math.log(deviation) - 0.5 * math.log(2 * math.pi)


def solve_nce(ratio: float, noise_shift: float = 0.0) -> Tensor:
    """Newton on the exact expected loss: data N(0.7, 1.2^2), noise N(0, 2^2), model a x + b x^2 + c."""
    (x, px), (y, py) = gaussian_nodes(0.7, 1.2), gaussian_nodes(0.0, 2.0)

    def model(theta: Tensor, z: Tensor) -> Tensor:
        return theta[0] * z + theta[1] * z**2 + theta[2]

    def loss(theta: Tensor) -> Tensor:
        each = nce_loss(
            model(theta, x)[:, None, None],
            (log_gaussian(x, 0.0, 2.0) + noise_shift)[:, None, None],
            model(theta, y)[None, :, None],
            (log_gaussian(y, 0.0, 2.0) + noise_shift)[None, :, None],
            ratio=ratio,
        )
        return torch.einsum("x,y,xy->", px, py, each)

    theta = torch.tensor([0.0, -0.2, -1.0], dtype=DOUBLE)
    for _ in range(30):
        slope = torch.autograd.functional.jacobian(loss, theta)
        curvature = torch.autograd.functional.hessian(loss, theta)
        assert float(torch.linalg.eigvalsh(curvature).min()) > 0  # convex: one minimum
        theta = theta - torch.linalg.solve(curvature, slope)
    return theta


@pytest.mark.parametrize("ratio", [1.0, 5.0])
def test_nce_recovers_the_log_normalizer(ratio):
    # mean / variance, -1 / (2 variance), and minus log Z
    truth = [0.7 / 1.44, -0.5 / 1.44, -0.49 / 2.88 - 0.5 * math.log(2 * math.pi * 1.44)]
    assert_close(torch.tensor(truth), torch.tensor([0.486111, -0.347222, -1.271399]), rtol=0, atol=1e-6)
    assert_close(solve_nce(ratio), torch.tensor(truth, dtype=DOUBLE), rtol=0, atol=1e-8)


def test_noise_that_is_not_normalized_shifts_the_log_normalizer_by_as_much():
    shifted = solve_nce(1.0, noise_shift=0.3) - solve_nce(1.0)
    assert_close(shifted, torch.tensor([0.0, 0.0, 0.3], dtype=DOUBLE), rtol=0, atol=1e-8)


def test_the_ratio_is_that_of_the_sizes_unless_given():
    data, noise = torch.randn(2, 4, dtype=DOUBLE), torch.randn(2, 12, dtype=DOUBLE)
    assert_close(nce_loss(*data, *noise), nce_loss(*data, *noise, ratio=3.0), rtol=0, atol=0)
    assert float((nce_loss(*data, *noise) - nce_loss(*data, *noise, ratio=1.0)).abs()) > 1e-2


def test_nce_is_stable_for_large_log_ratios():
    far, near = torch.tensor([1e4]), torch.tensor([0.0])
    assert float(nce_loss(far, near, -far, near)) == 0
    assert float(nce_loss(-far, near, far, near)) == 2e4


def test_negative_sampling_is_its_formula():
    generator = torch.Generator().manual_seed(0)
    context, positive = torch.randn(2, 5, 3, generator=generator, dtype=DOUBLE)
    negatives = torch.randn(5, 4, 3, generator=generator, dtype=DOUBLE)
    for project in (False, True):
        c, p, n = (normalize(x, dim=-1) if project else x for x in (context, positive, negatives))
        expected = [
            math.log1p(math.exp(-c[i] @ p[i])) + sum(math.log1p(math.exp(c[i] @ n[i, j])) for j in range(4))
            for i in range(5)
        ]
        found = negative_sampling(context, positive, negatives, normalize=project, reduction="none")
        assert_close(found, torch.tensor(expected, dtype=DOUBLE), rtol=1e-13, atol=0)


@pytest.mark.parametrize("k", [1, 3])
def test_the_optimum_of_negative_sampling_is_the_mutual_information_minus_log_k(k):
    joint = torch.tensor([[0.10, 0.05, 0.15], [0.04, 0.16, 0.06], [0.12, 0.03, 0.29]], dtype=DOUBLE)
    marginal, atoms = joint.sum(0), torch.eye(3, dtype=DOUBLE)
    information = (joint / marginal / joint.sum(1, keepdim=True)).log()
    cases = torch.tensor(list(itertools.product(range(3), repeat=2 + k)))
    context, word, noise = cases[:, 0], cases[:, 1], cases[:, 2:]
    weight = joint[context, word] * marginal[noise].prod(-1)
    scores = torch.zeros(3, 3, dtype=DOUBLE, requires_grad=True)
    solver = torch.optim.LBFGS([scores], lr=1, max_iter=300, tolerance_grad=1e-13, tolerance_change=0)

    def closure() -> Tensor:
        solver.zero_grad()
        loss = (weight * negative_sampling(scores[context], atoms[word], atoms[noise], reduction="none")).sum()
        loss.backward()
        return loss

    solver.step(closure)
    assert_close(scores.detach(), information - math.log(k), rtol=0, atol=1e-6)


FOUR = [torch.zeros(3)] * 4


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: nce_loss(torch.zeros(()), *FOUR[1:]), "log_model"),
        (lambda: nce_loss(*FOUR[:2], torch.zeros(0), torch.zeros(0)), "model_on_noise"),
        (lambda: nce_loss(FOUR[0].long(), *FOUR[1:]), "log_model"),
        (lambda: nce_loss(torch.zeros(2), *FOUR[1:]), "log_model and log_noise"),
        (lambda: nce_loss(*FOUR[:3], torch.zeros(2)), "model_on_noise and noise_on_noise"),
        (lambda: nce_loss(*FOUR, ratio=0.0), "ratio"),
        (lambda: negative_sampling(torch.zeros(2, 3), torch.zeros(1, 3), torch.zeros(2, 4, 3)), "context and positive"),
        (lambda: negative_sampling(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(4, 3)), "negatives"),
        (lambda: negative_sampling(torch.ones(2).long(), torch.zeros(2), torch.zeros(4, 2)), "context"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(call, sentence):
    with pytest.raises(UserError, match=sentence):
        call()
