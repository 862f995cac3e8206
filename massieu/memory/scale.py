"""Retrieval from millions of patterns in one pass, from memory or from a file larger than memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import Tensor

from massieu import kernels
from massieu.checks import UserError, check_count, check_floating, check_number, check_shape
from massieu.memory.memory import as_log_weights, broadcast
from massieu.memory.storage import Stored, open_stored

__all__ = ["Retrieved", "retrieve_at_scale"]

TILE_BYTES = 16 << 20
"""Bytes that are read and converted at a time: enough to pay for the call, few enough to fit in memory."""


@dataclass(frozen=True)
class Retrieved:
    r"""Result of one update of a Hopfield memory, for every query.

    With scores :math:`s_j = \beta \langle x_j, \xi \rangle` and weights :math:`p_j = e^{s_j} / Z`.

    Attributes:
        state: :math:`\sum_j p_j v_j`, the next state, shape ``(..., queries, value_dim)``.
        log_normalizer: :math:`\log Z`, shape ``(..., queries)``.
        entropy: of the weights, in nats, shape ``(..., queries)``.
        scores: the highest scores, best first, shape ``(..., queries, top)``. Their weights are
            ``(scores - log_normalizer[..., None]).exp()``.
        index: the patterns of these scores, int64, shape ``(..., queries, top)``; of equal scores the earlier is first.
    """

    state: Tensor
    log_normalizer: Tensor
    entropy: Tensor
    scores: Tensor
    index: Tensor


def retrieve_at_scale(
    queries: Tensor,
    patterns: Tensor | np.ndarray[Any, Any] | str | PathLike[str] | Any,
    *,
    beta: float,
    top: int = 1,
    values: Tensor | np.ndarray[Any, Any] | str | PathLike[str] | Any = None,
    log_weight: Tensor | None = None,
    tile: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Retrieved:
    r"""Make one update of a continuous Hopfield memory over millions of patterns, in one pass.

    .. math:: f(\xi) = \sum_j p_j v_j, \qquad p_j \propto w_j e^{\beta \langle x_j, \xi \rangle}

    Patterns in memory are read in place, on all threads. Others are read in tiles of a few megabytes, so that a file
    may be larger than memory. Computations are in float32 at least, in float64 for scores beyond 1000, and sums are in
    float64. There are no derivatives: :func:`massieu.attend` has them.

    Args:
        queries: :math:`\xi`, shape ``(..., queries, dim)``.
        patterns: :math:`x`, shape ``(atoms, dim)``: a tensor, an array, a ``np.memmap``, the path of a safetensors file
            that holds one tensor, or a slice of one (``safe_open(path, "pt").get_slice(key)``); float64, float32,
            float16 or, except for numpy, bfloat16.
        beta: inverse temperature :math:`\beta`, positive.
        top: number of best patterns to return.
        values: :math:`v`, shape ``(atoms, value_dim)``, stored like the patterns; the patterns themselves if None.
        log_weight: :math:`\log w`, added to the scores, broadcasting to ``(..., queries, atoms)``; minus infinity, or
            False in a boolean mask, removes a pattern. Where fewer than ``top`` are left the rest has index -1 and
            score minus infinity.
        tile: patterns read at a time. By default all, where they lie in memory in the precision of the computation and
            there is no ``progress``.
        progress: called after every tile with the number of patterns read, and of all.

    Returns:
        The states, log normalizers, entropies and best patterns.

    Source:
        Ramsauer et al. 2020, eq. 3.

    Example:
        >>> found = retrieve_at_scale(torch.tensor([[0.9, 0.2]]), torch.eye(2), beta=20.0, top=2)
        >>> found.state, found.index
        (tensor([[1.0000e+00, 8.3153e-07]]), tensor([[0, 1]]))
    """
    beta = check_number(beta, "beta", above=0)
    stored = open_stored(patterns, "patterns")
    worth = None if values is None else open_stored(values, "values")
    atoms, dim = stored.shape
    _check_queries(queries, dim, patterns, values, log_weight)
    if worth is not None and worth.shape[0] != atoms:
        raise UserError(f"values must have one row for each of the {atoms} patterns, got {worth.shape[0]}; match them")
    if check_count(top, "top", least=0) > atoms:
        raise UserError(f"top must be at most the number of patterns, {atoms}, got {top}")
    held = [stored] if worth is None else [stored, worth]
    wide = torch.float64 in (queries.dtype, *(each.dtype for each in held))
    dtype = torch.float64 if wide else torch.float32
    if tile is None:
        whole = progress is None and all(each.resident and each.dtype == dtype for each in held)
        tile = atoms if whole else max(1, TILE_BYTES // (dtype.itemsize * max(each.shape[1] for each in held)))
    check_count(tile, "tile", remedy="it is the number of patterns read at a time")
    flat = queries.detach().reshape(-1, dim).to(dtype)
    weights = None if log_weight is None else _log_weights(log_weight, (*queries.shape[:-1], atoms), dtype)
    takes = [_converting(each, flat, tile) for each in held]
    merged = _Merged(flat, held[-1].shape[1], top)
    for start in range(0, atoms, tile):
        stop = min(start + tile, atoms)
        key, *rest = (take(start, stop) for take in takes)
        value = rest[0] if rest else key
        own = None if weights is None else weights[..., start:stop]
        rows = kernels.arrange(flat, key, value, own, scale=beta, sink=None, causal=False, window=None, lengths=None)
        merged.add(kernels.retrieve(rows.inputs, 1, min(top, stop - start)), start, own)
        if progress is not None:
            progress(stop, atoms)
    if merged.highest > HIGHEST and not wide:
        options: dict[str, Any] = {"values": values, "log_weight": log_weight, "progress": progress}
        exact = retrieve_at_scale(queries.double(), patterns, beta=beta, top=top, **options)
        state, log_z, entropy, scores = (
            x.to(dtype) for x in (exact.state, exact.log_normalizer, exact.entropy, exact.scores)
        )
        return Retrieved(state, log_z, entropy, scores, exact.index)
    if not bool(merged.log_z.isfinite().all() and merged.state.isfinite().all()):
        raise UserError(
            "patterns, values and their scores must be finite, got nan or infinity;"
            " look for them tile by tile, or lower beta"
        )
    return merged.result(queries.shape[:-1], dtype)


def _converting(stored: Stored, like: Tensor, tile: int) -> Callable[[int, int], Tensor]:
    """Return a reader of tiles in the precision of the queries, with one buffer: new memory costs more than reading."""
    if stored.dtype == like.dtype:
        return lambda start, stop: stored.read(start, stop).to(like.device)
    buffer = like.new_empty(min(tile, stored.shape[0]), stored.shape[1])
    return lambda start, stop: buffer[: stop - start].copy_(stored.read(start, stop))


HIGHEST = 2.0**30
"""Scores in base 2 beyond this have rounding in float32 that overflows as an exponent."""


class _Merged:
    """Merged result of the tiles so far, in float64."""

    def __init__(self, queries: Tensor, width: int, top: int) -> None:
        self.top = top
        count = len(queries)
        zeros = queries.new_zeros(count, dtype=torch.float64)
        self.log_z, self.entropy, self.state = zeros - torch.inf, zeros, zeros.new_zeros(count, width)
        self.scores = zeros.new_zeros(count, 0)
        self.index = torch.zeros_like(self.scores, dtype=torch.int64)
        self.highest = 0.0  # score in base 2, by its absolute value

    def add(self, found: kernels.Found, start: int, log_weight: Tensor | None) -> None:
        """Add a tile; the entropy of a mixture is the mean of the entropies plus the entropy of the choice."""
        assert found.output is not None
        assert found.statistics[2] is not None
        maximum, total, *_ = found.moments.flatten(1).double()
        seen = maximum[~maximum.isneginf()].abs()
        self.highest = max(self.highest, float(seen.amax()) if len(seen) else 0.0)
        # From the moments: a log normalizer in float32 near 10,000 is too coarse for weights.
        own = kernels.LN2 * maximum + total.log()
        entropy, output = found.statistics[2].reshape(-1).double(), found.output.reshape(self.state.shape).double()
        if log_weight is not None:  # a tile without visible patterns of a query has no share
            unseen = log_weight.isneginf().all(-1).expand(len(own))
            own, entropy = own.masked_fill(unseen, -torch.inf), entropy.masked_fill(unseen, 0.0)
            output = output.masked_fill(unseen[:, None], 0.0)
        log_z = torch.logaddexp(self.log_z, own)
        before, now = (torch.where(x.isneginf(), 0.0, (x - log_z).exp()) for x in (self.log_z, own))
        choice = -torch.xlogy(before, before) - torch.xlogy(now, now)
        self.entropy = before * self.entropy + now * entropy + choice
        self.state = before[:, None] * self.state + now[:, None] * output
        self.log_z = log_z
        if found.best is None:
            return
        score, atom = (x.flatten(0, 2) for x in found.best)
        atom = torch.where(atom < 0, atom, atom + start)
        if log_weight is not None:  # an absent pattern is not among the best
            away = log_weight.expand(len(score), -1).gather(-1, (atom - start).clamp_min(0)).isneginf() | (atom < 0)
            score, atom = score.masked_fill(away, -torch.inf), atom.masked_fill(away, -1)
        # Stable: of equal scores the earlier pattern stays in front.
        scores, order = torch.cat([self.scores, score], -1).sort(dim=-1, descending=True, stable=True)
        self.scores = scores[:, : self.top]
        self.index = torch.cat([self.index, atom], -1).gather(-1, order[:, : self.top])

    def result(self, lead: torch.Size, dtype: torch.dtype) -> Retrieved:
        """Return the result in the shape of the queries."""
        fields = (x.to(dtype) for x in (self.state, self.log_z, self.entropy, self.scores))
        return Retrieved(*(x.reshape(*lead, *x.shape[1:]) for x in (*fields, self.index)))


def _log_weights(log_weight: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return log weights for the flattened queries, shape ``(queries or 1, atoms)``."""
    found = as_log_weights(log_weight, shape[-1], dtype).to(dtype)
    if found.dim() == 1:
        return found.expand(1, shape[-1])
    return broadcast(found, "log_weight", shape).reshape(-1, shape[-1])


def _check_queries(queries: Tensor, dim: int, *others: Any) -> None:
    check_floating(queries, "queries", finite=True)
    check_shape(queries, "queries", "...", "queries", dim)
    followed = any(isinstance(each, Tensor) and each.requires_grad for each in (queries, *others))
    if followed and torch.is_grad_enabled():
        raise UserError(
            "retrieve_at_scale has no derivatives, got a tensor that requires them;"
            " use massieu.attend, or call it under torch.no_grad()"
        )
