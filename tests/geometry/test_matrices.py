"""The geometry of heads against the matrices of size dim x dim, written out in numpy."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from massieu.checks import UserError
from massieu.geometry import (
    LowRank,
    cosine,
    effective_rank,
    floored_spectrum,
    output_map,
    power_cosine,
    projector_maps,
    random_maps,
    score_map,
    singular_values,
    symmetric_fraction,
    whiten,
    whitened_head,
)

HEADS, RANK, DIM = 3, 4, 11
CLOSE = {"rtol": 1e-11, "atol": 1e-11}  # float64, products of three matrices of size ten


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def wishart(dim, tokens, seed=9):
    cloud = normal(tokens, dim, seed=seed) * torch.linspace(0.3, 2, dim, dtype=torch.float64)
    return cloud.mT @ cloud / tokens


@pytest.fixture
def factors():
    return [normal(HEADS, RANK, DIM, seed=seed) for seed in range(3)] + [normal(HEADS, DIM, RANK, seed=3)]


@pytest.fixture
def maps(factors):
    query, key, value, output = factors
    return score_map(query, key, 0.5), output_map(value, output)


def test_the_maps_are_the_products_of_the_weights(factors, maps):
    query, key, value, output = (x.numpy() for x in factors)
    for h in range(HEADS):
        assert_close(maps[0].dense()[h].numpy(), 0.5 * query[h].T @ key[h], **CLOSE)
        assert_close(maps[1].dense()[h].numpy(), output[h] @ value[h], **CLOSE)


def test_values_of_a_map_are_those_of_the_dense_matrix(maps):
    score, out = maps
    for h in range(HEADS):
        A, B = score.dense()[h].numpy(), out.dense()[h].numpy()
        sigma = np.linalg.svd(A, compute_uv=False)[:RANK]
        share = sigma / sigma.sum()
        expected = {
            "singular": sigma,
            "rank": np.exp(-(share * np.log(share)).sum()),
            "norm": np.sqrt((A**2).sum()),
            "trace": np.trace(A),
            "symmetric": ((A + A.T) ** 2).sum() / (4 * (A**2).sum()),
            "cosine": (A * B).sum() / np.sqrt((A**2).sum() * (B**2).sum()),
        }
        found = {
            "singular": singular_values(score)[h],
            "rank": effective_rank(singular_values(score))[h],
            "norm": score.norm[h],
            "trace": score.trace()[h],
            "symmetric": symmetric_fraction(score)[h],
            "cosine": cosine(out, score)[h],
        }
        for name, value in found.items():
            assert_close(value, torch.as_tensor(expected[name]), **CLOSE)


def test_the_whitened_head_is_that_of_the_dense_matrix(maps):
    covariance = wishart(DIM, 40)
    values, vectors = np.linalg.eigh(covariance.numpy())
    root = (vectors * np.sqrt(values)) @ vectors.T
    found = whitened_head(maps[0], floored_spectrum(covariance))
    for h in range(HEADS):
        M = root @ maps[0].dense()[h].numpy() @ root
        norm = np.sqrt((M**2).sum())
        assert_close(found.trace[h].item(), np.trace(M), **CLOSE)
        assert_close(found.cosine[h].item(), np.trace(M) / norm / np.sqrt(DIM), **CLOSE)
        assert_close(found.idempotency[h].item(), np.sqrt(((M @ M - M) ** 2).sum()) / norm, **CLOSE)
        assert_close(found.logit_sd[h].item(), norm, **CLOSE)


@pytest.mark.parametrize("exponent", [-1, -0.5, 0.5, 1])
def test_the_power_cosine_is_that_of_the_dense_sum(maps, exponent):
    covariance = wishart(DIM, 40)
    values, vectors = np.linalg.eigh(covariance.numpy())
    power = (vectors * values**exponent) @ vectors.T
    A = maps[0].dense().sum(0).numpy()
    S = (A + A.T) / 2
    expected = (S * power).sum() / np.sqrt((S**2).sum() * (power**2).sum())
    assert_close(power_cosine(maps[0], floored_spectrum(covariance), [exponent]).item(), expected, **CLOSE)


def test_the_logit_sd_is_the_spread_of_the_scores_of_independent_tokens(maps):
    covariance = wishart(DIM, 40)
    root = torch.linalg.cholesky(covariance)
    first, second = (normal(200_000, DIM, seed=seed) @ root.mT for seed in (1, 2))
    scores = torch.einsum("nd,nd->n", first @ maps[0].dense()[0], second)
    expected = whitened_head(maps[0], floored_spectrum(covariance)).logit_sd[0]
    assert_close(scores.std(), expected, rtol=0.02, atol=0)  # four standard errors of 2e5 heavy-tailed draws


def test_a_tied_head_has_gradient_cosine_one_and_an_opposite_one_minus_one(maps):
    score = maps[0]
    assert_close(cosine(LowRank(3 * score.left, score.right), score), torch.ones(HEADS).double(), **CLOSE)
    assert_close(cosine(LowRank(-score.left, score.right), score), -torch.ones(HEADS).double(), **CLOSE)


def test_the_symmetric_fraction_is_one_tied_zero_antisymmetric_and_half_at_random():
    query = normal(RANK, DIM)
    assert_close(symmetric_fraction(score_map(query, query)), torch.tensor(1.0).double(), **CLOSE)
    turn = torch.tensor([[0.0, 1.0], [-1.0, 0.0]]).double()
    assert_close(symmetric_fraction(score_map(query[:2], turn @ query[:2])), torch.tensor(0.0).double(), **CLOSE)
    many = symmetric_fraction(LowRank(normal(200, 8, 64), normal(200, 8, 64, seed=1)))
    expected = torch.tensor(0.5 + 1 / (2 * 64)).double()
    assert_close(many.mean(), expected, rtol=0, atol=0.002)  # three standard errors of 200 draws


def test_a_constructed_head_passes_the_whitened_test_and_a_random_one_does_not():
    rank, dim = 8, 32
    spectrum = floored_spectrum(wishart(dim, 200))
    wanted = projector_maps(spectrum, rank, heads=(5,), generator=torch.Generator().manual_seed(0))
    found = whitened_head(wanted, spectrum)
    assert_close(found.trace, torch.full((5,), 8.0).double(), **CLOSE)
    assert_close(found.cosine, torch.full((5,), 0.5).double(), **CLOSE)
    assert_close(found.idempotency, torch.zeros(5).double(), **CLOSE)
    assert_close(found.logit_sd, torch.full((5,), 8.0).double().sqrt(), **CLOSE)
    control = whitened_head(random_maps(wanted, torch.Generator().manual_seed(0)), spectrum)
    assert control.cosine.abs().max() < 0.2
    assert control.idempotency.min() > 0.5


def test_heads_whose_projectors_fill_the_space_fit_the_inverse_covariance_best():
    spectrum = floored_spectrum(wishart(12, 200))
    frame = torch.linalg.qr(normal(12, 12)).Q.view(3, 4, 12) @ spectrum.power(-0.5)
    fits = power_cosine(LowRank(frame, frame), spectrum, (-1, -0.5, 0.5, 1)).tolist()
    assert_close(fits[0], 1.0, **CLOSE)
    assert fits == sorted(fits, reverse=True)


def test_random_maps_keep_norms_and_shapes_and_come_from_the_generator(maps):
    drawn, again = (random_maps(maps[0], torch.Generator().manual_seed(5)) for _ in range(2))
    assert_close(drawn.norm, maps[0].norm, **CLOSE)
    assert drawn.left.shape == maps[0].left.shape
    assert torch.equal(drawn.left, again.left)
    assert cosine(drawn, maps[0]).abs().max() < 0.6


def test_a_map_of_zeros_has_no_direction_and_breaks_nothing():
    zero = score_map(torch.zeros(2, RANK, DIM), torch.zeros(2, RANK, DIM))
    assert singular_values(zero).eq(0).all()
    assert effective_rank(singular_values(zero)).isnan().all()
    assert symmetric_fraction(zero).isnan().all()
    assert cosine(zero, zero).isnan().all()
    found = whitened_head(zero, floored_spectrum(torch.eye(DIM)))
    assert found.trace.eq(0).all()
    assert found.logit_sd.eq(0).all()
    assert found.cosine.isnan().all()
    assert found.idempotency.isnan().all()
    assert power_cosine(zero, floored_spectrum(torch.eye(DIM)), [-1, 1]).isnan().all()
    assert random_maps(zero).norm.eq(0).all()


def test_factors_that_cancel_count_as_zero():
    turn = torch.linalg.qr(normal(2, 2)).Q
    nothing = torch.zeros(1, DIM).double()
    left, right = (turn @ torch.cat(rows) for rows in ((normal(1, DIM), nothing), (nothing, normal(1, DIM, seed=1))))
    cancelling = LowRank(left, right)
    assert cancelling.dense().any()  # but for rounding it would be zero
    assert cancelling.norm == 0
    assert symmetric_fraction(cancelling).isnan()
    assert cosine(cancelling, cancelling).isnan()


def test_repeated_rows_give_the_rank_that_is_there():
    query, key = normal(1, DIM).expand(RANK, DIM), normal(1, DIM, seed=1).expand(RANK, DIM)
    assert_close(effective_rank(singular_values(score_map(query, key))), torch.tensor(1.0).double(), rtol=0, atol=1e-12)


def test_infinite_weights_spoil_their_own_head_only(factors):
    query, key = factors[0].clone(), factors[1]
    query[1, 0, 0] = torch.inf
    score = score_map(query, key)
    clean = score_map(factors[0], key)
    for value in (
        singular_values,
        symmetric_fraction,
        lambda m: m.norm,
        lambda m: whitened_head(m, floored_spectrum(torch.eye(DIM))).cosine,
    ):
        assert value(score)[1].isnan().all()
        assert_close(value(score)[[0, 2]], value(clean)[[0, 2]])


def test_more_rows_than_dimensions_give_as_many_singular_values_as_dimensions():
    query, key = normal(6, 3), normal(6, 3, seed=1)
    expected = np.linalg.svd(query.numpy().T @ key.numpy(), compute_uv=False)
    assert_close(singular_values(score_map(query, key)).numpy(), expected, **CLOSE)


def test_maps_between_streams_of_different_size_have_no_symmetry():
    cross = score_map(normal(RANK, DIM), normal(RANK, DIM + 2))
    assert symmetric_fraction(cross).isnan()
    assert cosine(cross, cross.mT).isnan()
    taller = score_map(normal(RANK, DIM + 1), normal(RANK, DIM + 2))
    wider = score_map(normal(RANK, DIM), normal(RANK, DIM + 3))
    assert cosine(cross, taller).isnan()
    assert cosine(cross, wider).isnan()
    assert singular_values(cross).shape == (RANK,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_weights_are_computed_in_double(factors, dtype):
    query, key, *_ = (x.to(dtype) for x in factors)
    found = symmetric_fraction(score_map(query, key))
    assert found.dtype == torch.float64
    assert_close(found, symmetric_fraction(score_map(query.double(), key.double())), rtol=0, atol=0)


def test_a_covariance_of_few_tokens_is_floored():
    covariance = wishart(DIM, 4)
    values = floored_spectrum(covariance, floor=0.01).values
    assert_close(values.min(), 0.01 * covariance.trace() / DIM, **CLOSE)
    found = whitened_head(projector_maps(floored_spectrum(covariance), RANK), floored_spectrum(covariance))
    assert_close(found.trace, torch.tensor(4.0).double(), rtol=1e-9, atol=0)


def test_no_variance_at_all_leaves_negative_powers_undefined(maps):
    spectrum = floored_spectrum(torch.zeros(DIM, DIM))
    assert power_cosine(maps[0], spectrum, [-1, 1]).isnan().all()
    assert whitened_head(maps[0], spectrum).logit_sd.eq(0).all()


def test_a_covariance_that_is_not_finite_gives_nan(maps):
    spectrum = floored_spectrum(torch.full((DIM, DIM), torch.nan))
    assert all(value.isnan().all() for value in whitened_head(maps[0], spectrum))


def test_whitened_maps_are_those_of_the_symmetric_root_in_the_basis_of_the_eigenvectors(maps):
    spectrum = floored_spectrum(wishart(DIM, 40))
    root = spectrum.power(0.5)
    turned = spectrum.vectors @ whiten(maps[0], spectrum).dense() @ spectrum.vectors.mT
    assert_close(turned, root @ maps[0].dense() @ root, **CLOSE)


@pytest.mark.parametrize("shape", [(3,), (3, 4), (2, 3, 3)])
def test_a_covariance_must_be_square(shape):
    with pytest.raises(UserError, match="covariance must"):
        floored_spectrum(torch.zeros(shape))


@pytest.mark.parametrize("floor", [-0.1, 1.5, float("nan")])
def test_the_floor_is_a_share(floor):
    with pytest.raises(UserError, match="floor must"):
        floored_spectrum(torch.eye(2), floor=floor)
