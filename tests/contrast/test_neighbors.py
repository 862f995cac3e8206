"""Neighborhood components: an exponential family with a carrier, equal to the textbook."""

import pytest
import torch
from agreement import randn
from torch import Tensor
from torch.testing import assert_close

from massieu.checks import UserError
from massieu.contrast import nca, neighbor_probabilities

DOUBLE = torch.float64
LABELS = torch.tensor([2, 0, 1, 0, 2, 1, 0, 2, 2, 1])


def textbook(points: Tensor, transform: Tensor) -> Tensor:
    mapped = points @ transform.mT
    distance = (mapped[:, None] - mapped[None]).square().sum(-1)
    return torch.softmax((-distance).masked_fill(torch.eye(len(points), dtype=torch.bool), -torch.inf), -1)


def test_probabilities_are_those_of_the_textbook():
    points, transform = 0.5 * randn(10, 4, dtype=DOUBLE), randn(3, 4, seed=1, dtype=DOUBLE)
    found = neighbor_probabilities(points, transform)
    assert float((found - textbook(points, transform)).abs().max()) < 2e-15
    assert bool((found.diagonal() == 0).all())


def test_without_the_carrier_they_are_others():
    points = randn(10, 4, dtype=DOUBLE)
    transform = torch.eye(4, dtype=DOUBLE)
    off = neighbor_probabilities(points, carrier=False) - textbook(points, transform)
    assert float(off.abs().max()) > 0.5


def test_the_loss_and_its_gradient_are_those_of_the_textbook():
    points, transform = randn(10, 4, dtype=DOUBLE).requires_grad_(), randn(3, 4, seed=1, dtype=DOUBLE).requires_grad_()
    found = nca(points, LABELS, transform, reduction="none")
    same = LABELS[:, None] == LABELS[None]
    expected = -(textbook(points, transform) * same).sum(-1).log()
    assert_close(found, expected, rtol=1e-12, atol=1e-14)
    for mine, other in zip(
        torch.autograd.grad(found.sum(), [points, transform]),
        torch.autograd.grad(expected.sum(), [points, transform]),
        strict=True,
    ):
        assert_close(mine, other, rtol=1e-10, atol=1e-12)


def test_far_from_the_origin_distances_keep_their_digits():
    points = randn(10, 3)
    near, far = nca(points, LABELS), nca((points + 1000.0), LABELS)
    assert_close(far, near, rtol=1e-3, atol=0)  # the shifted coordinates themselves round by 3e-5


def test_a_point_alone_in_its_class_is_left_out_but_stays_a_neighbor():
    points, labels = randn(5, 2, dtype=DOUBLE).requires_grad_(), torch.tensor([0, 0, 1, 0, 0])
    each = nca(points, labels, reduction="none")
    assert each.isinf().tolist() == [False, False, True, False, False]
    kept = each[labels == 0]
    assert_close(nca(points, labels), kept.mean(), rtol=1e-14, atol=0)
    assert_close(nca(points, labels, reduction="sum"), kept.sum(), rtol=1e-14, atol=0)
    (gradient,) = torch.autograd.grad(nca(points, labels), points)
    assert bool(torch.isfinite(gradient).all())
    assert float(gradient[2].abs().max()) > 0


def test_repeated_points_share_the_neighborhood():
    found = neighbor_probabilities(torch.zeros(4, 2, dtype=DOUBLE))
    assert_close(found, (1 - torch.eye(4, dtype=DOUBLE)) / 3, rtol=1e-15, atol=0)


POINTS = torch.zeros(3, 2)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: nca(POINTS[:1], LABELS[:1]), "points"),
        (lambda: neighbor_probabilities(POINTS[0]), "points"),
        (lambda: nca(POINTS.long(), LABELS[:3]), "points"),
        (lambda: nca(POINTS, LABELS[:3].float()), "labels"),
        (lambda: nca(POINTS, [0, 0, 1]), "labels"),
        (lambda: nca(POINTS, LABELS[:2]), "labels"),
        (lambda: nca(POINTS, torch.arange(3)), "two points"),
        (lambda: nca(POINTS, LABELS[:3], torch.eye(3)), "transform"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(call, sentence):
    with pytest.raises(UserError, match=sentence):
        call()
