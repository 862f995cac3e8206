"""References of experiments: results written out for one claim, compared with others."""

import math
import re

import pytest
import torch

pytest.importorskip("scipy")
from massieu.checks import pip_install
from massieu.claims import Verdict, select
from massieu.claims.memory import polar_memories
from massieu.claims.recent import clusters, fenchel_young, freezing, next_token
from massieu.claims.universal.pattern_conditions import longest_path
from massieu.patterns import dilated, ring, star

# Statements of the slides and the paper that are loose or wrong, and the claims about each.
LOOSE = {
    "all stored patterns are fixed points": ["M1"],
    "capacity d / (2 log d), about 0.14 d": ["M2"],
    "diagonal kept": ["M3"],
    "sgn(W ξ b)": ["M4"],
    "continuous energy of Krotov and Hopfield": ["M15"],
    "convergence to a local minimum": ["M5"],
    "capacity 2^{d/2}": ["M6"],
    "exponential storage capacity": ["M7"],
    "convergence after one update": ["M8"],
    "no interference from correlated data": ["M9"],
    "V = K W_V is attention": ["M10"],
    "quadratic term models the skip": ["M11"],
    "Hessian of log Z is a second moment": ["C18"],
    "order of the Kullback-Leibler divergence": ["C14"],
    "ascent increases entropy": ["C23"],
    "a single step of gradient descent": ["I5"],
    "sign of the query, keys without it": ["I2", "I3"],
    "more sample efficient than are known": ["I14"],
}


def test_every_loose_statement_has_claims_that_do_not_simply_repeat_it():
    for keys in LOOSE.values():
        assert Verdict.HOLDS not in [claim.expected for claim in select(keys)]
    assert select(["M16"])[0].expected is Verdict.HOLDS  # proofs apply for fixed patterns


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=re.escape(pip_install("verify"))):
        polar_memories.digits()


def test_weights_by_bisection_are_those_of_projections_and_of_the_norm():
    scores = torch.tensor([[0.3, 0.1, -2.0]], dtype=torch.float64)
    assert torch.allclose(fenchel_young.by_bisection(scores, 2.0), torch.tensor([[0.6, 0.4, 0.0]]).double())
    # The 2-norm: of two equal scores that lead by one, each has one half.
    even = torch.tensor([[1.0, 1.0, 0.0]], dtype=torch.float64)
    assert torch.allclose(fenchel_young.by_bisection(even, None), torch.tensor([[0.5, 0.5, 0.0]]).double())
    alone = torch.tensor([[1.0, 0.0, -1.0]], dtype=torch.float64)
    assert torch.allclose(fenchel_young.by_bisection(alone, None), torch.eye(3)[:1].double())


def test_the_mean_of_log_z_is_that_of_samples():
    generator = torch.Generator().manual_seed(0)
    for beta in (0.7, 2.0):
        scores = beta * 8**0.5 * torch.randn(20000, round(math.exp(4)), generator=generator, dtype=torch.float64)
        values = torch.logsumexp(scores, -1)
        error = float(values.std()) / len(values) ** 0.5
        # e^4 is not a whole number of keys: 55 of them instead of 54.6.
        assert freezing.mean_log_normalizer(beta, 8) == pytest.approx(float(values.mean()), abs=4 * error + 0.01)


def test_the_correction_is_the_next_term():
    for beta in (1.5, 3.0):
        left = [
            freezing.mean_log_normalizer(beta, dim) - dim * freezing.limit(beta) - freezing.correction(beta, dim)
            for dim in (64, 256, 1024)
        ]
        assert abs(left[0]) > 2 * abs(left[1]) > 4 * abs(left[2])


def test_two_clusters_of_one_token_take_the_time_of_the_integral():
    found, expected = clusters.life(1.3, [1, 1], 5.0, 2000)
    assert found == pytest.approx(expected, rel=2e-3)


def test_the_reference_meets_its_constraints_and_no_shorter_weights_do():
    cp = pytest.importorskip("cvxpy")
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    odds = torch.tensor([[0.5, 0.5, 0, 0], [0, 0.2, 0.3, 0.5], [0, 0, 1, 0]], dtype=torch.float64)
    found = next_token.support_program(odds, embeddings)
    weights = cp.Variable(found.shape)
    constraints = []
    for shares, context in zip(odds, embeddings, strict=True):
        logits, inside = weights @ context.numpy(), shares.nonzero().flatten().tolist()
        constraints += [logits[inside[0]] == logits[t] for t in inside[1:]]
        constraints += [logits[t] - logits[u] >= 1 for t in inside for u in range(4) if shares[u] == 0]
    cp.Problem(cp.Minimize(cp.sum_squares(weights)), constraints).solve(solver="CLARABEL")
    assert torch.dist(found, torch.from_numpy(weights.value)) < 1e-5 * found.norm()


def test_log_odds_are_met_by_the_solution_in_the_subspace():
    embeddings = torch.randn(2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    odds = torch.tensor([[0.25, 0.75, 0.0], [0.2, 0.3, 0.5]], dtype=torch.float64)
    solution, inside = next_token.log_odds_solution(odds, embeddings)
    logits = embeddings @ solution.mT
    assert float((logits[1].softmax(-1) - odds[1]).abs().max()) < 1e-12
    assert float(logits[0, 1] - logits[0, 0]) == pytest.approx(float(torch.tensor(3.0).log()))
    assert torch.dist(inside(solution), solution) < 1e-12


def test_the_longest_path_is_that_of_small_graphs():
    assert longest_path(ring().mask(6).numpy()) == 6
    assert longest_path(star().mask(6).numpy()) == 3
    assert longest_path(dilated(1, 2).mask(6).numpy()) == 3
