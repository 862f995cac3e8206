import pytest
import torch
from draws import randn
from torch import Tensor
from torch.testing import assert_close

from massieu import Points, natural_from_mean, row_statistics
from massieu.checks import UserError


def test_the_mean_is_attention_with_the_keys_as_values():
    keys, queries = randn(7, 3), randn(4, 3, seed=1)
    weights = torch.softmax(queries @ keys.mT, -1)
    assert_close(Points(keys).mean(queries), weights @ keys)
    assert_close(Points(keys).probabilities(queries), weights)


def test_log_weights_are_a_bias_of_the_scores_and_scale_the_normalizer():
    keys, queries, log_weight = randn(7, 3), randn(4, 3, seed=1), randn(7, seed=2)
    weighted = Points(keys, log_weight)
    assert_close(weighted.mean(queries), torch.softmax(queries @ keys.mT + log_weight, -1) @ keys)
    assert_close(Points(keys, log_weight + 2.0).log_normalizer(queries), weighted.log_normalizer(queries) + 2.0)


def test_entropy_is_the_shannon_entropy_also_with_weights():
    points, queries = Points(randn(7, 3), randn(7, seed=2)), randn(4, 3, seed=1)
    p = points.probabilities(queries)
    assert_close(points.entropy(queries), -(p * p.log()).sum(-1))
    assert_close(points.entropy(queries), row_statistics(queries, points.support, points.log_weight).entropy)


def test_weights_may_depend_on_the_query_as_a_causal_mask_does():
    keys = randn(5, 3)
    mask = torch.full((5, 5), -torch.inf, dtype=torch.float64).triu(1)
    rows = Points(keys, mask).mean(keys)
    for i in range(5):
        assert_close(rows[i], Points(keys[: i + 1]).mean(keys[i : i + 1])[0])


def test_with_no_more_atoms_than_dimensions_the_mean_is_not_one_to_one():
    points = Points(randn(8, 16))
    differences = points.support[1:] - points.support[:1]
    off = torch.linalg.svd(differences).Vh[-1]  # orthogonal to every difference of keys
    queries = randn(4, 16, seed=1)
    assert_close(points.mean(queries + 3 * off), points.mean(queries), rtol=0, atol=1e-13)
    assert_close(torch.trace(points.affine_span()[0]), torch.tensor(7.0, dtype=torch.float64))


def test_a_sharp_row_keeps_the_digits_of_its_covariance():
    # Nearly one-hot: the variance is 1e-9 of the second moment, which a plain difference would lose.
    points = Points(torch.tensor([[1000.0], [1001.0]], dtype=torch.float64))
    query = torch.tensor([[-20.0]], dtype=torch.float64)
    p = torch.sigmoid(torch.tensor(-20.0, dtype=torch.float64))
    # The scores near 2e4 are themselves rounded by 4e-12, which is all the error there is.
    assert_close(points.fisher(query)[0, 0, 0], p * (1 - p), rtol=1e-11, atol=0)
    mean = points.mean(query)
    plain = points.probabilities(query) @ points.support.square() - mean.square()
    assert float((plain / (p * (1 - p)) - 1).abs()) > 1e-3


def test_an_absent_atom_neither_reaches_nor_spans():
    atoms = torch.tensor([[0.0, 0.0], [1.0, 0.0], [5.0, 5.0]], dtype=torch.float64)
    points = Points(atoms, torch.tensor([0.0, 0.0, -torch.inf], dtype=torch.float64))
    direction = torch.tensor([[1.0, 1.0]], dtype=torch.float64)
    assert_close(points.support_function(direction), torch.tensor([1.0], dtype=torch.float64))
    assert_close(points.affine_span()[0], torch.diag(torch.tensor([1.0, 0.0], dtype=torch.float64)))
    found = natural_from_mean(points, torch.tensor([[0.25, 0.0], [2.0, 2.0]], dtype=torch.float64))
    assert found.outside.tolist() == [False, True]
    assert not found.unique


