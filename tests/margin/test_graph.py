"""Next-token data as graphs: components against reachability, weights against cvxpy."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from massieu.checks import UserError
from massieu.margin import graph_margin, token_graph

cp = pytest.importorskip("cvxpy")

VOCABULARY, DIM = 6, 8


def data(seed, count=20, length=4):
    generator = torch.Generator().manual_seed(seed)
    sequences = [torch.randperm(VOCABULARY, generator=generator)[:length] for _ in range(count)]
    labels = [int(row[torch.randint(length, (), generator=generator)]) for row in sequences]
    embeddings = torch.randn(VOCABULARY, DIM, generator=generator, dtype=torch.float64)
    return embeddings, sequences, labels


def reach(sequences, labels, last):
    """Reachability among tokens, by squaring until there is no change."""
    edges = np.eye(VOCABULARY, dtype=bool)
    for row, label in zip(sequences, labels, strict=True):
        if int(row[-1]) == last:
            edges[label, row.numpy()] = True
    for _ in range(VOCABULARY):
        edges = edges @ edges
    return edges


@pytest.mark.parametrize("seed", range(3))
def test_tokens_share_a_component_when_they_reach_each_other(seed):
    _, sequences, labels = data(seed)
    graph = token_graph(sequences, labels)
    shared = 0
    for group, last in enumerate(graph.last.tolist()):
        reached = reach(sequences, labels, last)
        component = graph.component[group]
        here = {int(token) for row in sequences if int(row[-1]) == last for token in row}
        assert {token for token in range(VOCABULARY) if component[token] >= 0} == here
        for a in here:
            for b in here:
                assert (component[a] == component[b]) == (reached[a, b] and reached[b, a])
                shared += a < b and bool(component[a] == component[b])
    assert shared > 0
    assert len(graph.above) > 0


@pytest.mark.parametrize("norm", ["fro", "nuc"])
@pytest.mark.parametrize("seed", range(3))
def test_cvxpy_agrees_on_all_pairs(seed, norm):
    """There with an equality or margin for every pair that is reached, not for one of each component."""
    embeddings, sequences, labels = data(seed)
    found = graph_margin(embeddings, token_graph(sequences, labels), norm=norm)
    weights, e, constraints = cp.Variable((DIM, DIM)), embeddings.numpy(), []
    for last in found.graph.last.tolist():
        reached = reach(sequences, labels, last)
        for a in range(VOCABULARY):
            for b in range(VOCABULARY):
                if a != b and reached[a, b]:
                    value = (e[a] - e[b]) @ weights @ e[last]
                    constraints.append(value == 0 if reached[b, a] else value >= 1)
    size = cp.norm(weights, "fro") if norm == "fro" else cp.normNuc(weights)
    program = cp.Problem(cp.Minimize(size), constraints)
    # Redundant equalities stop Clarabel's first step with a semidefinite cone.
    program.solve(**({"solver": "CLARABEL"} if norm == "fro" else {"solver": "SCS", "eps": 1e-8, "max_iters": 20000}))
    assert found.feasible
    assert found.converged
    assert found.gap <= (1e-9 if norm == "fro" else 1e-5)
    assert abs(found.upper / program.value - 1) < (1e-6 if norm == "fro" else 1e-5)
    if norm == "fro":
        assert_close(found.weights, torch.from_numpy(weights.value), rtol=0, atol=1e-4 * program.value)


def test_weights_meet_equalities_and_margins_and_multipliers_are_their_price():
    embeddings, sequences, labels = data(0)
    graph = token_graph(sequences, labels)
    found = graph_margin(embeddings, graph)

    def values(rows):
        difference = embeddings[rows[:, 1]] - embeddings[rows[:, 2]]
        return torch.einsum("cd,dq,cq->c", difference, found.weights, embeddings[graph.last[rows[:, 0]]])

    assert values(graph.equal).abs().max() < 1e-12
    assert values(graph.above).min() > 1 - 1e-12
    assert_close(found.dual.sum(), found.weights.square().sum(), rtol=1e-9, atol=0)
    assert ((values(graph.above) - 1) * found.dual).abs().max() < 1e-8
    assert abs(found.margin * found.upper - 1) < 1e-12


def test_one_token_leads_nowhere_and_cycles_ask_for_nothing():
    graph = token_graph([[1], [0, 2], [2, 0, 2]], [1, 0, 2])
    assert graph.last.tolist() == [1, 2]
    assert graph.above.tolist() == []
    assert graph.equal.tolist() == [[1, 0, 2]]
    found = graph_margin(torch.eye(3), graph)
    assert found.feasible
    assert found.gap == 0
    assert not found.weights.any()


def test_equal_embeddings_cannot_be_ordered():
    embeddings, sequences, labels = data(0)
    graph = token_graph(sequences, labels)
    assert graph_margin(embeddings, graph).feasible
    found = graph_margin(embeddings[:1].expand(VOCABULARY, -1), graph)
    assert not found.feasible
    assert found.eps == 0
    assert found.gap == float("inf")
    assert found.margin == 0


def test_an_order_against_an_equality_has_a_certificate():
    graph = token_graph([[0, 1, 3], [1, 0, 3], [0, 2, 3]], [0, 1, 0])
    line = torch.tensor([[0.0, 1.0], [1.0, 1.0], [3.0, 1.0], [0.0, 5.0]], dtype=torch.float64)
    line = torch.cat([line[:, :1], torch.zeros(4, 1)], 1) + torch.tensor([0.0, 1.0])  # on a line, so all are equal
    found = graph_margin(line, graph)
    assert not found.feasible
    assert found.converged
    assert found.eps < 1e-9
    rows = torch.cat([graph.above, graph.equal])
    combined = torch.einsum(
        "c,cd,cq->dq", found.farkas, line[rows[:, 1]] - line[rows[:, 2]], line[graph.last[rows[:, 0]]]
    )
    assert combined.norm() < 1e-9
    assert abs(float(found.farkas[: len(graph.above)].sum()) - 1) < 1e-12


@pytest.mark.parametrize(
    ("sequences", "labels", "sentence"),
    [
        ([[0, 1]], [2], "labels"),
        ([[0, 1]], [0, 1], "one label"),
        ([], [], "one label"),
        ([[0, -1]], [0], "sequences"),
        ([[0.5, 1.0]], [1], "sequences"),
        ([[]], [1], "sequences"),
    ],
)
def test_bad_data_get_a_sentence(sequences, labels, sentence):
    with pytest.raises(UserError, match=sentence):
        token_graph(sequences, labels)


def test_bad_embeddings_get_a_sentence():
    graph = token_graph([[0, 1, 2]], [0])
    with pytest.raises(UserError, match="one row"):
        graph_margin(torch.ones(2, 4), graph)
    with pytest.raises(UserError, match="embeddings"):
        graph_margin(torch.full((3, 4), float("nan")), graph)
    with pytest.raises(UserError, match="norm"):
        graph_margin(torch.ones(3, 4), graph, norm="op")
    with pytest.raises(UserError, match="embeddings"):
        graph_margin(1e70 * torch.ones(3, 4, dtype=torch.float64), graph)


@pytest.mark.parametrize("options", [{"max_steps": 0}, {"tolerance": -1.0}])
def test_bad_requests_get_a_sentence(options):
    with pytest.raises(UserError, match=next(iter(options))):
        graph_margin(torch.eye(3), token_graph([[0, 1, 2]], [0]), **options)


def test_labels_may_be_a_tensor_of_whole_numbers():
    sequences = [[0, 1, 2], [1, 0, 2]]
    same = token_graph(sequences, torch.tensor([0.0, 1.0]))
    assert torch.equal(same.equal, token_graph(sequences, [0, 1]).equal)
    with pytest.raises(UserError, match="labels"):
        token_graph(sequences, torch.tensor([0.0, 0.5]))


def test_the_norm_may_come_third_and_the_message_says_the_end():
    graph = token_graph([[0, 1, 2], [1, 0, 2]], [0, 1])
    found = graph_margin(torch.eye(3), graph, "nuc")
    assert found.message.startswith("solved: the bounds agree to ")
    assert repr(found) == f"GraphMargin of 1 graphs: {found.message}"
    assert (found.residual, found.steps > 0) == (found.gap, True)
    assert graph_margin(torch.eye(3), token_graph([[0, 0]], [0])).message.startswith("no constraints")
