"""Distance of a matrix from the max-margin weights of the tokens that it selects, beside controls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from massieu.checks import UserError, check_floating
from massieu.margin.conversions import as_generator
from massieu.margin.problem import TokenSelection
from massieu.margin.program import scipy_module
from massieu.margin.solver import MaxMargin, max_margin

__all__ = ["SelectionReport", "random_head", "selection_report", "span_projection"]

NOT_CERTAIN = "the solver stopped before its bounds agreed: best_margin is approximate"
UNDECIDED = "it is undecided if a matrix selects these tokens with a margin: none was found, and none was ruled out"
NOT_FEASIBLE = "no matrix selects these tokens with a margin: there is no max-margin direction to compare with"
NO_CONSTRAINTS = "every row has copies of one token alone: there are no constraints"


@dataclass(frozen=True)
class SelectionReport:
    r"""Matrix W against the max-margin weights :math:`W_{mm}` of the tokens that it selects; nan where not defined.

    Attributes:
        rows: number of sequences.
        constraints: number of tokens that are to lose.
        feasible: True if some matrix selects these tokens with a margin; None if undecided.
        reproduced: share of rows in which :math:`XWz` selects the selected token, or a copy of it.
        best_margin: :math:`\gamma`, the largest margin of a matrix of norm one, certified to ``gap``.
        gap: relative distance of the bounds on it.
        margin: :math:`\mu`, the smallest margin over :math:`\|W\|`.
        span_share: the part of :math:`\|W\|^2` in the span of the constraints, where :math:`W_{mm}` lies.
        margin_ratio: :math:`\mu / \gamma`.
        correlation: of W with :math:`W_{mm}`, at least that ratio where it is positive.
        span_correlation: of the part of W in the span with :math:`W_{mm}`.
        span_bound: lower bound of it.
        shuffled_correlation, shuffled_span_correlation: of W with the max-margin weights of tokens drawn at random.
        random_span_share, random_margin_ratio, random_correlation, random_span_correlation, random_span_bound: of a
            random matrix with the singular values of W, against the max-margin weights of its own selection.
        note: limits of these values, in sentences; or empty.
    """

    rows: int
    constraints: int
    feasible: bool | None
    reproduced: float
    best_margin: float
    gap: float
    margin: float = torch.nan
    span_share: float = torch.nan
    margin_ratio: float = torch.nan
    correlation: float = torch.nan
    span_correlation: float = torch.nan
    span_bound: float = torch.nan
    shuffled_correlation: float = torch.nan
    shuffled_span_correlation: float = torch.nan
    random_span_share: float = torch.nan
    random_margin_ratio: float = torch.nan
    random_correlation: float = torch.nan
    random_span_correlation: float = torch.nan
    random_span_bound: float = torch.nan
    note: str = ""


def selection_report(
    weights: Tensor,
    tokens: TokenSelection | Tensor | Sequence[Tensor],
    queries: Tensor | None = None,
    *,
    selection: Tensor | Sequence[int] | None = None,
    compared: bool = True,
    copies: float = 1e-12,
    projection: Callable[[Tensor], Tensor] | None = None,
    generator: torch.Generator | int = 0,
) -> SelectionReport:
    r"""Compare a matrix with the max-margin weights of the tokens that it selects.

    .. math:: \alpha_i = \arg\max_t x_{it}^\top W z_i, \qquad
        W_{mm} = \arg\min \|W\| \;\text{ s.t. }\; (x_{i\alpha_i} - x_{it})^\top W z_i \ge 1

    There are two controls: a random matrix with the singular values of W, against the max-margin weights of its own
    selection; and W against those of tokens drawn at random. Copies of the selected token have no constraint.

    Args:
        weights: W, shape ``(dim, query_dim)``; of a head :math:`\mathrm{scale}\, W_K^\top W_Q`.
        tokens: a problem, or tokens as :class:`TokenSelection` takes them.
        queries: ``(sequences, query_dim)``; None for the last token of every sequence, or those of the problem.
        selection: the selected tokens, shape ``(sequences,)``, if not those of highest logit.
        compared: W makes the selection; if False, only the values of the selection itself are reported.
        copies: tokens that differ by less than this part of their size are the same.
        projection: of :func:`span_projection` for the same tokens, to share it among matrices.
        generator: of the controls, or a seed for one.

    Source:
        The slides' "attention as an SVM", applied to any matrix.

    Example:
        >>> tokens = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
        >>> found = selection_report(torch.eye(8), tokens)
        >>> found.feasible, found.reproduced, found.correlation >= found.margin_ratio > 0
        (True, 1.0, True)
        >>> best = max_margin(TokenSelection(tokens, tokens[:, -1], scores=torch.ones(4, 6)), selection=[0, 1, 2, 3])
        >>> round(selection_report(best.weights, tokens).correlation, 6)
        1.0
    """
    problem = _problem(tokens, queries)
    weights = problem.as_weights(weights).detach()
    check_floating(weights, "weights", finite=True)
    chosen = problem.selected(weights) if selection is None else problem.picked(selection)

    def best(selection: Tensor) -> MaxMargin:
        return max_margin(problem, selection=selection, rivals=_different(problem, selection, copies))

    solution = best(chosen)
    rivals = solution.rivals
    again = int((problem.present & ~rivals).sum(-1).gt(1).sum())
    constrained = bool(rivals.any())
    notes = {
        f"{again} of {len(chosen)} rows have copies of the selected token, which have no constraint": again > 0,
        NO_CONSTRAINTS: not constrained,
        NOT_FEASIBLE: solution.feasible is False,
        UNDECIDED: solution.feasible is None,
        NOT_CERTAIN: solution.feasible is True and not solution.converged,
    }
    found: dict[str, Any] = {
        "rows": len(chosen),
        "constraints": int(rivals.sum()),
        "feasible": solution.feasible,
        "reproduced": float((~rivals).gather(1, problem.selected(weights)[:, None]).double().mean()),
        "best_margin": solution.margin if constrained and solution.feasible is not None else torch.nan,
        "gap": solution.gap if solution.feasible else torch.nan,
        "note": "; ".join(note for note, holds in notes.items() if holds),
    }
    if compared:
        draw = as_generator(generator)
        shift = (torch.rand(len(chosen), generator=draw, dtype=torch.float64) * (problem.lengths - 1)).long()
        other = (chosen + 1 + shift) % problem.lengths
        drawn = random_head(weights, draw)
        project = projection or span_projection(problem)
        inner = project(weights)
        found |= _against(problem, weights, solution, inner)
        shuffled = _against(problem, weights, best(other), inner)
        found |= {f"shuffled_{name}": shuffled[name] for name in ("correlation", "span_correlation")}
        control = _against(problem, drawn, best(problem.selected(drawn)), project(drawn))
        found |= {f"random_{name}": value for name, value in control.items() if name != "margin"}
    return SelectionReport(**found)


def random_head(weights: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a matrix with the same singular values and random singular vectors.

    Example:
        >>> drawn = random_head(torch.diag(torch.tensor([3.0, 1.0])), torch.Generator().manual_seed(0))
        >>> torch.allclose(torch.linalg.svdvals(drawn), torch.tensor([3.0, 1.0]))
        True
    """
    values = torch.linalg.svdvals(weights)
    frames = (torch.randn(size, len(values), generator=generator, dtype=weights.dtype) for size in weights.shape)
    left, right = (torch.linalg.qr(frame).Q for frame in frames)
    drawn: Tensor = (left * values) @ right.mT
    return drawn


