"""Next-token data as graphs: labels point at the tokens they were preferred to, and cycles make tokens equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from massieu.checks import UserError
from massieu.margin.conversions import as_double, check_sizes, whole_numbers
from massieu.margin.program import scipy_module
from massieu.margin.solver import LeastNorm, as_tensors, least_norm

__all__ = ["GraphMargin", "TokenGraph", "graph_margin", "token_graph"]


@dataclass(frozen=True)
class TokenGraph:
    """Preferences of next-token data among tokens, one graph for every last token.

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


@dataclass(frozen=True, repr=False)
class GraphMargin(LeastNorm):
    """Max-margin weights of next-token data, for the embedding z of the last token as query.

    Attributes:
        dual: a multiplier for each row of ``graph.above``.
        farkas: multipliers for the rows of ``graph.above``, then ``graph.equal``, or None.
        eps: among weights that meet the equalities.
        graph: of the data.
    """

    graph: TokenGraph

    def __repr__(self) -> str:
        return f"GraphMargin of {len(self.graph.last)} graphs: {self.message}"


def token_graph(sequences: Sequence[Sequence[int] | Tensor], labels: Sequence[int] | Tensor) -> TokenGraph:
    """Return the graphs of next-token data, one for each last token: an edge from a label to every other token.

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
        raise UserError(f"there must be one label for each sequence, got {len(labels)} for {len(rows)}")
    wanted = whole_numbers(labels, "labels", len(rows)).tolist()
    for i, (row, label) in enumerate(zip(rows, wanted, strict=True)):
        if row.ndim != 1 or row.dtype.is_floating_point or not len(row) or row.min() < 0:
            raise UserError(f"sequences must hold token indices from 0, but sequence {i} is {row.tolist()}")
        if label not in row:
            raise UserError(
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
    embeddings: Tensor, graph: TokenGraph, norm: str = "fro", *, tolerance: float | None = None, max_steps: int = 6
) -> GraphMargin:
    r"""Weights of least norm that order the logits of every last token as its graph does.

    .. math:: \min_W |W| \quad\text{subject to}\quad \langle e_t - e_\tau, W e_k \rangle = 0 \text{ within a component},
        \; \ge 1 \text{ along an edge from one to another.}

    Args:
        embeddings: :math:`e_t`, shape ``(vocabulary, dim)``.
        graph: of ``token_graph``.
        norm: "fro" or "nuc".
        tolerance, max_steps: as for :func:`max_margin`.

    Source:
        Li et al. 2024, the graph form of the max-margin program.

    Example:
        >>> graph = token_graph([[0, 1, 2], [1, 0, 2]], [0, 1])
        >>> found = graph_margin(torch.eye(3), graph)
        >>> found.weights[:, 2]
        tensor([ 0.3333,  0.3333, -0.6667], dtype=torch.float64)
    """
    embeddings = check_sizes(as_double(embeddings, "embeddings", "vocabulary", "dim"), "embeddings")
    if len(embeddings) < graph.component.shape[1]:
        raise UserError(
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
    least, equal = torch.zeros(2, *shape, dtype=torch.bool)
    least[where] = torch.arange(len(triples)) < len(graph.above)
    equal[where] = ~least[where]
    arrays = (differences, embeddings[graph.last], least, equal)
    fields = as_tensors(least_norm(arrays, norm, tolerance=tolerance, max_steps=max_steps))
    fields["dual"] = fields["dual"][where][: len(graph.above)]
    if fields["farkas"] is not None:
        fields["farkas"] = fields["farkas"][where]
    return GraphMargin(**fields, graph=graph)


def _components(edges: list[tuple[int, int]], size: int) -> np.ndarray:
    """Return the strongly connected component of every token."""
    sparse = scipy_module("sparse")
    ends = np.array(edges, dtype=np.intp).reshape(-1, 2)
    matrix = sparse.coo_array((np.ones(len(ends)), (ends[:, 0], ends[:, 1])), shape=(size, size))
    return np.asarray(scipy_module("sparse.csgraph").connected_components(matrix.tocsr(), connection="strong")[1])
