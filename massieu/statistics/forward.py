"""Attention with the statistics of its rows, and the statistics alone."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from massieu import kernels
from massieu.checks import UserError
from massieu.kernels import Rows
from massieu.kernels.graphs import call_eagerly
from massieu.statistics.gradient import Attention, MassCount

__all__ = ["Attended", "RowStatistics", "attend", "mass_count", "probabilities", "row_statistics"]


class RowStatistics(NamedTuple):
    r"""Statistics of attention rows as distributions; every field has shape ``(..., queries)``.

    With scores :math:`s_j` (log weights included) and weights :math:`p_j = e^{s_j} / Z`. A row without atoms has
    nan in every field: average with ``nanmean``. Half-precision inputs give float32 statistics. Where inner products
    (scaled, by the norms of the longest query and key) may exceed 1000, all is computed in float64.

    Attributes:
        log_normalizer: :math:`\log Z = \log \sum_j e^{s_j}`.
        score_mean: :math:`E[s] = \sum_j p_j s_j`.
        entropy: :math:`H = \log Z - E[s]`, in nats.
        score_variance: :math:`Var[s]`, the heat capacity at temperature one; None in light statistics.
        peak: :math:`\max_j p_j`, without gradient.
        collision: :math:`\sum_j p_j^2`; None in light statistics.
    """

    log_normalizer: Tensor
    score_mean: Tensor
    entropy: Tensor
    score_variance: Tensor | None
    peak: Tensor
    collision: Tensor | None

    @property
    def perplexity(self) -> Tensor:
        r""":math:`e^H`, the number of equally likely atoms with the same entropy."""
        return self.entropy.exp()

    @property
    def effective_atoms(self) -> Tensor:
        r""":math:`1 / \sum_j p_j^2`, the effective sample size of the row."""
        if self.collision is None:
            raise UserError('effective_atoms needs full statistics, got light ones; pass statistics="full"')
        return self.collision.reciprocal()


class Attended(NamedTuple):
    """Output of attention, and its row statistics; None without them."""

    output: Tensor
    statistics: RowStatistics | None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_weight: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
    lengths: Tensor | int | None = None,
    sink: Tensor | float | None = None,
    statistics: Literal["full", "light"] | None = "full",
) -> Attended:
    r"""Softmax attention with the statistics of every row, in one differentiable pass over tiles.

    .. math:: o_i = \sum_j p_{ij} v_j, \qquad p_{ij} \propto e^{s_{ij}}, \qquad
              s_{ij} = \mathrm{scale} \, \langle q_i, k_j \rangle + \log h_{ij}

    No tensor of size queries x atoms is stored, forward or backward. The output and all statistics but the peak are
    differentiable in query, key, value, log_weight and sink. Second derivatives (``create_graph=True``) are exact too,
    but store the whole matrix of weights. ``torch.func.grad`` works, but not inside of itself; ``vmap`` and forward
    mode do not. Autocast does not convert the inputs. Keys and values that are not finite affect only the rows that see
    them.

    For ``scaled_dot_product_attention(query, key, value, attn_mask, is_causal=True, enable_gqa=True)`` write
    ``attend(query, key, value, log_weight, causal=True).output``; there is no dropout on the weights.

    Args:
        query: shape ``(..., queries, dim)``, in a model ``(batch, heads, queries, dim)``.
        key: shape ``(..., atoms, dim)``. Leading axes of size 1 broadcast against those of ``query`` without a copy; on
            the last of them (the heads) ``query`` may also have a multiple of the size, as in grouped-query attention.
        value: shape ``(..., atoms, value_dim)``.
        log_weight: :math:`\log h`, the sum of all that is added to scores (mask, padding, ALiBi, bias), broadcasting to
            ``(..., queries, atoms)``. Minus infinity means absent, and so does anything below half of the most
            negative number of its dtype, or below -3e14. A boolean mask is True where the atom is present.
        scale: factor of the inner products; one over the square root of dim by default.
        causal: query ``i`` sees the atoms up to its own position ``i + atoms - queries``: with a cache, queries are
            the last atoms. (``scaled_dot_product_attention`` aligns them with the first.)
        window: a query sees only atoms less than ``window`` positions away, on both sides or, if causal, behind it.
        lengths: number of atoms present, from the first; matches the leading axes from the left, so ``(batch,)``
            serves ``(batch, heads, queries, dim)``.
        sink: log weight of one more atom, at the origin and with value zero, that every query sees: an attention sink.
            Broadcasts to the leading axes, so ``(heads,)`` serves ``(batch, heads, queries, dim)``. All statistics
            include it.
        statistics: "full", "light" (no variance, no collision) or None.

    Returns:
        The output, ``(..., queries, value_dim)``, zero for a row without atoms, and its :class:`RowStatistics`.

    Source:
        "A Probabilistic Interpretation of Transformers", eq. 3 and 5; log weights are its intrinsic measure.

    Example:
        >>> query, key, value = torch.zeros(3, 2), torch.eye(2), torch.eye(2)
        >>> attended = attend(query, key, value)
        >>> attended.output[0], attended.statistics.entropy[0].exp()
        (tensor([0.5000, 0.5000]), tensor(2.))
    """
    if statistics not in ("full", "light", None):
        raise UserError(f'statistics must be "full", "light" or None, got {statistics!r}; "full" costs little more')
    if value is None:
        raise UserError("value must be a floating-point tensor, got NoneType; for statistics alone use row_statistics")
    scale = _default_scale(query) if scale is None else scale
    rows = kernels.arrange(
        query, key, value, log_weight, sink=sink, scale=scale, causal=causal, window=window, lengths=lengths
    )
    level = {"full": 2, "light": 1, None: 0}[statistics]
    output, found = call_eagerly(_solve, rows, level)
    assert output is not None
    return Attended(output, found)


def row_statistics(
    natural: Tensor,
    support: Tensor,
    log_weight: Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    window: int | None = None,
    lengths: Tensor | int | None = None,
    sink: Tensor | float | None = None,
) -> RowStatistics:
    """Row statistics without the output; arguments as in :func:`attend`, but ``scale`` is one by default.

    Example:
        >>> row_statistics(torch.zeros(1, 2), torch.randn(5, 2)).collision
        tensor([0.2000])
    """
    rows = kernels.arrange(
        natural, support, None, log_weight, sink=sink, scale=scale, causal=causal, window=window, lengths=lengths
    )
    _, found = call_eagerly(_solve, rows, 2)
    assert found is not None
    return found


def mass_count(
    query: Tensor,
    key: Tensor,
    log_weight: Tensor | None = None,
    *,
    mass: float = 0.9,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
    lengths: Tensor | int | None = None,
    sink: Tensor | float | None = None,
) -> Tensor:
    r"""Smallest number of atoms that together hold the given mass of the row, int64 ``(..., queries)``.

    Arguments as in :func:`attend`. A row without atoms counts zero, and so does one with a key in sight that is not
    finite.

    Source:
        Ramsauer et al. 2020, section 3: heads are classed by this number at mass 0.9.

    Example:
        >>> mass_count(torch.zeros(1, 2), torch.randn(10, 2), mass=0.9)
        tensor([9])
    """
    if not isinstance(mass, (int, float)) or not 0 < mass <= 1:
        got = mass if isinstance(mass, (int, float)) else type(mass).__name__
        raise UserError(f"mass must be a number in (0, 1], got {got}; 0.9 is nine tenths of the attention")
    scale = _default_scale(query) if scale is None else scale
    rows = kernels.arrange(
        query, key, None, log_weight, sink=sink, scale=scale, causal=causal, window=window, lengths=lengths
    )
    with torch.no_grad():
        return rows.restore(call_eagerly(MassCount.apply, *rows.inputs, float(mass)), tail=1)


def probabilities(scores: Tensor, log_weight: Tensor | None = None) -> Tensor:
    r"""Weights :math:`p_{ij} = e^{s_{ij}} / Z_i` as a matrix, for small problems.

    Args:
        scores: shape ``(..., queries, atoms)``.
        log_weight: broadcasts to the same shape; minus infinity means absent.

    Returns:
        Weights of the same shape; a row without atoms is zero.

    Example:
        >>> probabilities(torch.tensor([[0.0, 0.0]]), torch.tensor([0.0, -torch.inf]))
        tensor([[1., 0.]])
    """
    if log_weight is not None:
        scores = scores + log_weight
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)


def _default_scale(query: Tensor) -> float:
    shape = getattr(query, "shape", None)
    return float(shape[-1]) ** -0.5 if shape and shape[-1] else 1.0


def _is_followed(tensor: Tensor) -> bool:
    """Return True if autograd, forward or backward, or a transform of ``torch.func`` tracks the tensor."""
    return (
        (tensor.requires_grad and torch.is_grad_enabled())
        or forward_ad.unpack_dual(tensor).tangent is not None
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def _solve(rows: Rows, level: int) -> tuple[Tensor | None, RowStatistics | None]:
    # Untracked tensors bypass autograd, which takes as long as a small call.
    solve = Attention.apply if any(x is not None and _is_followed(x) for x in rows.inputs[:5]) else Attention.forward
    found = solve(*rows.inputs, level)
    if not level:
        return rows.restore(found[0], tail=2), None  # type: ignore[arg-type]  # level zero has an output
    output = None if found[0] is None else rows.restore(found[0], tail=2)
    fields = (None if x is None else rows.restore(x, tail=1) for x in found[1:7])
    return output, RowStatistics(*fields)  # type: ignore[arg-type]  # a level that leaves fields out is not named
