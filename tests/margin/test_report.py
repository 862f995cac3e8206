"""One matrix and the tokens that it selects, against the max-margin weights of that selection."""

import pytest
import torch
from selections import dense, draw, nearly_twins

from massieu.checks import UserError
from massieu.margin import TokenSelection, max_margin, selection_report
from massieu.margin.report import NO_CONSTRAINTS, NOT_FEASIBLE, UNDECIDED, random_head, span_projection

TOKENS = torch.randn(5, 6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_values_are_those_of_dense_matrices():
    weights = torch.randn(8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = selection_report(weights, TOKENS)
    problem = TokenSelection(TOKENS, TOKENS[:, -1], scores=torch.zeros(5, 6))
    logits = torch.einsum("ntd,de,ne->nt", TOKENS, weights, TOKENS[:, -1])
    selection = logits.argmax(-1)
    best = max_margin(problem, selection=selection)
    rows = torch.as_tensor(dense(problem, selection, best.rivals))
    values = rows @ weights.flatten()
    span = torch.linalg.svd(rows, full_matrices=False)
    inner = span.Vh.mT @ (span.Vh @ weights.flatten()) if rows.shape[0] < rows.shape[1] else weights.flatten()
    product = float(weights.flatten() @ best.weights.flatten() / best.weights.norm())
    expected = {
        "rows": 5,
        "constraints": 25,
        "feasible": True,
        "reproduced": 1.0,
        "margin": float(values.min() / weights.norm()),
        "best_margin": best.margin,
        "margin_ratio": float(values.min() / weights.norm()) / best.margin,
        "span_share": float(inner.norm() / weights.norm()) ** 2,
        "correlation": product / float(weights.norm()),
        "span_correlation": product / float(inner.norm()),
    }
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-8), name
    assert found.correlation >= found.margin_ratio > 0
    assert found.note == ""
    # Neither units nor the dtype matter.
    again = selection_report(1e3 * weights.float(), TOKENS.float())
    assert again.correlation == pytest.approx(found.correlation, abs=1e-5)


def test_tokens_may_be_a_problem_or_have_other_queries():
    queries = torch.randn(5, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    weights = torch.randn(8, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    problem = TokenSelection(TOKENS, queries, scores=torch.zeros(5, 6))
    found, same = (
        selection_report(weights, problem, generator=4),
        selection_report(weights, TOKENS, queries, generator=4),
    )
    assert found == same
    assert selection_report(weights, problem, generator=5).random_correlation != found.random_correlation


def test_the_selection_may_be_another_than_that_of_the_matrix():
    problem = draw(5, 6, 8)
    best = max_margin(problem, selection=[0, 1, 2, 3, 4])
    found = selection_report(best.weights, problem, selection=[0, 1, 2, 3, 4])
    assert found.correlation == pytest.approx(1, abs=1e-9)
    other = selection_report(best.weights, problem, selection=[1, 2, 3, 4, 5])
    assert other.reproduced == 0
    assert other.correlation < 0.5
    assert other.margin < 0
    only = selection_report(best.weights, problem, selection=[0, 1, 2, 3, 4], compared=False)
    assert only.best_margin == found.best_margin
    assert only.correlation != only.correlation


def test_copies_are_one_token_and_undefined_values_have_a_note():
    tokens = TOKENS.clone()
    chosen = int((tokens[0] @ tokens[0, -1]).argmax())
    assert chosen > 0
    tokens[0, 0] = tokens[0, chosen]
    found = selection_report(torch.eye(8), tokens)
    assert found.feasible
    assert found.constraints == 24
    assert found.note == "1 of 5 rows have copies of the selected token, which have no constraint"
    assert NO_CONSTRAINTS in selection_report(torch.eye(8), tokens[:, :1].expand(-1, 3, -1)).note
    crowded = torch.randn(30, 8, 2, generator=torch.Generator().manual_seed(0))
    impossible = selection_report(torch.eye(2), crowded, selection=[0] * 30)
    assert not impossible.feasible
    assert impossible.note == NOT_FEASIBLE
    assert impossible.best_margin == 0
    assert impossible.correlation != impossible.correlation


def test_a_margin_below_the_resolution_of_the_solver_is_neither_there_nor_not():
    found = selection_report(torch.eye(5), nearly_twins(1e-10), selection=[0, 1], compared=False)
    assert found.feasible is None
    assert found.best_margin != found.best_margin
    assert found.note == UNDECIDED


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ((torch.eye(7), TOKENS), "weights"),
        ((torch.eye(8) / 0, TOKENS), "weights"),
        ((torch.eye(8), draw(5, 6, 8), TOKENS[:, 0]), "queries"),
        ((torch.eye(8), TOKENS[0]), "tokens"),
        ((torch.eye(8), []), "tokens"),
    ],
)
def test_bad_input_gets_a_sentence(given, sentence):
    with pytest.raises(UserError, match=sentence):
        selection_report(*given)


def test_the_projection_is_the_least_squares_one_on_all_differences():
    generator = torch.Generator().manual_seed(5)
    tokens = [torch.randn(count, 5, generator=generator, dtype=torch.float64) for count in (2, 4, 9)]
    queries = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    problem = TokenSelection(tokens, queries, scores=[torch.zeros(len(x)) for x in tokens])
    weights = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    rows = [
        torch.outer(x[t] - x[0], z).flatten() for x, z in zip(tokens, queries, strict=True) for t in range(1, len(x))
    ]
    span = torch.stack(rows, 1)
    expected = span @ torch.linalg.lstsq(span, weights.flatten()[:, None], driver="gelsd").solution
    found = span_projection(problem)(weights)
    torch.testing.assert_close(found, expected.view(5, 4), atol=1e-8, rtol=0)
    assert found.norm() < 0.99 * weights.norm()


def test_a_random_head_has_the_singular_values_and_nothing_else():
    weights = torch.randn(6, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = random_head(weights, torch.Generator().manual_seed(1))
    torch.testing.assert_close(torch.linalg.svdvals(drawn), torch.linalg.svdvals(weights))
    assert abs(float((drawn * weights).sum() / weights.norm() ** 2)) < 0.5


def test_a_projection_that_does_not_converge_is_no_result(monkeypatch):
    monkeypatch.setattr("scipy.sparse.linalg.cg", lambda *_, **__: (None, 1))
    problem = TokenSelection(TOKENS, TOKENS[:, 0], scores=torch.zeros(TOKENS.shape[:2]))
    with pytest.raises(ArithmeticError, match="did not converge; take fewer rows"):
        span_projection(problem)(torch.eye(8, dtype=torch.float64))
