"""Memories of polar states with a steeper energy than the quadratic one: polynomial and exponential."""

from __future__ import annotations

import abc
from typing import Literal

import torch
from torch import Tensor

from massieu.checks import check_choice, check_count
from massieu.memory.polar import ROUNDING, Polar

__all__ = ["Dense", "Exponential"]


class Separable(Polar):
    r"""Energies :math:`-\sum_i F(x_i \cdot \xi)`, or a monotone function of that, by one of two rules.

    In F(m) a flip of a coordinate moves the overlap m by two, up where the pattern disagrees and down where it agrees.
    """

    def __init__(self, patterns: Tensor, rule: str, generator: torch.Generator | int) -> None:
        super().__init__(patterns, generator)
        check_choice(rule, "rule", ("gradient", "flip"))
        self.rule = rule

    @property
    def _asynchronous(self) -> bool:
        return self.rule == "flip"

    @abc.abstractmethod
    def _reference(self, overlap: Tensor) -> Tensor:
        """Return a number for each row that keeps :meth:`_potential` within range, shape ``(rows, 1)``."""

    @abc.abstractmethod
    def _potential(self, overlap: Tensor, reference: Tensor) -> Tensor:
        """Return F of the overlaps, times a positive factor for each row."""

    @abc.abstractmethod
    def _slope(self, overlap: Tensor, reference: Tensor) -> Tensor:
        """Return the derivative of F at the overlaps, times a positive factor for each row."""

    def _field(self, rows: Tensor, overlap: Tensor) -> tuple[Tensor, Tensor]:
        slope = self._slope(overlap, self._reference(overlap))
        return slope @ self.patterns, ROUNDING * slope.abs().sum(-1, keepdim=True)

    def _unstable(self, rows: Tensor, overlap: Tensor) -> Tensor:
        cost, zero = self._scaled_cost(rows, overlap, self._reference(overlap))
        return cost < -zero

    def _signed_cost(self, rows: Tensor, overlap: Tensor) -> tuple[Tensor, Tensor]:
        return self._scaled_cost(rows, overlap, self._reference(overlap))

    def _scaled_cost(self, rows: Tensor, overlap: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
        here = self._potential(overlap, reference)
        fall, rise = here - self._potential(overlap - 2, reference), self._potential(overlap + 2, reference) - here
        # A flip costs the fall where pattern and state agree, and gains the rise elsewhere.
        cost = 0.5 * (rows * ((fall + rise) @ self.patterns) + (fall - rise).sum(-1, keepdim=True))
        return cost, ROUNDING * (here.abs() + fall.abs() + rise.abs()).sum(-1, keepdim=True)


class Dense(Separable):
    r"""Polynomial memory of Krotov and Hopfield.

    .. math:: E(\xi) = -\sum_i F(x_i \cdot \xi), \qquad F(z) = \max(z, 0)^n \quad\text{or}\quad z^n

    Args:
        patterns: :math:`x_i`, entries 1 and -1, shape ``(atoms, dim)``.
        power: n, an integer of at least 2.
        rectified: cut F off at zero. If not, an even power stores every pattern together with its negative.
        rule: "flip" gives each coordinate in turn the sign of lower energy and never raises it. "gradient" moves all at
            once, :math:`\xi' = \mathrm{sgn} \sum_i F'(x_i \cdot \xi)\, x_i`: it never raises the energy either if F is
            convex, which the odd powers are only when rectified. But each coordinate then pulls on itself, as with the
            diagonal of :class:`~massieu.memory.Classical`: among many patterns random states are fixed points too.
        generator: of the order of the sweeps, or a seed.

    The energy of high powers may overflow to minus infinity, without effect on rule and kinds.

    Source:
        Krotov and Hopfield 2016, eq. 3 and 4, for the flip rule. The gradient rule minimizes the linearized energy.

    Example:
        >>> corners = torch.tensor([[1.0, 1, 1, 1, 1, 1], [1, 1, 1, -1, -1, -1], [-1, 1, -1, 1, -1, 1]])
        >>> Dense(corners, 3).retrieve(torch.tensor([[1.0, 1, -1, -1, -1, -1]])).index
        tensor([1])
    """

    def __init__(
        self,
        patterns: Tensor,
        power: int,
        *,
        rectified: bool = True,
        rule: Literal["gradient", "flip"] = "flip",
        generator: torch.Generator | int = 0,
    ) -> None:
        super().__init__(patterns, rule, generator)
        self.power, self.rectified = check_count(power, "power", least=2), bool(rectified)

    def _energy(self, rows: Tensor, **conditions: Tensor) -> Tensor:
        return -self._potential(rows @ self.patterns.T, rows.new_ones(1)).sum(-1)

    def _flip_cost(self, rows: Tensor, overlap: Tensor) -> tuple[Tensor, Tensor]:
        reference = self._reference(overlap)
        scale = reference**self.power
        cost, zero = self._scaled_cost(rows, overlap, reference)
        return cost * scale, zero * scale

    def _reference(self, overlap: Tensor) -> Tensor:
        return overlap.abs().amax(-1, keepdim=True) + 2

    def _potential(self, overlap: Tensor, reference: Tensor) -> Tensor:
        return self._cut(overlap / reference) ** self.power

    def _slope(self, overlap: Tensor, reference: Tensor) -> Tensor:
        return self._cut(overlap / reference) ** (self.power - 1)

    def _closeness(self, overlap: Tensor) -> Tensor:
        return overlap if self.rectified else overlap.abs()

    def _cut(self, overlap: Tensor) -> Tensor:
        return overlap.relu() if self.rectified else overlap


class Exponential(Separable):
    r"""Memory with the exponential of the overlap, in logarithms.

    .. math:: E(\xi) = -\log \sum_i e^{x_i \cdot \xi}

    This is a monotone function of Demircigil's energy :math:`-\sum_i e^{x_i \cdot \xi}`, which overflows at dimension
    710: the two rise and fall together.

    Args:
        patterns: :math:`x_i`, entries 1 and -1, shape ``(atoms, dim)``.
        rule: "flip" or "gradient", as for :class:`Dense`; neither raises the energy.
        generator: of the order of the sweeps, or a seed.

    Source:
        Demircigil et al. 2017.

    Example:
        >>> patterns = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, -1.0, -1.0]])
        >>> Exponential(patterns).retrieve(torch.tensor([[-1.0, 1.0, -1.0, -1.0]])).state
        tensor([[ 1.,  1., -1., -1.]], dtype=torch.float64)
    """

    def __init__(
        self, patterns: Tensor, *, rule: Literal["gradient", "flip"] = "flip", generator: torch.Generator | int = 0
    ) -> None:
        super().__init__(patterns, rule, generator)

    def _energy(self, rows: Tensor, **conditions: Tensor) -> Tensor:
        return -(rows @ self.patterns.T).logsumexp(-1)

    def _flip_cost(self, rows: Tensor, overlap: Tensor) -> tuple[Tensor, Tensor]:
        reference = self._reference(overlap)
        total = self._potential(overlap, reference).sum(-1, keepdim=True)
        cost, zero = self._scaled_cost(rows, overlap, reference)
        return -torch.log1p(-cost / total), zero / total

    def _reference(self, overlap: Tensor) -> Tensor:
        return overlap.amax(-1, keepdim=True)

    def _closeness(self, overlap: Tensor) -> Tensor:
        return overlap

    def _potential(self, overlap: Tensor, reference: Tensor) -> Tensor:
        return (overlap - reference).exp()

    _slope = _potential
