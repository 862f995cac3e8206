"""Finite part of training: where targets share their mass among tokens, some of the weights converge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from massieu.checks import UserError, check_count, check_number, check_shape
from massieu.margin.gradients import size_of
from massieu.margin.graph import GraphMargin, graph_margin, token_graph
from massieu.margin.problem import TokenSelection
from massieu.margin.solver import MaxMargin, max_margin

__all__ = ["FiniteComponent", "Split", "finite_component", "next_token_component", "tied_sets"]

RANK = 1e-10
"""Singular values below this part of the largest count as zero."""


@dataclass(frozen=True)
class Split:
    r"""Weights as a finite part, a multiple of the max-margin solution, and the rest.

    Attributes:
        projection: :math:`\Pi W` onto the finite subspace, shape ``(dim, query_dim)``.
        coefficient: :math:`C = \langle W, W_{mm} \rangle / \|W_{mm}\|^2`; zero where all tokens have mass and the
            weights stay finite.
        residual: :math:`W - W_{fin} - C W_{mm}`.
        error: :math:`\|\Pi W - W_{fin}\|`, which goes to zero in training; the residual's norm need not.
    """

    projection: Tensor
    coefficient: float
    residual: Tensor
    error: float


@dataclass(frozen=True)
class FiniteComponent:
    r"""Finite subspace, weights that training approaches within it, and direction in which training diverges.

    Attributes:
        basis: orthonormal, shape ``(rank, dim, query_dim)``.
        weights: :math:`W_{fin}`, shape ``(dim, query_dim)``.
        attention: the limiting attention :math:`s^*`, shape ``(sequences, length)``.
        tied: the tied sets, boolean, shape ``(sequences, length)``.
        attained: True if :math:`s^*` equals the targets, as it does where the equations are independent.
        solution: the max-margin solution, equal within each tied set, hence orthogonal to the subspace.
        converged: the residual is at most the tolerance.
        residual: norm of the gradient within the subspace, where the largest entries of tokens and of queries are one.
        steps: Newton steps made.
    """

    basis: Tensor
    weights: Tensor
    attention: Tensor
    tied: Tensor
    attained: bool
    solution: MaxMargin | GraphMargin
    converged: bool
    residual: float
    steps: int

    @property
    def message(self) -> str:
        """Outcome of the solver, a sentence."""
        end = "solved" if self.converged else "stopped early: raise max_steps or the tolerance"
        return f"{end}: gradient of norm {self.residual:.0e} after {self.steps} Newton steps"

    def project(self, weights: Tensor) -> Tensor:
        """Return the orthogonal projection onto the finite subspace, shape ``(dim, query_dim)``."""
        coordinates = torch.einsum("rde,de->r", self.basis, weights.detach().double())
        return torch.einsum("r,rde->de", coordinates, self.basis)

    def split(self, weights: Tensor) -> Split:
        """Split weights into finite part, multiple of the max-margin solution, and residual."""
        check_shape(weights, "weights", *self.weights.shape)
        if not self.solution.feasible:
            raise UserError(
                "weights are split along the max-margin solution, but there is none: no weights put the tied tokens"
                " first; use project()"
            )
        weights, far = weights.detach().double(), self.solution.weights
        size = size_of(far)
        coefficient = float((weights * (far / size)).sum()) / size if size > 0 else 0.0
        projection = self.project(weights)
        residual = weights - self.weights - coefficient * far
        return Split(projection, coefficient, residual, float((projection - self.weights).norm()))


def finite_component(
    problem: TokenSelection,
    *,
    tied: Tensor | None = None,
    solution: MaxMargin | GraphMargin | None = None,
    tolerance: float = 1e-12,
    max_steps: int = 100,
) -> FiniteComponent:
    r"""Find the part of the weights that stays finite under cross-entropy with shared targets.

    .. math:: S_{fin} = \mathrm{span}\{(x_{it} - x_{i\tau}) z_i^\top : t, \tau \in O_i\}, \qquad
        W_{fin} = \arg\min_{W \in S_{fin}} -\frac1n \sum_i \sum_{t \in O_i} p_{it} \log
        \mathrm{softmax}_{O_i}(X_i W z_i)_t

    with :math:`O_i` the tokens that have mass. The minimizer is found by damped Newton steps in coordinates of an
    orthonormal basis, which is held densely: rank x dim x query_dim numbers.

    Args:
        problem: one with targets.
        tied: :math:`O_i`, boolean, ``(sequences, length)``, where they are not the tokens with mass: for next-token
            data, the tokens of the label's strongly connected component. Targets must lie within.
        solution: max-margin solution that belongs to ``tied``; needed if that is given.
        tolerance: on the residual.
        max_steps: Newton steps allowed.

    Source:
        The slides' finite component, for which they leave the tied sets and the subspace undefined; for next-token data
        Li et al. 2024 (by their public code).

    Example:
        >>> problem = massieu.margin.random_problem(4, 5, 10, kind="soft")
        >>> finite = finite_component(problem)
        >>> len(finite.basis), finite.converged, finite.attained
        (4, True, True)
    """
    check_number(tolerance, "tolerance", above=0)
    check_count(max_steps, "max_steps", least=0)
    if problem.targets is None:
        raise UserError("a finite component belongs to targets, but the problem has scores; their optimum is infinite")
    inside = problem.best if tied is None else tied_sets(problem, tied, solution)
    if solution is None:
        solution = max_margin(problem, ties="equal")
    units = [float(part.abs().max()) or 1.0 for part in (problem.tokens, problem.queries)]
    tokens, queries = problem.tokens / units[0], problem.queries / units[1]
    basis = _basis(tokens, queries, inside)
    features = torch.einsum("ntd,rde,ne->ntr", tokens, basis, queries)
    coordinates, residual, steps = _newton(features, inside, problem.targets, tolerance, max_steps)
    attention = (features @ coordinates).masked_fill(~inside, -torch.inf).softmax(-1)
    return FiniteComponent(
        basis=basis,
        weights=torch.einsum("r,rde->de", coordinates, basis) / units[0] / units[1],
        attention=attention,
        attained=bool((attention - problem.targets).abs().max() < 1e-9),
        solution=solution,
        converged=residual <= tolerance,
        residual=residual,
        tied=inside,
        steps=steps,
    )


def tied_sets(problem: TokenSelection, tied: Tensor, solution: MaxMargin | GraphMargin | None) -> Tensor:
    """Check tied sets of the caller and return them."""
    if problem.targets is None:
        raise UserError("tied sets belong to targets, but the problem has scores, whose ties are found")
    if solution is None:
        raise UserError("tied sets of your own need their max-margin solution; give both, tied and solution")
    wrong = not isinstance(tied, Tensor) or tied.dtype != torch.bool or tied.shape != problem.present.shape
    if wrong or (problem.best & ~tied).any() or (tied & ~problem.present).any():
        raise UserError("tied must be boolean for every token, true where targets have mass and false where none is")
    return tied


def next_token_component(
    embeddings: Tensor, sequences: Sequence[Sequence[int] | Tensor], labels: Sequence[int] | Tensor
) -> tuple[TokenSelection, FiniteComponent]:
    """Return next-token data as a problem with targets, and the finite component of their graphs.

    Args:
        embeddings: shape ``(vocabulary, dim)``.
        sequences: token indices of each sequence; its last one is the query.
        labels: the token that came next in each sequence, one of its own.

    Returns:
        The problem, whose targets are the label wherever it occurs, and its finite component; tied are the tokens in
        the strongly connected component of the label.

    Source:
        Li et al. 2024; see :func:`massieu.margin.token_graph`.

    Example:
        >>> _, finite = next_token_component(torch.eye(3), [[0, 1, 2], [1, 0, 2], [0, 1, 2]], [0, 1, 0])
        >>> finite.weights[:, 2].exp()  # token 0 twice as often as token 1
        tensor([1.4142, 0.7071, 1.0000], dtype=torch.float64)
    """
    embeddings = torch.as_tensor(embeddings)
    graph = token_graph(sequences, labels)
    solution = graph_margin(embeddings, graph)
    rows = [torch.as_tensor(row) for row in sequences]
    graphs = {token: index for index, token in enumerate(graph.last.tolist())}
    targets, tied = [], []
    for row, label in zip(rows, torch.as_tensor(labels).tolist(), strict=True):
        own = (row == label).double()
        targets.append(own / own.sum())
        component = graph.component[graphs[int(row[-1])]]
        tied.append(component[row] == component[label])
    queries = embeddings[torch.stack([row[-1] for row in rows])]
    problem = TokenSelection([embeddings[row] for row in rows], queries, targets=targets)
    inside = torch.nn.utils.rnn.pad_sequence(tied, batch_first=True)
    return problem, finite_component(problem, tied=inside, solution=solution)


def _basis(tokens: Tensor, queries: Tensor, inside: Tensor) -> Tensor:
    anchor = inside.int().argmax(-1)
    others = inside.scatter(1, anchor[:, None], False)
    first = tokens.gather(1, anchor[:, None, None].expand(-1, 1, tokens.shape[-1]))
    edges = torch.einsum("ed,eq->edq", (first - tokens)[others], queries[others.nonzero()[:, 0]])
    if len(edges) == 0:
        return edges
    # A direction of any size counts.
    flat = torch.nn.functional.normalize(edges.flatten(1), eps=1e-300)
    sizes: Tensor
    rows: Tensor
    _, sizes, rows = torch.linalg.svd(flat, full_matrices=False)
    return rows[sizes > RANK * sizes[0]].reshape(-1, *edges.shape[1:])


def _newton(
    features: Tensor, inside: Tensor, targets: Tensor, tolerance: float, max_steps: int
) -> tuple[Tensor, float, int]:
    """Minimize the cross-entropy over the tied tokens; return coordinates, norm of the gradient and steps."""
    coordinates = features.new_zeros(features.shape[-1])
    wanted = torch.einsum("nt,ntr->r", targets, features)

    def loss(at: Tensor) -> Tensor:
        return (features @ at).masked_fill(~inside, -torch.inf).logsumexp(-1).sum() - wanted @ at

    size, steps = 0.0, 0
    for steps in range(max_steps + 1):
        attention = (features @ coordinates).masked_fill(~inside, -torch.inf).softmax(-1)
        mean = torch.einsum("nt,ntr->nr", attention, features)
        gradient = mean.sum(0) - wanted
        size = float(gradient.norm()) / len(features)
        if size <= tolerance / 10 or steps == max_steps:
            break
        centered = features - mean[:, None]
        hessian = torch.einsum("nt,ntr,ntq->rq", attention, centered, centered)
        # Far from the optimum the Hessian may be singular to rounding.
        hessian.diagonal().add_(1e-14 * hessian.diagonal().max())
        move = torch.linalg.solve(hessian, gradient)
        length, now, slope = 1.0, loss(coordinates), gradient @ move
        while length > 1e-8 and loss(coordinates - length * move) > now - 1e-4 * length * slope + 1e-13 * now.abs():
            length /= 2
        coordinates = coordinates - length * move
    return coordinates, size, steps
