import numpy as np
import torch
from torch.testing import assert_close

from massieu import bregman


def test_divergence_is_the_bregman_divergence_with_exchanged_arguments(measure, natural):
    other = 0.5 * natural
    assert_close(
        measure.divergence(natural, other), bregman(measure.log_normalizer, other, natural), rtol=1e-10, atol=1e-11
    )


def test_divergence_is_the_fisher_metric_integrated_along_the_ray(measure, natural):
    # KL(p_eta || p_0) = int_0^1 t eta' C(t eta) eta dt, which neither the potential nor the mean enters.
    nodes, weights = (torch.tensor(x, dtype=torch.float64) for x in np.polynomial.legendre.leggauss(80))
    total = torch.zeros_like(natural[..., 0])
    for t, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
        square = torch.einsum("...d,...de,...e->...", natural, measure.fisher(t * natural), natural)
        total = total + weight * t * square
    assert_close(measure.divergence(natural, 0 * natural), total, rtol=1e-7, atol=1e-11)


def test_divergence_is_positive_and_vanishes_only_for_equal_members(measure, natural):
    assert_close(measure.divergence(natural, natural), torch.zeros_like(natural[..., 0]), rtol=0, atol=1e-12)
    moved = natural.norm(dim=-1) > 1e-3
    assert bool((measure.divergence(natural, 0.5 * natural)[moved] > 1e-9).all())


def test_divergence_is_the_bregman_divergence_of_the_dual_in_order(measure, natural):
    # B_{G*}(m1, m2) = KL(p1 || p2), with G* known at both means and its gradient the natural parameter.
    other = 0.5 * natural
    first, second = measure.mean(natural), measure.mean(other)
    dual = measure.conjugate(natural) - measure.conjugate(other) - (other * (first - second)).sum(-1)
    scale = float(measure.log_normalizer(natural).abs().max())
    assert_close(dual, measure.divergence(natural, other), rtol=1e-10, atol=1e-13 * (1 + scale))