def span_projection(problem: TokenSelection) -> Callable[[Tensor], Tensor]:
    r"""Return the projection of weights on the span of all :math:`(x_{it} - x_{i\tau}) z_i^\top`.

    It is the smallest matrix whose logits differ from those of W by a constant in every row. With
    :math:`P = \sum_i b_i z_i^\top` and :math:`\Pi_i` on the differences of row i, it solves
    :math:`\Pi_i P z_i = \Pi_i W z_i` by conjugate gradients.

    Example:
        >>> problem = TokenSelection(torch.eye(2)[None], torch.tensor([[1.0, 0.0]]), scores=torch.zeros(1, 2))
        >>> bool(span_projection(problem)(torch.ones(2, 2, dtype=torch.float64)).abs().max() < 1e-12)
        True
    """
    queries, present = problem.queries, problem.present
    centered = (problem.tokens - _mean(problem)[:, None]) * present[..., None]
    _, sizes, vectors = torch.linalg.svd(centered, full_matrices=False)
    # Directions below rounding are left out.
    kept = sizes > 1e-10 * sizes[:, :1]
    basis = vectors * kept[..., None]
    gram = queries @ queries.mT

    def inside(b: Tensor) -> Tensor:
        return torch.einsum("nrd,nr->nd", basis, torch.einsum("nrd,nd->nr", basis, b))

    def project(weights: Tensor) -> Tensor:
        linalg = scipy_module("sparse.linalg")
        goal = inside(queries @ weights.mT)
        shape = goal.shape

        def product(flat: Any) -> Any:
            return inside(gram @ torch.from_numpy(flat).reshape(shape)).flatten().numpy()

        operator = linalg.LinearOperator((goal.numel(), goal.numel()), matvec=product, dtype=float)
        solution, failed = linalg.cg(operator, goal.flatten().numpy(), rtol=1e-10, maxiter=20 * goal.numel())
        if failed:
            raise ArithmeticError("the projection on the span of the constraints did not converge; take fewer rows")
        projected: Tensor = torch.from_numpy(solution).reshape(shape).mT @ queries
        return projected

    return project


