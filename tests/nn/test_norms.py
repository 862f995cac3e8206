"""Renormalization of a cloud of tokens."""

from __future__ import annotations

import pytest
import torch
from draws import randn
from torch import Tensor, nn
from torch.testing import assert_close

from massieu.checks import UserError
from massieu.nn import Renormalization
from massieu.nn.norms import build_norm


def cloud(batch: int, tokens: int, dim: int) -> Tensor:
    return 5 + randn(batch, tokens, dim) @ randn(dim, dim, seed=1)


def covariance(x: Tensor) -> Tensor:
    return torch.stack([torch.cov(sequence.T, correction=0) for sequence in x])


def test_the_cloud_becomes_centered_and_white_by_a_symmetric_map():
    x = cloud(3, 50, 4)
    y = Renormalization(4, eps=0.0, dtype=torch.float64)(x)
    assert_close(y.mean(1), torch.zeros(3, 4, dtype=torch.float64), rtol=0, atol=1e-12)
    assert_close(covariance(y), torch.eye(4, dtype=torch.float64).expand(3, 4, 4), rtol=0, atol=1e-11)
    # Whitening by another root would be as white; only the symmetric one gives a symmetric, positive cross covariance.
    cross = torch.einsum("bnd,bne->bde", x - x.mean(1, keepdim=True), y) / 50
    assert_close(cross, cross.mT, rtol=0, atol=1e-11)
    assert bool((torch.linalg.eigvalsh(cross) > 0).all())


def test_weight_and_bias_set_the_target():
    norm, x = Renormalization(4, eps=0.0, dtype=torch.float64), cloud(2, 50, 4)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        norm.bias.copy_(torch.tensor([1.0, 0.0, 0.0, -1.0]))
        y = norm(x)
    assert_close(y.mean(1), norm.bias.detach().expand(2, 4), rtol=0, atol=1e-12)
    assert_close(covariance(y), torch.diag(norm.weight.detach() ** 2).expand(2, 4, 4), rtol=0, atol=1e-10)


def test_renormalizing_any_expansion_of_a_gaussian_is_the_identity():
    # Theorem 1: with h the law of x = Σ η, attention moves η to μ + (I + Σ) η, and RN undoes it, point by point.
    sigma, mu = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64), torch.tensor([1.0, -1.0]).double()
    white = Renormalization(2, eps=0.0, affine=False)
    values, vectors = torch.linalg.eigh(sigma)
    root = vectors @ torch.diag(values.rsqrt()) @ vectors.T
    eta = torch.linalg.solve(sigma, mu) + white(randn(1, 100, 2)) @ root
    moved = mu + eta @ (torch.eye(2, dtype=torch.float64) + sigma)
    assert_close(torch.linalg.solve(sigma, mu) + white(moved) @ root, eta, rtol=0, atol=1e-12)


def test_tokens_beyond_the_length_do_not_shape_the_cloud():
    norm, x = Renormalization(4, dtype=torch.float64), cloud(2, 9, 4)
    lengths = torch.tensor([9, 6])
    moved = x.clone()
    moved[1, 6:] += 100
    found = norm(moved, lengths)
    assert_close(found[0], norm(x)[0], rtol=0, atol=1e-12)
    assert_close(found[1, :6], norm(x[1:, :6])[0], rtol=0, atol=1e-12)
    assert_close(norm(x, 6)[:, :6], norm(x[:, :6]), rtol=0, atol=1e-12)
    assert bool(torch.isfinite(norm(x, torch.tensor([0, 1]))).all())
    moved[1, 6:] = torch.nan
    assert_close(norm(moved, lengths)[1, :6], found[1, :6], rtol=0, atol=1e-12)


@pytest.mark.parametrize("tokens", [3, 20])
def test_gradients_are_exact_also_where_eigenvalues_coincide(tokens):
    norm = Renormalization(6, eps=0.1, dtype=torch.float64)
    x = cloud(2, tokens, 6)
    x[1, :] = x[1, :1]  # a cloud without extent: all eigenvalues are zero
    assert torch.autograd.gradcheck(lambda x: norm(x, torch.tensor([tokens, 2])), x.requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_computed_in_single(dtype):
    x = cloud(2, 50, 4)
    y = Renormalization(4, dtype=dtype)(x.to(dtype))
    assert y.dtype == dtype
    exact = Renormalization(4, dtype=torch.float64)(x.to(dtype).double())
    # Measured: 3e-6 in float32 (the condition number is 70) and 8e-3, one rounding of numbers up to 3, in bfloat16.
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    assert_close(y.double(), exact, rtol=0, atol=bound)


def test_norms_have_names():
    kinds = {kind: type(build_norm(kind, 4, 1e-3, None, None)) for kind in ("layer", "rms", "zca", None)}
    assert kinds == {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "zca": Renormalization, None: nn.Identity}
    assert all(build_norm(kind, 4, 1e-3, None, None).eps == 1e-3 for kind in ("layer", "rms", "zca"))


def test_errors_say_what_to_do():
    with pytest.raises(UserError, match="norm must"):
        build_norm("batch", 4, 1e-5, None, None)
    with pytest.raises(UserError, match="x must"):
        Renormalization(4)(torch.randn(9, 4))
    assert repr(Renormalization(4)) == "Renormalization(4, eps=1e-05)"
