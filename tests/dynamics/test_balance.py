"""Doubly stochastic attention by log weights of keys."""

import pytest
import torch
from torch.testing import assert_close

from massieu import attend
from massieu.checks import UserError
from massieu.dynamics import balance


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (9, 4), (1, 3)])
def test_every_query_gives_one_and_every_key_receives_the_same(queries, keys):
    query, key = randn(2, queries, 3), randn(2, keys, 3, seed=1)
    found = balance(query, key, scale=0.7, tolerance=1e-12)
    weights = attend(query, key, torch.eye(keys).double().expand(2, -1, -1), found.log_weight, scale=0.7).output
    assert found.converged
    assert found.log_weight.shape == (2, 1, keys)
    assert_close(weights.sum(-1), torch.ones(2, queries).double(), rtol=0, atol=1e-12)
    assert_close(weights.sum(-2), torch.full((2, keys), queries / keys, dtype=torch.float64), rtol=0, atol=1e-10)


def test_the_weights_are_those_of_sinkhorns_algorithm_on_the_matrix():
    x = randn(6, 3)
    matrix = torch.exp(0.5 * x @ x.T)
    for _ in range(500):
        matrix = matrix / matrix.sum(1, keepdim=True)
        matrix = matrix / matrix.sum(0, keepdim=True)
    found = balance(x, x, scale=0.5, tolerance=1e-13)
    assert_close(attend(x, x, torch.eye(6).double(), found.log_weight, scale=0.5).output, matrix, rtol=0, atol=1e-10)


def test_derivatives_pass_through_the_steps():
    x = randn(4, 2).requires_grad_()
    y = randn(4, 2, seed=1)

    def output(x: torch.Tensor) -> torch.Tensor:
        return attend(x, y, y, balance(x, y, scale=0.3, tolerance=0.0, max_steps=60).log_weight, scale=0.3).output

    torch.autograd.gradcheck(output, x)


def test_a_search_reports_its_outcome():
    x = 3 * randn(8, 3)
    none, few = balance(x, x, max_steps=0), balance(x, x, max_steps=3)
    assert (none.steps, none.converged) == (0, False)
    assert bool((none.log_weight == 0).all())
    assert (few.steps, few.converged) == (3, False)
    assert few.message.startswith("stopped at max_steps after 3 steps; ")
    assert balance(0.1 * x, 0.1 * x).message.startswith("converged after ")
    assert float(few.residual) < float(none.residual)


def test_wrong_arguments_get_a_sentence():
    x = randn(4, 2)
    with pytest.raises(UserError, match="query"):
        balance(x[0], x)
    with pytest.raises(UserError, match="key"):
        balance(x, x[:0])
    with pytest.raises(UserError, match="max_steps"):
        balance(x, x, max_steps=-1)