def test_gradients_reach_the_keys_and_the_weights():
    keys, log_weight = randn(6, 3).requires_grad_(), randn(6, seed=1).requires_grad_()
    queries = randn(4, 3, seed=2).requires_grad_()

    def function(keys, log_weight, queries):
        points = Points(keys, log_weight)
        return points.log_normalizer(queries), points.mean(queries), points.fisher(queries), points.entropy(queries)

    assert torch.autograd.gradcheck(function, (keys, log_weight, queries), fast_mode=True)


def test_fisher_by_blocks_of_queries_is_the_same(monkeypatch):
    points, queries = Points(randn(9, 4)), randn(11, 4, seed=1)
    whole = points.fisher(queries)
    monkeypatch.setattr("massieu.measures.points.FISHER_NUMBERS", 9 * 4 * 3)
    assert_close(points.fisher(queries), whole)


def test_means_by_default_carry_gradients_to_the_parameters_of_a_measure():
    from massieu import Measure

    class Exponential(Measure):
        dim = 1

        def __init__(self, rate: Tensor) -> None:
            self.rate = rate

        def log_normalizer(self, natural: Tensor) -> Tensor:
            return -torch.log1p(-natural[..., 0] / self.rate)

    rate = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    natural = torch.tensor([[0.5]], dtype=torch.float64)
    mean = Exponential(rate).mean(natural)  # 1 / (rate - natural)
    assert_close(mean, 1 / (rate - natural))
    (slope,) = torch.autograd.grad(mean.sum(), rate)
    assert_close(slope, -1 / (rate.detach() - 0.5).square())
    assert not Exponential(rate.detach()).mean(natural).requires_grad
    with torch.no_grad():
        assert_close(Exponential(rate).fisher(natural)[0], 1 / (rate - natural).square())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Points(torch.zeros(3)), "support must have shape"),
        (lambda: Points(torch.zeros(0, 3)), "with at least one atom, got"),
        (lambda: Points(torch.zeros(2, 3).long()), "support must"),
        (lambda: Points(None), "support must"),
        (lambda: Points(torch.full((2, 3), torch.nan)), "support must be finite"),
        (lambda: Points(torch.zeros(2, 3), torch.zeros(3)), r"must have 2 entries .* got shape \(3,\); give"),
        (lambda: Points(torch.zeros(2, 3), torch.tensor([1.0, -1.0]).log()), "logarithm of a negative weight"),
        (lambda: Points(torch.zeros(2, 3), torch.tensor([0.0, torch.inf])), "got nan or plus infinity"),
        (lambda: Points(torch.zeros(2, 3), torch.ones(2).bool()), "got torch.bool; take the logarithm"),
        (lambda: Points(torch.zeros(2, 3), torch.full((2,), -torch.inf)), "leave one component in each row"),
    ],
)
def test_impossible_atoms_and_weights_are_refused(make, message):
    with pytest.raises(UserError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_list_of_atoms_is_taken_as_a_tensor():
    assert_close(
        Points([[0.0], [1.0]]).mean(torch.zeros(1, 1, dtype=torch.float64)), torch.tensor([[0.5]], dtype=torch.float64)
    )


def test_a_batch_that_does_not_fit_is_refused():
    with pytest.raises(UserError, match=r"leading axes that broadcast, got \(2,\) and \(5,\); insert"):
        Points(torch.zeros(2, 3, 4), torch.zeros(5, 1, 3))
    with pytest.raises(UserError, match=r"shapes that broadcast, got \(3, 2\) and \(4, 2\); pair"):
        Points(torch.zeros(5, 2)).divergence(torch.zeros(3, 2), torch.zeros(4, 2))
    points = Points(torch.zeros(3, 5, 2))
    with pytest.raises(UserError, match=r"leading axes that broadcast against \(3,\) of Points, got \(2,\); insert"):
        points.mean(torch.zeros(2, 4, 2))
