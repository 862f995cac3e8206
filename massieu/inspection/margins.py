"""How far the tokens that trained heads select are from a max-margin selection, each figure beside its control."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from massieu.inspection.selections import HeadRows, each_sample
from massieu.margin import MaxMargin, TokenSelection, max_margin

if TYPE_CHECKING:
    import pandas

__all__ = ["margin_report", "random_head", "span_projection"]

NOT_ONE_MATRIX = "scores are not x^T W z with one matrix (positions, a norm of queries and keys, or a cap)"
NOT_CERTAIN = "the solver stopped before its bounds agreed: feasible and best_margin are its best guess"
NOT_READ = "what the keys read could not be told: nothing is reported"


def margin_report(
    model: nn.Module | str | None = None,
    texts: Sequence[str] | None = None,
    *,
    tokenizer: Any | None = None,
    inputs: Iterable[Mapping[str, Any]] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    rows: int = 32,
    max_length: int | None = None,
    seed: int = 0,
    progress: Callable[[str, int, int], object] | None = None,
    **loading: Any,
) -> pandas.DataFrame:
    r"""How far each head's selection of tokens is from the max-margin one, on a sample of query positions.

    .. math:: \alpha_i = \arg\max_t x_{it}^\top W z_i, \qquad W = \mathrm{scale}\, W_K^\top W_Q, \qquad
        W_{mm} = \arg\min \|W\| \;\text{ s.t. }\; (x_{i\alpha_i} - x_{it})^\top W z_i \ge 1

    Tokens are what the keys read (after the norm) at the positions that a query sees, the query is what it reads
    itself, and the selected token is the one of highest attention weight. A query bias b adds
    :math:`\mathrm{scale}\, x^\top W_K^\top b`, which is one more column of W for a query with a one at its end; a key
    bias adds the same to all tokens. Absolute positions are part of the tokens. With rotary or relative positions
    scores are no :math:`x^\top W z`: then ``note`` says so, and only selection, feasibility and ``reproduced`` remain.

    Two controls: ``random_*`` is a random matrix with the head's singular values, against the max-margin solution of
    its own selection; ``shuffled_*`` is the head against that of tokens drawn at random, nan where no matrix selects
    those. What a matrix selects is feasible by that matrix, and with a layer norm and no more rows than dimensions
    everything is: ``feasible`` can be false only where scores are not :math:`x^\top W z`.

    Args:
        model: as in :func:`~massieu.inspection.inspect_model`, and so are ``texts``, ``tokenizer``, ``inputs``,
            ``max_length``, ``progress`` and ``loading``.
        layers: which, counted in each stack; None for all.
        heads: which of every layer; None for all.
        rows: query positions, spread over the passages. What one layer reads there is held at a time.
        seed: of the sample and the controls.

    Returns:
        One row for each head: ``stack``, ``layer``, ``head``; ``rows`` and ``constraints``; ``peak``, the mean weight
        of the selected token; ``first_share``, how often that is the first one of the passage (a sink); ``feasible``;
        ``reproduced``, the share of rows in which :math:`XWz` selects it too; ``margin`` :math:`\mu`, the smallest
        margin over :math:`\|W\|`; ``best_margin`` :math:`\gamma`, certified to ``gap``; ``margin_ratio``
        :math:`\mu / \gamma`; ``correlation`` of W with :math:`W_{mm}`, at least that ratio where it is positive;
        ``span_share``, the part of :math:`\|W\|^2` in the span of the constraints, where :math:`W_{mm}` lies;
        ``span_correlation`` of that part with it, and ``span_bound``, what it is at least; the controls; ``note``.

    Source:
        The slides' "attention as an SVM", asked of a trained model.

    Example:
        >>> model = massieu.nn.Transformer(8, num_layers=1, num_heads=2, vocabulary=9, positions=None)
        >>> found = margin_report(model, inputs=[{"inputs": torch.arange(8)[None]}], rows=4)
        >>> found[["head", "rows", "feasible", "reproduced"]].values.tolist()
        [[0, 4, True, 1.0], [1, 4, True, 1.0]]
    """
    import pandas

    generator = torch.Generator().manual_seed(seed)
    found: list[dict[str, Any]] = []
    for weights, sample in each_sample(model, texts, tokenizer, inputs, layers, rows, max_length, generator, loading):
        wanted = [head for head in range(weights.heads) if heads is None or head in heads]
        if not wanted:
            raise ValueError(
                f"heads must be some of 0 to {weights.heads - 1} in {weights.name}, got {list(heads or ())}"
            )
        projection = None if sample is None else span_projection(sample.problem)
        for head in wanted:
            place = {"stack": weights.stack, "layer": weights.layer, "head": head}
            if sample is None or projection is None:
                found.append({**place, "note": "; ".join(filter(None, (NOT_READ, weights.note)))})
            else:
                # A generator of its own, so that controls do not depend on which other heads are asked for.
                own = torch.Generator().manual_seed(1_000_000 * seed + 1_000 * weights.layer + head)
                found.append({**place, **_figures(sample, head, projection, own)})
            if progress is not None:
                progress(f"margins of layer {weights.layer}", head + 1, weights.heads)
    table = pandas.DataFrame(found)
    # The sentence comes last, wherever the first head had it.
    return table[[*(name for name in table.columns if name != "note"), "note"]]


def random_head(weights: Tensor, generator: torch.Generator) -> Tensor:
    """A matrix with the same singular values and random singular vectors: a head that knows nothing.

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
    r"""The projection of weights on the span of all :math:`(x_{it} - x_{i\tau}) z_i^\top`, whatever is selected.

    Logits of W and of its projection differ by a constant in every row, and no smaller matrix does that. With
    :math:`P = \sum_i b_i z_i^\top` and :math:`\Pi_i` on the differences of row i, it solves
    :math:`\Pi_i P z_i = \Pi_i W z_i` by conjugate gradients.

    Example:
        >>> problem = TokenSelection(torch.eye(2)[None], torch.tensor([[1.0, 0.0]]), scores=torch.zeros(1, 2))
        >>> bool(span_projection(problem)(torch.ones(2, 2, dtype=torch.float64)).abs().max() < 1e-12)
        True
    """
    queries, present = problem.queries, problem.present
    centred = (problem.tokens - _mean(problem)[:, None]) * present[..., None]
    _, sizes, vectors = torch.linalg.svd(centred, full_matrices=False)
    # Directions that rounding alone holds are none.
    kept = sizes > 1e-10 * sizes[:, :1]
    basis = vectors * kept[..., None]
    gram = queries @ queries.mT

    def inside(b: Tensor) -> Tensor:
        return torch.einsum("nrd,nr->nd", basis, torch.einsum("nrd,nd->nr", basis, b))

    def project(weights: Tensor) -> Tensor:
        from scipy.sparse.linalg import LinearOperator, cg

        goal = inside(queries @ weights.mT)
        shape = goal.shape

        def product(flat: Any) -> Any:
            return inside(gram @ torch.from_numpy(flat).reshape(shape)).flatten().numpy()

        operator = LinearOperator((goal.numel(), goal.numel()), matvec=product, dtype=float)
        solution, failed = cg(operator, goal.flatten().numpy(), rtol=1e-10, maxiter=20 * goal.numel())
        if failed:
            raise ArithmeticError("the projection on the span of the constraints did not converge; take fewer rows")
        return torch.from_numpy(solution).reshape(shape).mT @ queries

    return project


