"""Networks with explicit weights that certify themselves on the sequences they were built for."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from massieu.checks import UserError, check_floating, check_shape
from massieu.nn import Block
from massieu.universal.multisets import Cost

__all__ = ["Cases", "CertifiedNetwork", "NetworkCertificate", "Realization"]

CHUNK = 10_000_000  # hidden units of all tokens in one forward pass
EPSILON = torch.finfo(torch.float64).eps


class Cases(NamedTuple):
    """Sequences and their targets, whether these are all sequences, and a restriction on them in words."""

    inputs: Tensor
    targets: Tensor
    exhaustive: bool
    restriction: str = ""


@dataclass(frozen=True)
class NetworkCertificate:
    """Errors of a network on the sequences it was built for.

    Attributes:
        sequences, tokens: numbers of those evaluated.
        exhaustive: True if these are all sequences, False if one or more for every multiset.
        error: the largest difference from a target; infinite if the network returns nan.
        wrong: tokens whose error is above the tolerance.
        margin: machine epsilons of ``dtype`` between identifiers, as a share of the largest.
        restriction: on the sequences, in words; empty for none.
    """

    sequences: int
    exhaustive: bool
    error: float
    wrong: int
    margin: float
    tolerance: float
    tokens: int
    dtype: torch.dtype
    restriction: str = ""

    @property
    def right(self) -> float:
        """Share of tokens whose error is within the tolerance."""
        return 1 - self.wrong / self.tokens

    @property
    def holds(self) -> bool:
        """True if the error is within the tolerance."""
        return self.error <= self.tolerance

    def __str__(self) -> str:
        which = "all" if self.exhaustive else "one for every multiset,"
        verdict = "within" if self.holds else "NOT within"
        restriction = f" {self.restriction}" if self.restriction else ""
        text = (
            f"{which} {self.sequences} sequences{restriction} {verdict} {self.tolerance:.0e}: error {self.error:.1e},"
            f" {self.wrong} tokens wrong, identifiers {self.margin:.1e} machine epsilons apart"
        )
        if self.dtype == torch.float64 or self.holds:
            return text
        name = str(self.dtype).removeprefix("torch.")
        return (
            f"{text}; {name} gets {self.right:.1%} of the tokens right: go back with .double(), or construct with"
            " wider strips, such as ramp=0.01"
        )


class CertifiedNetwork(nn.Module, abc.ABC):
    """Abstract base of networks with explicit weights, in float64, for sequences of one length.

    Args:
        input_dim: size of the tokens; zero for word numbers.
        output_dim: size of the values, the first coordinates of the stream.
        length: tokens of a sequence.
        margin: machine epsilons of float64 between identifiers, as a share of the largest.
        tolerance: default of :meth:`certify` in float64.
        cases: returns the sequences of :meth:`certify`.
    """

    def __init__(
        self,
        *,
        input_dim: int,
        output_dim: int,
        length: int,
        margin: float,
        tolerance: float = 1e-12,
        cases: Callable[[], Cases],
    ) -> None:
        super().__init__()
        self.input_dim, self.output_dim, self.length = input_dim, output_dim, length
        self.margin, self.tolerance, self.cases = margin, tolerance, cases

    @property
    @abc.abstractmethod
    def _units(self) -> int:
        """Hidden units of the widest net."""

    @property
    def num_parameters(self) -> int:
        """Number of nonzero weights and biases."""
        return sum(int(parameter.count_nonzero()) for parameter in self.parameters())

    def padded(self, x: Tensor, dim: int) -> Tensor:
        """Return sequences or words, checked and padded to the width of the stream, ``(batch, length, dim)``."""
        words = self.input_dim == 0
        if not words:
            check_floating(x, "x")
        elif not isinstance(x, Tensor) or x.is_floating_point():
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise UserError(f"x must be a tensor of word numbers, got {got}; convert it with .long()")
        axes = (self.length,) if words else (self.length, self.input_dim)
        check_shape(x, "x", "batch", *axes, remedy="the weights are for sequences of this shape alone")
        dtype = next(self.parameters()).dtype
        if words or torch.promote_types(x.dtype, dtype) == dtype:  # without loss of precision
            x = x.to(dtype)
        x = x[..., None] if words else x
        return functional.pad(x, (0, dim - x.shape[-1]))

    def __getstate__(self) -> dict[str, Any]:
        # Cases take the place of the function that returns them: pickle stores no closures.
        return {**self.__dict__, "cases": functools.partial(Cases, *self.cases())}

    @torch.no_grad()
    def certify(self, tolerance: float | None = None) -> NetworkCertificate:
        """Evaluate every sequence, or one for every multiset if there are too many.

        Args:
            tolerance: largest accepted error; by default ``self.tolerance`` in float64, and in other types a hundred
                machine epsilons of the largest target, or of one.

        Returns:
            The certificate in the type of the weights. After ``network.float()`` tokens are rounded to float32 too, and
            the certificate has the share of tokens that are still right.

        Example:
            >>> function = lambda x: x * x.sum(1, keepdim=True)
            >>> narrow, wide = (massieu.universal.construct(function, 4, 3, ramp=ramp) for ramp in (None, 0.01))
            >>> narrow.certify().holds, narrow.float().certify().right < 0.9, wide.float().certify().right
            (True, True, 1.0)
        """
        inputs, targets, exhaustive, restriction = self.cases()
        dtype = next(self.parameters()).dtype
        epsilon = torch.finfo(dtype).eps
        if tolerance is None:
            largest = max(1.0, float(targets.abs().max()))
            tolerance = self.tolerance if dtype == torch.float64 else 100 * epsilon * largest
        if inputs.is_floating_point():
            inputs = inputs.to(dtype)
        chunk = max(1, CHUNK // (self.length * self._units))
        error, wrong = 0.0, 0
        for batch, expected in zip(inputs.split(chunk), targets.split(chunk), strict=True):
            apart = (self(batch) - expected).abs().nan_to_num(nan=torch.inf).amax(-1)
            error, wrong = max(error, float(apart.max())), wrong + int((~(apart <= tolerance)).sum())
        margin, tokens = self.margin * (EPSILON / epsilon), math.prod(targets.shape[:2])
        return NetworkCertificate(len(inputs), exhaustive, error, wrong, margin, tolerance, tokens, dtype, restriction)


class Realization(CertifiedNetwork):
    """Feed-forward net, one rank-one softmax head with residual connection, feed-forward net, in float64.

    Made by :func:`construct` and :func:`memorize`. The first net maps each token to its code, the head adds a number
    for its context, and the second net looks up the value.

    Settings are those of :class:`CertifiedNetwork`.
    """

    def __init__(self, encode: nn.Sequential, block: Block, decode: nn.Sequential, *, cost: Cost, **settings: Any):
        super().__init__(**settings)
        self.encode, self.block, self.decode, self.cost = encode, block, decode, cost

    @property
    def _units(self) -> int:
        return 2 * self.cost.identifiers

    def forward(self, x: Tensor) -> Tensor:
        """Return values ``(batch, length, output_dim)`` of sequences ``(batch, length, input_dim)``, or of words."""
        output: Tensor = self.decode(self.block(self.encode(self.padded(x, self.block.dim))))
        return output[..., : self.output_dim]
