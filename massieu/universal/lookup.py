"""Lookup tables as feed-forward nets, exact to the last bit."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from massieu.universal.multisets import digits_of
from massieu.universal.staircases import net, staircase

__all__ = ["table"]


def table(dim: int, keys: Tensor, values: Tensor) -> nn.Sequential:
    r"""Return a net whose output at each key, and up to a quarter of the way to the next, is exactly its value.

    A single staircase over the keys is enough in exact arithmetic. In floating point it subtracts numbers as large as
    one over the distance of two keys, and the error for 405 keys of :func:`construct` was 1e-10. So there are four
    nets: a staircase from key to the Gray code of its rank, in which one digit changes from key to key; two that round
    digits,

    .. math:: b \mapsto 1 - \mathrm{relu}(1 - \mathrm{relu}(2b - \tfrac12)),

    exactly 0 or 1 for errors of less than a quarter; and one with a unit for each entry, one if all digits agree and
    zero otherwise.

    Args:
        dim: size of the tokens, at least ``digits_of(len(keys))``.
        keys: increasing, shape ``(entries,)``; compared with coordinate zero.
        values: shape ``(entries, outputs)``; the outputs are the first coordinates.

    Example:
        >>> keys, values = torch.tensor([0.0, 1e-6, 1.0]), torch.tensor([[0.1], [-3.7], [1e5]])
        >>> look_up = table(2, keys, values)
        >>> tokens = torch.zeros(3, 2, dtype=torch.float64)
        >>> tokens[:, 0] = keys
        >>> torch.equal(look_up(tokens)[:, :1], values.double())
        True
    """
    keys, count = keys.double(), digits_of(len(keys))
    ranks = torch.arange(len(keys))
    digits = ((ranks ^ (ranks >> 1))[:, None] >> torch.arange(count) & 1).double()
    gaps, one, eye = keys.diff(), torch.ones(count), torch.eye(count, dim, dtype=torch.float64)
    ahead = torch.eye(dim, dtype=torch.float64)[0].expand(len(gaps), -1)
    signs = 2 * digits - 1
    return nn.Sequential(
        staircase(dim, ahead, keys[:-1] + gaps / 2, gaps / 2, digits.diff(dim=0), digits[0]),
        net(dim, 2 * eye, -0.5 * one, -torch.eye(count), one),
        net(dim, eye, torch.zeros(count), -torch.eye(count), one),
        net(dim, signs @ eye, 1 - digits.sum(-1), values, torch.zeros(values.shape[1])),
    )