def _mean(problem: TokenSelection) -> Tensor:
    return problem.tokens.mul(problem.present[..., None]).sum(1) / problem.lengths[:, None]


def _figures(
    sample: HeadRows, head: int, projection: Callable[[Tensor], Tensor], generator: torch.Generator
) -> dict[str, Any]:
    """One row of the report."""
    problem, selection, weights = sample.problem, sample.selection[head], sample.maps[head]
    solution = max_margin(problem, selection=selection)
    other = (selection + 1 + _drawn(problem.lengths - 1, generator)) % problem.lengths
    drawn = random_head(weights, generator)
    found: dict[str, Any] = {
        "rows": len(selection),
        "constraints": int((problem.lengths - 1).sum()),
        "peak": float(sample.peak[head].mean()),
        "first_share": float(sample.first[head].double().mean()),
        "feasible": solution.feasible,
        "reproduced": float((problem.selected(weights) == selection).double().mean()),
        "best_margin": float(solution.margin) if solution.feasible else 0.0,
        "gap": float(solution.gap) if solution.feasible else torch.nan,
    }
    whole = bool(sample.whole[head])
    if whole:
        found |= _against(problem, weights, solution, projection(weights))
        shuffled = _against(problem, weights, max_margin(problem, selection=other), projection(weights))
        found |= {f"shuffled_{name}": shuffled[name] for name in ("correlation", "span_correlation")}
        own = max_margin(problem, selection=problem.selected(drawn))
        control = _against(problem, drawn, own, projection(drawn))
        found |= {f"random_{name}": value for name, value in control.items() if name != "margin"}
    notes = [sample.note, None if whole else NOT_ONE_MATRIX, None if solution.converged else NOT_CERTAIN]
    return {**found, "note": "; ".join(note for note in notes if note)}


def _against(problem: TokenSelection, weights: Tensor, solution: MaxMargin, inner: Tensor) -> dict[str, float]:
    """A matrix and its projection on the constraints, against a max-margin solution; nan where there is none."""
    norm, size = float(weights.norm()), float(inner.norm())
    margin = float(problem.margins(weights, solution.selection).min()) / norm if norm > 0 else torch.nan
    found = {"margin": margin, "span_share": (size / norm) ** 2 if norm > 0 else torch.nan}
    names = ("margin_ratio", "correlation", "span_correlation", "span_bound")
    if not solution.feasible or size == 0:
        return found | dict.fromkeys(names, torch.nan)
    best = solution.weights
    ratio = margin * float(best.norm())
    product = float((weights * best).sum() / best.norm())
    bound = ratio * norm / size if ratio > 0 else torch.nan
    return found | dict(zip(names, (ratio, product / norm, product / size, bound), strict=True))


def _drawn(bounds: Tensor, generator: torch.Generator) -> Tensor:
    """Whole numbers from zero to each bound, without it."""
    return (torch.rand(len(bounds), generator=generator, dtype=torch.float64) * bounds).long()
