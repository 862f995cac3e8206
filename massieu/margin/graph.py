"""Next-token data as graphs: labels point at the tokens they were preferred to, and cycles make tokens equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from massieu.margin.border import floats, sized, whole_numbers
from massieu.margin.minimum_norm import checked_tolerance, least_norm, sentence
from massieu.margin.program import Program, scipy_module

__all__ = ["GraphMargin", "TokenGraph", "graph_margin", "token_graph"]


@dataclass(frozen=True)
class TokenGraph:
    """For every last token, which tokens next-token data prefer to which.

    Attributes:
        last: the last tokens that occur, ascending, shape ``(graphs,)``.
        component: strongly connected component of every token in each graph, -1 where the token does not occur; shape
            ``(graphs, vocabulary)``.
        equal: rows (graph, token, token): two tokens of one component; each component is spanned once. The matrices
            :math:`(e_t - e_\tau) e_k^\top` of these rows span the finite component of training.
        above: rows (graph, token, token): a token of a component that points at another one, and a token of that.
    """

    last: Tensor
    component: Tensor
    equal: Tensor
    above: Tensor


@dataclass(frozen=True)
class GraphMargin:
    """Max-margin weights of next-token data; bounds and certificate as in ``MaxMargin``.

    Attributes:
        weights: shape ``(dim, dim)``; logits of a sequence are X W z, with the last token's embedding z.
        dual: a multiplier for each row of ``graph.above``.
        margin: largest margin of weights of norm one.
        lower, upper: the least norm lies between them.
        feasible: True if weights with a positive margin were found, False if ``farkas`` is given, None if undecided.
        farkas: multipliers for the rows of ``graph.above``, then ``graph.equal``, that show there are none, or None.
        eps: no weights of norm one that meet the equalities have a margin above it.
        converged: the bounds agree to the tolerance, or ``farkas`` is given.
        graph: what was asked.
    """

    weights: Tensor
    dual: Tensor
    margin: float
    lower: float
    upper: float
    feasible: bool | None
    farkas: Tensor | None
    eps: float
    converged: bool
    graph: TokenGraph

    @property
    def ended(self) -> str:
        """How the solver ended, a sentence."""
        return sentence(self.feasible, self.converged, len(self.graph.above) > 0, self.gap, self.eps)

    @property
    def gap(self) -> float:
        """Relative distance of the bounds; infinite where the data are not feasible."""
        if not self.feasible:
            return float("inf")
        return self.upper / self.lower - 1 if self.upper > 0 else 0.0


def token_graph(sequences: Sequence[Sequence[int] | Tensor], labels: Sequence[int] | Tensor) -> TokenGraph:
    """The graphs of next-token data, one for each last token: an edge from a label to every other token beside it.

    Args:
        sequences: token indices of each sequence; its last one is the query.
        labels: the token that came next in each sequence, one of its own.

    Source:
        Li et al. 2024, "Mechanics of next token prediction with self-attention": the token-priority graph.

    Example:
        >>> graph = token_graph([[0, 1, 2], [1, 0, 2]], [0, 1])
        >>> graph.last, graph.component
        (tensor([2]), tensor([[1, 1, 0]]))
        >>> graph.equal, graph.above
        (tensor([[0, 0, 1]]), tensor([[0, 0, 2]]))
    """
    rows = [torch.as_tensor(row) for row in sequences]
    if not rows or len(rows) != len(labels):
        raise ValueError(f"there must be one label for each sequence, got {len(labels)} for {len(rows)}")
    wanted = whole_numbers(labels, "labels", len(rows)).tolist()
    for i, (row, label) in enumerate(zip(rows, wanted, strict=True)):
        if row.ndim != 1 or row.dtype.is_floating_point or not len(row) or row.min() < 0:
            raise ValueError(f"sequences must hold token indices from 0, but sequence {i} is {row.tolist()}")
        if label not in row:
            raise ValueError(
                f"labels must occur in their sequences, but {label} is not in sequence {i}; attention cannot select it,"
                " so leave that sequence out"
            )
    last = sorted({int(row[-1]) for row in rows})
    size = 1 + max(int(row.max()) for row in rows)
    component, equal, above = torch.full((len(last), size), -1), [], []
    for group, query in enumerate(last):
        own = [(label, row.unique().tolist()) for row, label in zip(rows, wanted, strict=True) if row[-1] == query]
        edges = sorted({(label, token) for label, row in own for token in row if token != label})
        here = sorted({token for _, row in own for token in row})
        names = _components(edges, size)
        component[group, here] = torch.unique(torch.from_numpy(names[here]), return_inverse=True)[1]
        members = component[group].tolist()
        first = {members[token]: token for token in reversed(here)}
        equal += [(group, first[members[token]], token) for token in here if first[members[token]] != token]
        pairs = sorted({(first[members[a]], first[members[b]]) for a, b in edges if members[a] != members[b]})
        above += [(group, a, b) for a, b in pairs]
    triples = [torch.tensor(part, dtype=torch.long).reshape(-1, 3) for part in (equal, above)]
    return TokenGraph(torch.tensor(last), component, *triples)


def graph_margin(
    embeddings: Tensor, graph: TokenGraph, norm: str = "fro", *, tolerance: float | None = None, rounds: int = 6
) -> GraphMargin:
    r"""Weights of least norm that order the logits of every last token as its graph does.

    .. math:: \min_W |W| \quad\text{subject to}\quad \langle e_t - e_\tau, W e_k \rangle = 0 \text{ within a component},
        \; \ge 1 \text{ along an edge from one to another.}

    Args:
        embeddings: :math:`e_t`, shape ``(vocabulary, dim)``.
        graph: of ``token_graph``.
        norm: "fro" or "nuc".
        tolerance: on the relative gap between the bounds.
        rounds: of the solver.

    Source:
        Li et al. 2024, the graph form of the max-margin program.

    Example:
        >>> graph = token_graph([[0, 1, 2], [1, 0, 2]], [0, 1])
        >>> found = graph_margin(torch.eye(3), graph)
        >>> found.weights[:, 2]
        tensor([ 0.3333,  0.3333, -0.6667], dtype=torch.float64)
    """
    tolerance = checked_tolerance(norm, tolerance, rounds)
    embeddings = sized(floats(embeddings, "embeddings", 2), "embeddings")
    if len(embeddings) < graph.component.shape[1]:
        raise ValueError(
            f"embeddings must have one row for each of {graph.component.shape[1]} tokens or more,"
            f" got shape {tuple(embeddings.shape)}"
        )
    triples = torch.cat([graph.above, graph.equal])
    group, order = torch.sort(triples[:, 0], stable=True)
    counts = torch.bincount(group, minlength=len(graph.last))
    slot = torch.arange(len(group)) - (counts.cumsum(0) - counts)[group]
    place = torch.empty(len(order), 2, dtype=torch.long)
    place[order] = torch.stack([group, slot], 1)
    where = place[:, 0], place[:, 1]
    shape = (len(graph.last), max(1, int(counts.max())))
    differences = torch.zeros(*shape, embeddings.shape[1], dtype=torch.float64)
    differences[where] = embeddings[triples[:, 1]] - embeddings[triples[:, 2]]
    least = torch.zeros(shape, dtype=torch.bool)
    least[where] = torch.arange(len(triples)) < len(graph.above)
    equal = torch.zeros(shape, dtype=torch.bool)
    equal[where] = torch.arange(len(triples)) >= len(graph.above)
    arrays = (differences, embeddings[graph.last], least, equal)
    found = least_norm(Program(*(array.numpy() for array in arrays)), norm, tolerance=tolerance, rounds=rounds)
    weights = torch.from_numpy(np.ascontiguousarray(found.weights))
    return GraphMargin(
        weights=weights,
        dual=torch.from_numpy(found.multipliers)[where][: len(graph.above)],
        margin=1 / found.upper if found.upper > 0 else float("inf"),
        lower=found.lower,
        upper=found.upper,
        feasible=found.feasible,
        farkas=None if found.farkas is None else torch.from_numpy(found.farkas)[where],
        eps=found.eps,
        converged=found.converged,
        graph=graph,
    )


def _components(edges: list[tuple[int, int]], size: int) -> np.ndarray:
    """Names of the strongly connected components of all tokens."""
    sparse = scipy_module("sparse")
    ends = np.array(edges, dtype=np.intp).reshape(-1, 2)
    matrix = sparse.coo_array((np.ones(len(ends)), (ends[:, 0], ends[:, 1])), shape=(size, size))
    return np.asarray(scipy_module("sparse.csgraph").connected_components(matrix.tocsr(), connection="strong")[1])
