"""Masks of models and their log weights."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from massieu.kernels import visible

__all__ = ["Visible", "absent", "add_bias", "first_atoms", "read_mask"]


class Visible(NamedTuple):
    """Keys that each query sees, and their log weights.

    Attributes:
        log_weight: boolean or floating, over the first ``atoms`` keys; None for none.
        causal: whether queries, aligned with the last of these keys, see only earlier ones.
        window: see :func:`massieu.attend`.
        atoms: number of keys that count; None for all. A cache may have room for more.
        rows: ``(batch, queries)``, False for a query that sees no key; None if all see some.
    """

    log_weight: Tensor | None = None
    causal: bool = False
    window: int | None = None
    atoms: int | None = None
    rows: Tensor | None = None


NO_MASS = 5000.0  # a key with a log weight this far below the largest has no mass in any precision

_READ: MutableMapping[Tensor, tuple[tuple[int, int, int], Visible]] = WeakIdKeyDictionary()


def absent(log_weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a mask of the log weights, or scores, that stand for minus infinity.

    That is a large negative number of the dtype, as in :func:`massieu.attend`, or one so far below the largest of its
    row that the key has no mass: some models hide keys with -10000.

    Example:
        >>> absent(torch.tensor([[0.5, -1e4], [-1e4, -1e4]]))
        tensor([[False,  True],
                [False, False]])
    """
    smallest = max(torch.finfo(dtype or log_weight.dtype).min / 2, -3e14)
    return (log_weight <= smallest) | (log_weight < log_weight.amax(-1, keepdim=True) - NO_MASS)


def read_mask(mask: Tensor | None, queries: int, atoms: int) -> Visible:
    """Return an exact, short form of a mask of up to four axes, boolean (True = visible) or floating.

    Equal rows become one row, and a causal mask, a band, or either of them with some keys hidden become flags. Any
    other mask stays, with minus infinity for hidden keys.

    Example:
        >>> read_mask(torch.ones(4, 4, dtype=torch.bool).tril(), 4, 4)
        Visible(log_weight=None, causal=True, window=None, atoms=None, rows=None)
    """
    if mask is None:
        return Visible()
    # All layers of a pass get the same mask.
    key = (queries, atoms, 0 if mask.is_inference() else mask._version)
    known = _READ.get(mask)
    if known is None or known[0] != key:
        known = _READ[mask] = (key, _read(mask.detach(), queries, atoms))
    return known[1]


def _read(mask: Tensor, queries: int, atoms: int) -> Visible:
    mask = _narrowed(mask[..., :atoms])
    if mask.dtype == torch.bool:
        return _in_words(mask, queries, atoms)
    if not mask.is_floating_point():
        raise TypeError(f"an attention mask must be boolean or floating, got {mask.dtype}; convert it with .bool()")
    gone = absent(mask)
    if torch.equal(gone, mask != 0):
        return _in_words(~gone, queries, atoms)
    if not bool(gone.any()):
        return Visible(mask)
    return Visible(mask.masked_fill(gone, -torch.inf), rows=_rows(~gone, queries))


def add_bias(visible: Visible, bias: Tensor | None) -> Visible:
    """Add a bias of the scores to a mask."""
    if bias is None or not bool(bias.any()):
        return visible
    bias = bias.detach()
    weight = visible.log_weight
    if weight is not None:
        bias = bias.masked_fill(~weight, -torch.inf) if weight.dtype == torch.bool else bias + weight
    return visible._replace(log_weight=bias.masked_fill(absent(bias), -torch.inf))


def first_atoms(queries: int, atoms: int, device: torch.device) -> Visible:
    """Return the causality of ``scaled_dot_product_attention``: query ``i`` sees keys 0 to ``i``."""
    if queries <= atoms:
        return Visible(causal=True, atoms=queries)
    return read_mask(torch.ones(queries, atoms, dtype=torch.bool, device=device).tril(), queries, atoms)


def _narrowed(mask: Tensor) -> Tensor:
    """The mask with four axes; those that only repeat have size one."""
    mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape)) if mask.dim() < 4 else mask
    for axis in range(mask.dim()):
        if mask.stride(axis) == 0:
            mask = mask.narrow(axis, 0, 1)
    return mask


def _in_words(seen: Tensor, queries: int, atoms: int) -> Visible:
    if seen.shape[-1] != atoms:
        seen = seen.expand(*seen.shape[:-1], atoms)
    rows = _rows(seen, queries)
    keys = _any(seen, -2)
    filled = _filled(keys, queries, atoms)
    if filled is not None:
        seen, keys, atoms = seen[..., :filled], keys[..., :filled], filled
    if _is_outer(seen, keys, None):
        return Visible(_unless_all(keys), atoms=filled, rows=rows)
    union = seen.flatten(0, 1).any(0)
    here = torch.arange(queries, device=seen.device)[:, None] + atoms - queries
    there = torch.arange(atoms, device=seen.device)
    causal = torch.equal(union, union & visible(here, there, True, None))
    reach = _reach(union, here[:, 0])
    for window in (None, reach + 1):
        band = visible(here, there, causal, window)
        for some in (None, keys):
            if _is_outer(seen, some, band):
                return Visible(some, causal, window, filled, rows)
    return Visible(seen, atoms=filled, rows=rows)


def _rows(seen: Tensor, queries: int) -> Tensor | None:
    some = _any(seen, -1).any(1)[..., 0]
    return None if bool(some.all()) else some.expand(some.shape[0], queries)


def _filled(keys: Tensor, queries: int, atoms: int) -> int | None:
    """Number of filled keys of a cache, at least those of the queries; None if it is full."""
    if atoms <= queries:
        return None
    columns = keys.flatten(0, -2).any(0).nonzero()
    last = int(columns[-1]) + 1 if len(columns) else 0
    return max(last, queries) if max(last, queries) < atoms else None


def _is_outer(seen: Tensor, keys: Tensor | None, band: Tensor | None) -> bool:
    """Return whether the mask is the given keys within the given band; one batch entry at a time, to save memory."""
    for entry, mask in enumerate(seen):
        own = mask.new_ones(()) if keys is None else keys[entry]
        guess = own if band is None else band & own
        if not torch.equal(mask, guess.expand_as(mask)):
            return False
    return True


def _reach(union: Tensor, here: Tensor) -> int:
    """The largest distance at which any query sees a key."""
    some = _any(union, -1)[:, 0]
    if not bool(some.any()):
        return 0
    first = union.view(torch.uint8).argmax(-1)
    last = union.shape[-1] - 1 - union.view(torch.uint8).flip(-1).argmax(-1)
    return int(torch.maximum(here - first, last - here)[some].max())


def _any(seen: Tensor, axis: int) -> Tensor:
    # Much faster on the processor than torch.any over an axis of booleans.
    return seen.view(torch.uint8).amax(axis, keepdim=True).view(torch.bool)


def _unless_all(keys: Tensor) -> Tensor | None:
    return None if bool(keys.all()) else keys
