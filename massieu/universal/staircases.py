"""Feed-forward nets with explicit weights: staircases and interpolants."""

from __future__ import annotations

import torch
from torch import Tensor

from massieu.nn import FeedForward

__all__ = ["interpolant", "net", "staircase"]


def staircase(
    dim: int, directions: Tensor, thresholds: Tensor, widths: Tensor, heights: Tensor, base: Tensor
) -> FeedForward:
    r"""Return a net that adds a height for every threshold below a projection of the token.

    .. math:: f(x) = h_0 + \sum_k h_k \left[ \mathrm{relu}(u_k + \tfrac12) - \mathrm{relu}(u_k - \tfrac12) \right],
              \qquad u_k = \frac{\langle d_k, x \rangle - t_k}{w_k}

    Each step is flat except for a ramp of width :math:`w_k` around its threshold.

    Args:
        dim: size of the tokens.
        directions: :math:`d_k`, shape ``(steps, dim)``.
        thresholds: :math:`t_k`, shape ``(steps,)``.
        widths: :math:`w_k`, positive, shape ``(steps,)``.
        heights: :math:`h_k`, shape ``(steps, outputs)``; the outputs are the first coordinates.
        base: :math:`h_0`, shape ``(outputs,)``.

    Example:
        >>> widths, heights = torch.full((2,), 0.1), torch.ones(2, 1)
        >>> net = staircase(1, torch.ones(2, 1), torch.tensor([1.0, 2.0]), widths, heights, torch.zeros(1))
        >>> net(torch.tensor([[0.5], [1.5], [2.5]], dtype=torch.float64)).flatten().tolist()
        [0.0, 1.0, 2.0]
    """
    sides = torch.tensor([0.5, -0.5], dtype=torch.float64)
    slope = directions.double() / widths.double()[:, None]
    bias = (-thresholds.double() / widths.double())[:, None] + sides
    down = (heights.double()[:, None, :] * sides.sign()[:, None]).flatten(0, 1)
    return net(dim, slope.repeat_interleave(2, 0), bias.flatten(), down, base)


def interpolant(dim: int, direction: Tensor, knots: Tensor, values: Tensor) -> FeedForward:
    r"""Return a net that is linear between given points, constant below the first, and linear beyond the last.

    .. math:: f(x) = y_1 + \sum_{k<K} (m_k - m_{k-1}) \, \mathrm{relu}(\langle d, x \rangle - z_k), \qquad
              m_k = \frac{y_{k+1} - y_k}{z_{k+1} - z_k}, \quad m_0 = 0

    Args:
        dim: size of the tokens.
        direction: :math:`d`, shape ``(dim,)``.
        knots: :math:`z`, increasing, shape ``(points,)``.
        values: :math:`y`, shape ``(points, outputs)``; the outputs are the first coordinates.

    Example:
        >>> net = interpolant(1, torch.ones(1), torch.tensor([0.0, 1.0, 3.0]), torch.tensor([[1.0], [5.0], [3.0]]))
        >>> net(torch.tensor([[0.0], [0.5], [1.0], [3.0]], dtype=torch.float64)).flatten().tolist()
        [1.0, 3.0, 5.0, 3.0]
    """
    knots, values = knots.double(), values.double()
    if len(knots) == 1:
        return net(dim, torch.zeros(1, dim), torch.zeros(1), torch.zeros(1, values.shape[1]), values[0])
    slopes = values.diff(dim=0) / knots.diff()[:, None]
    changes = torch.cat([slopes[:1], slopes.diff(dim=0)])
    return net(dim, direction.double().expand(len(changes), -1), -knots[:-1], changes, values[0])


@torch.no_grad()
def net(dim: int, up: Tensor, bias: Tensor, down: Tensor, base: Tensor) -> FeedForward:
    r"""Return a net with outputs :math:`B \, \mathrm{relu}(A x + a) + b` as first coordinates, and zeros as others.

    Args:
        dim: size of the tokens.
        up: :math:`A`, shape ``(units, dim)``.
        bias: :math:`a`, shape ``(units,)``.
        down: :math:`B^\top`, shape ``(units, outputs)``.
        base: :math:`b`, shape ``(outputs,)``.
    """
    found = FeedForward(dim, max(len(up), 1), activation="relu", dtype=torch.float64)
    for parameter in found.parameters():
        parameter.zero_()
    outputs = down.shape[1]
    found.up.weight[: len(up)], found.up.bias[: len(up)] = up.double(), bias.double()
    found.down.weight[:outputs, : len(up)], found.down.bias[:outputs] = down.mT.double(), base.double()
    return found