def _mean(problem: TokenSelection) -> Tensor:
    return problem.tokens.mul(problem.present[..., None]).sum(1) / problem.lengths[:, None]


def _problem(tokens: TokenSelection | Tensor | Sequence[Tensor], queries: Tensor | None) -> TokenSelection:
    if isinstance(tokens, TokenSelection):
        if queries is not None:
            raise UserError("queries belong to tokens; a problem has its own")
        return tokens
    rows = [torch.as_tensor(row) for row in tokens]
    if queries is None and all(row.ndim == 2 and len(row) for row in rows) and rows:
        queries = torch.stack([row[-1] for row in rows])
    # The matrix selects, so that no token has a score.
    none = [torch.zeros(len(row)) if row.ndim else torch.zeros(0) for row in rows]
    return TokenSelection(rows, torch.zeros(len(rows), 1) if queries is None else queries, scores=none)


def _different(problem: TokenSelection, selection: Tensor, copies: float) -> Tensor:
    """Return flags of the tokens that are no copies of the selected ones, ``(sequences, length)``."""
    away = problem.differences(selection).norm(dim=-1)
    chosen = problem.tokens.gather(1, selection[:, None, None].expand(-1, 1, problem.shape[0])).norm(dim=-1)
    different: Tensor = problem.present & (away > copies * torch.maximum(chosen, problem.tokens.norm(dim=-1)))
    return different


def _against(problem: TokenSelection, weights: Tensor, solution: MaxMargin, inner: Tensor) -> dict[str, float]:
    """Compare a matrix and its projection on the constraints with a max-margin solution; nan where there is none."""
    norm, size = float(weights.norm()), float(inner.norm())
    logits, rivals = problem.logits(weights), solution.rivals
    leads = (logits.gather(1, solution.selection[:, None]) - logits)[rivals]
    margin = float(leads.min()) / norm if norm > 0 and rivals.any() else torch.nan
    found = {"margin": margin, "span_share": (size / norm) ** 2 if norm > 0 else torch.nan}
    names = ("margin_ratio", "correlation", "span_correlation", "span_bound")
    if not solution.feasible or size == 0 or not rivals.any():
        return found | dict.fromkeys(names, torch.nan)
    best = solution.weights
    ratio = margin * float(best.norm())
    product = float((weights * best).sum() / best.norm())
    bound = ratio * norm / size if ratio > 0 else torch.nan
    return found | dict(zip(names, (ratio, product / norm, product / size, bound), strict=True))
