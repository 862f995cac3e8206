"""Token selection as a problem: scores, heads and targets, what is assumed, and what is refused."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from massieu.checks import UserError
from massieu.margin import TokenSelection, random_problem

TOKENS = torch.arange(12.0).reshape(2, 3, 2).sin()
QUERIES = torch.tensor([[1.0, 0.5], [-0.3, 2.0]])
SCORES = torch.tensor([[1.0, 2.0, 0.0], [3.0, 0.0, 1.0]])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_objective_is_the_loss_of_attended_scores_written_as_loops():
    problem = TokenSelection(TOKENS, QUERIES, scores=SCORES)
    weights = normal(2, 2)
    total = 0.0
    for i in range(2):
        logits = [float(TOKENS[i, t].double() @ weights @ QUERIES[i].double()) for t in range(3)]
        powers = [math.exp(logit) for logit in logits]
        score = sum(p * float(g) for p, g in zip(powers, SCORES[i], strict=True)) / sum(powers)
        total += math.log1p(math.exp(-score)) / 2
    assert float(problem.objective(weights)) == pytest.approx(total, rel=1e-12)


def test_a_linear_head_is_the_same_as_its_scores():
    head, labels = normal(2), torch.tensor([1, -1])
    problem = TokenSelection(TOKENS, QUERIES, labels=labels, head=head)
    same = TokenSelection(TOKENS, QUERIES, scores=labels[:, None] * (TOKENS.double() @ head))
    weights = normal(2, 2, seed=1)
    assert problem.linear
    assert_close(problem.scores, same.scores)
    assert_close(problem.objective(weights), same.objective(weights))
    function = TokenSelection(TOKENS, QUERIES, labels=labels, head=lambda states: (states @ head)[..., None])
    assert not function.linear
    assert_close(function.objective(weights), same.objective(weights))
    assert function.selection().tolist() == same.selection().tolist()


def test_scores_of_a_head_with_classes_are_minus_the_losses_of_single_tokens():
    head, labels = normal(3, 2), torch.tensor([2, 0])
    problem = TokenSelection(TOKENS, QUERIES, labels=labels, head=head)
    for i in range(2):
        for t in range(3):
            log_probability = (head @ TOKENS[i, t].double()).log_softmax(0)[labels[i]]
            assert float(problem.scores[i, t]) == pytest.approx(float(log_probability))
    assert problem.loss_of(torch.tensor([1, 2])) == pytest.approx(
        -float(problem.scores[0, 1] + problem.scores[1, 2]) / 2
    )


def test_ragged_sequences_are_those_of_a_padded_tensor_with_lengths():
    lengths = torch.tensor([3, 2])
    rows = [TOKENS[0], TOKENS[1, :2]]
    ragged = TokenSelection(rows, QUERIES, scores=[SCORES[0], SCORES[1, :2]])
    padded = TokenSelection(TOKENS, QUERIES, scores=SCORES, lengths=lengths)
    weights = normal(2, 2)
    assert ragged.lengths.tolist() == padded.lengths.tolist() == [3, 2]
    assert_close(ragged.attention(weights), padded.attention(weights))
    assert float(ragged.attention(weights)[1, 2]) == 0
    assert_close(ragged.objective(weights), padded.objective(weights))
    assert not torch.allclose(
        padded.objective(weights), TokenSelection(TOKENS, QUERIES, scores=SCORES).objective(weights)
    )


def test_targets_are_differentiable_where_a_token_is_absent():
    targets = torch.tensor([[0.5, 0.5, 0.0], [0.25, 0.75, 0.0]])
    problem = TokenSelection(TOKENS, QUERIES, targets=targets, lengths=torch.tensor([3, 2]))
    weights = normal(2, 2).requires_grad_()
    (gradient,) = torch.autograd.grad(problem.objective(weights), weights)
    assert gradient.isfinite().all()
    attention = problem.attention(weights.detach()).requires_grad_()
    (gradient,) = torch.autograd.grad(problem.losses(attention).sum(), attention)
    assert gradient.isfinite().all()
    assert_close(problem.objective(weights), problem.losses(problem.attention(weights)).mean())


def test_margins_are_leads_over_the_strongest_rival():
    problem = TokenSelection(TOKENS, QUERIES, scores=SCORES)
    weights = normal(2, 2)
    logits = problem.logits(weights)
    expected = [logits[0, 1] - max(logits[0, 0], logits[0, 2]), logits[1, 0] - max(logits[1, 1], logits[1, 2])]
    assert_close(problem.margins(weights), torch.stack(expected))
    differences = problem.differences(problem.selection())
    leads = torch.einsum("ntd,de,ne->nt", differences, weights, problem.queries)
    assert_close(leads, logits.gather(1, problem.selection()[:, None]) - logits)
    assert problem.selected(weights).tolist() == logits.argmax(-1).tolist()


def test_ties_are_found_up_to_rounding():
    scores = torch.tensor([[1.0, 1.0 - 1e-13, 0.0], [3.0, 0.0, 1.0]], dtype=torch.float64)
    problem = TokenSelection(TOKENS, QUERIES, scores=scores)
    assert problem.best.tolist() == [[True, True, False], [True, False, False]]
    with pytest.raises(UserError, match="sequence 0 has 2"):
        problem.selection()


def test_assumptions_are_checked():
    eye = torch.eye(6)
    good = TokenSelection(eye.reshape(2, 3, 6), eye[:2], scores=torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 2.0]]))
    found = good.assumptions()
    assert (found.unique, found.tied, found.equal_scores, found.near_orthogonal, found.independent) == (
        True,
        (),
        True,
        True,
        True,
    )
    assert found.coherence == 0
    dense = TokenSelection(TOKENS, QUERIES[:1].expand(2, -1), scores=torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 2.0]]))
    found = dense.assumptions()
    assert (found.unique, found.tied, found.equal_scores, found.near_orthogonal, found.independent) == (
        False,
        (0,),
        False,
        False,
        False,
    )
    flat = TOKENS.double().reshape(-1, 2)
    gram = flat @ flat.mT
    expected = (gram - gram.diagonal().diag()).abs().max() / gram.diagonal().min()
    assert found.coherence == pytest.approx(float(expected))


@pytest.mark.parametrize("kind", ["head", "equal", "tied", "soft"])
def test_random_problems_have_the_properties_of_their_kind(kind):
    problem = random_problem(4, 5, 7, kind=kind, best=3, generator=torch.Generator().manual_seed(3))
    same, other = (random_problem(4, 5, 7, kind=kind, best=3, generator=seed) for seed in (3, 4))
    assert_close(problem.tokens, same.tokens)
    assert_close(problem.scores, same.scores)
    assert not torch.allclose(problem.tokens, other.tokens)
    assert_close(problem.tokens.norm(dim=-1), torch.ones(4, 5, dtype=torch.float64))
    assert set(problem.best.sum(-1).tolist()) == {3 if kind in ("tied", "soft") else 1}
    assert problem.assumptions().equal_scores == (kind != "head")
    assert (problem.targets is not None) == (kind == "soft")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss": "hinge"}, "loss"),
        ({"scores": None}, "got none of them"),
        ({"targets": SCORES}, "got scores, targets"),
        ({"labels": torch.ones(2)}, "got scores, labels"),
        ({"tokens": TOKENS[0]}, "tokens"),
        ({"tokens": []}, "tokens"),
        ({"tokens": [TOKENS[0], TOKENS[1, :0]]}, "tokens"),
        ({"tokens": [TOKENS[0], TOKENS[1, :1]]}, "tokens"),
        ({"tokens": [TOKENS[0], TOKENS[1, :, :1]]}, "tokens"),
        ({"tokens": TOKENS / 0}, "tokens"),
        ({"tokens": TOKENS, "lengths": torch.tensor([3, 4])}, "lengths"),
        ({"tokens": TOKENS, "lengths": torch.tensor([3, -1])}, "lengths"),
        ({"tokens": list(TOKENS), "lengths": torch.tensor([3, 2])}, "lengths"),
        ({"queries": QUERIES[:1]}, "queries"),
        ({"queries": QUERIES[0]}, "queries"),
        ({"queries": QUERIES * torch.nan}, "queries"),
        ({"scores": SCORES[:, :2]}, "scores"),
        ({"scores": []}, "scores"),
        ({"scores": torch.ones(0, 3)}, "scores"),
        ({"scores": torch.ones(3, 3)}, "scores"),
        ({"scores": SCORES.double() * 1e80}, "scores"),
        ({"scores": SCORES.cfloat()}, "scores"),
        ({"tokens": TOKENS.cfloat()}, "tokens"),
        ({"tokens": TOKENS.double() * 1e100}, "tokens"),
        ({"queries": QUERIES.double() * 1e-200}, "queries"),
        ({"tokens": TOKENS, "lengths": torch.tensor([3, 2.5])}, "lengths"),
        ({"tokens": TOKENS, "lengths": torch.ones(2, 2)}, "lengths"),
        ({"scores": None, "labels": torch.tensor([0.7, 1.9]), "head": torch.ones(3, 2)}, "labels"),
        ({"scores": None, "labels": torch.tensor([True, False]), "head": torch.ones(2)}, "labels"),
        ({"scores": None, "labels": torch.ones(2), "head": lambda states: states.sum(-1) * torch.nan}, "head"),
        ({"scores": None, "labels": torch.ones(2), "head": lambda states: 1.0}, "head"),
        ({"scores": SCORES.log()}, "scores"),
        ({"scores": None, "targets": SCORES}, "targets"),
        ({"scores": None, "labels": torch.ones(3), "head": torch.ones(2)}, "labels"),
        ({"scores": None, "labels": torch.zeros(2), "head": torch.ones(2)}, "labels"),
        ({"scores": None, "labels": torch.tensor([0, 3]), "head": torch.ones(3, 2)}, "labels"),
        ({"scores": None, "labels": torch.ones(2), "head": torch.ones(3)}, "head"),
        ({"scores": None, "labels": torch.ones(2), "head": lambda states: states.sum()}, "head"),
    ],
)
def test_bad_input_gets_a_sentence(arguments, message):
    given = {"tokens": TOKENS, "queries": QUERIES, "scores": SCORES, **arguments}
    with pytest.raises(UserError, match=message):
        TokenSelection(**given)


MLP = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Dropout(0.5), torch.nn.Linear(4, 3))


def test_a_module_is_copied_to_float64_and_evaluates():
    labels = torch.tensor([2, 0])
    problem = TokenSelection(TOKENS, QUERIES, labels=labels, head=MLP.train())
    plain = MLP.double().eval()
    same = TokenSelection(TOKENS, QUERIES, labels=labels, head=lambda states: plain(states))
    weights = normal(2, 2)
    assert_close(problem.scores, same.scores)
    assert_close(problem.objective(weights), same.objective(weights))
    assert not problem.objective(weights).requires_grad
    MLP.float().train()
    TokenSelection(TOKENS, QUERIES, labels=labels, head=MLP)
    assert MLP.training
    assert MLP[0].weight.dtype == torch.float32
    assert MLP[0].weight.requires_grad


def test_a_function_that_cannot_take_float64_gets_a_sentence():
    with pytest.raises(UserError, match="head"):
        TokenSelection(TOKENS, QUERIES, labels=torch.ones(2), head=lambda states: states @ torch.ones(2))


def test_heads_and_labels_may_be_lists_and_labels_booleans():
    listed = TokenSelection(TOKENS, QUERIES, labels=[1, -1], head=[0.5, 1.0])
    assert listed.linear
    assert_close(
        listed.scores,
        TokenSelection(TOKENS, QUERIES, labels=torch.tensor([1.0, -1.0]), head=torch.tensor([0.5, 1.0])).scores,
    )
    flags, classes = torch.tensor([True, False]), torch.tensor([1, 0])
    head = normal(2, 2)
    assert_close(*(TokenSelection(TOKENS, QUERIES, labels=labels, head=head).scores for labels in (flags, classes)))


def test_weights_of_any_precision_are_taken_and_of_any_other_shape_refused():
    problem = TokenSelection(TOKENS, QUERIES, scores=SCORES)
    weights = torch.eye(2)
    for method in (problem.logits, problem.attention, problem.objective, problem.selected, problem.margins):
        assert_close(method(weights), method(weights.double()))
        with pytest.raises(UserError, match="weights"):
            method(torch.ones(2, 3))
    leaf = torch.eye(2, requires_grad=True)
    problem.objective(leaf).backward()
    assert leaf.grad.dtype == torch.float32
    assert leaf.grad.any()


def test_absent_tokens_cannot_be_selected():
    problem = TokenSelection(TOKENS, QUERIES, scores=SCORES, lengths=torch.tensor([3, 2]))
    for method in (problem.loss_of, problem.differences, problem.tied, lambda one: problem.margins(torch.eye(2), one)):
        method([2, 1])
        for selection in ([2, 2], [-1, 0], [0], torch.zeros(2), torch.tensor([True, False])):
            with pytest.raises(UserError, match="selection"):
                method(selection)


def test_tokens_tied_with_a_selection_are_found_in_any_units():
    scores = torch.tensor([[0.1 + 0.2, 0.3, 0.0, 0.0], [1.0, 0.0, 0.5, 0.5]], dtype=torch.float64)
    for unit in (1e-50, 1.0, 1e50):
        problem = TokenSelection(normal(2, 4, 3), QUERIES, scores=unit * scores)
        assert problem.tied([1, 0]).tolist() == [[True, True, False, False], [True, False, False, False]]
        assert problem.tied([2, 3]).tolist() == [[False, False, True, True], [False, False, True, True]]
    soft = TokenSelection(normal(1, 4, 3), QUERIES[:1], targets=torch.tensor([[0.5, 0.3, 0.2, 0.0]]))
    assert soft.tied([1]).tolist() == [[True, True, True, False]]
    assert soft.tied([3]).tolist() == [[False, False, False, True]]


def test_a_problem_is_shown_in_a_line():
    problem = TokenSelection(TOKENS, QUERIES, scores=torch.ones(2, 3), lengths=torch.tensor([3, 2]))
    assert repr(problem) == "TokenSelection(2 sequences of 2 to 3 tokens, dim 2, query_dim 2, by scores, 2 tied)"


def test_bad_random_problems_get_a_sentence():
    with pytest.raises(UserError, match="kind"):
        random_problem(2, 3, 4, kind="odd")
    with pytest.raises(UserError, match="best"):
        random_problem(2, 3, 4, kind="tied", best=3)
