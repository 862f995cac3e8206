"""Classical scaling of Euclidean distances is principal components; other scaling is not."""

import pytest
import torch
from agreement import randn
from torch import Tensor
from torch.testing import assert_close

from massieu.checks import UserError
from massieu.contrast import classical_mds, pca

DOUBLE = torch.float64


def cloud() -> Tensor:
    return randn(30, 5, dtype=DOUBLE) * torch.tensor([3.0, 2.0, 1.5, 1.0, 0.5], dtype=DOUBLE) + 4


def exact_distances(points: Tensor) -> Tensor:
    return torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")


def test_classical_scaling_of_euclidean_distances_is_pca():
    points = cloud()
    scaled, components = classical_mds(exact_distances(points), dim=3), pca(points, dim=3)
    assert_close(scaled.points, components.points, rtol=0, atol=1e-12)
    assert_close(scaled.eigenvalues[:5], components.eigenvalues, rtol=1e-12, atol=0)
    assert float(scaled.eigenvalues[5:].abs().max()) < 1e-11


def test_the_rounding_of_fast_distances_is_tolerated():
    points = cloud()
    fast = torch.cdist(points, points, compute_mode="use_mm_for_euclid_dist")
    assert_close(classical_mds(fast, dim=3).points, pca(points, dim=3).points, rtol=0, atol=1e-6)


def test_in_full_dimension_the_inner_products_come_back():
    points = cloud()
    centered = points - points.mean(0)
    found = classical_mds(exact_distances(points), dim=5).points
    # Relative to norms near 60: measured 4e-14.
    assert float((found @ found.mT - centered @ centered.mT).abs().max()) < 1e-12
    assert float((found @ found.mT - points @ points.mT).abs().max()) > 1  # the control: not centered


def test_scaling_by_stress_gives_another_cloud():
    manifold = pytest.importorskip("sklearn.manifold")
    points = cloud()
    distances = exact_distances(points)
    start = pca(points, dim=2).points
    options = {"metric": True, "n_components": 2, "init": start.numpy(), "n_init": 1, "random_state": 0}
    stress, _ = manifold.smacof(distances.numpy(), **options, normalized_stress=False)
    stress = torch.as_tensor(stress)
    stress = stress - stress.mean(0)
    gram = start @ start.mT
    # Compared by inner products, which no rotation changes.
    assert float((stress @ stress.mT - gram).norm() / gram.norm()) > 1e-2


def test_distances_that_are_not_euclidean_are_seen_in_the_eigenvalues():
    square = torch.tensor([[0.0, 1, 2, 1], [1, 0, 1, 2], [2, 1, 0, 1], [1, 2, 1, 0]], dtype=DOUBLE)  # round a circle
    found = classical_mds(square, dim=4)
    assert float(found.eigenvalues.min()) < -0.1
    assert bool(torch.isfinite(found.points).all())
    assert float(found.points[:, -1].abs().max()) == 0


def test_one_point_lies_at_the_origin():
    assert classical_mds(torch.zeros(1, 1), dim=1).points.tolist() == [[0.0]]
    assert pca(torch.ones(1, 3), dim=1).points.tolist() == [[0.0]]


def test_gradients_reach_the_points():
    points = cloud()[:6].requires_grad_()
    assert torch.autograd.gradcheck(lambda x: pca(x, dim=2).points, (points,))
    distances = exact_distances(points).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(classical_mds(distances, dim=2).points.square().sum(), distances)
    assert bool(torch.isfinite(gradient).all())


SKEW = torch.tensor([[0.0, 1.0], [2.0, 0.0]])


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: classical_mds(torch.zeros(2, 3), 1), "distances"),
        (lambda: classical_mds(torch.zeros(2, 2).long(), 1), "distances"),
        (lambda: classical_mds(SKEW, 1), "symmetric"),
        (lambda: classical_mds(torch.eye(2), 1), "zero on their diagonal"),
        (lambda: classical_mds(-SKEW - SKEW.mT, 1), "not negative"),
        (lambda: classical_mds(torch.full((2, 2), torch.nan), 1), "symmetric, got nan"),
        (lambda: classical_mds(torch.zeros(2, 2), 3), "dim"),
        (lambda: pca(torch.zeros(5, 2), 0), "dim"),
        (lambda: pca(torch.zeros(5), 1), "points"),
        (lambda: pca(torch.zeros(5, 2).long(), 1), "points"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(call, sentence):
    with pytest.raises(UserError, match=sentence):
        call()
