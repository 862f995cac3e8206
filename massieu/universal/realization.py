"""A network with set weights, feed-forward net, one head, feed-forward net, that checks itself on what it realizes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from massieu.nn import Block
from massieu.universal.multisets import Cost

__all__ = ["Cases", "Certificate", "Realization", "certified"]

CHUNK = 10_000_000  # hidden units of all tokens that go through the network at once


class Cases(NamedTuple):
    """Sequences with what they must be mapped to, whether these are all there are, and with which restriction."""

    inputs: Tensor
    targets: Tensor
    exhaustive: bool
    restriction: str = ""


@dataclass(frozen=True)
class Certificate:
    """How well a network does what it was built for.

    Attributes:
        sequences: how many were tried.
        exhaustive: whether these are all sequences, or one or more for every multiset.
        error: the largest difference from a target; infinite where the network gives no number.
        wrong: tokens whose error is above the tolerance.
        margin: machine epsilons of ``dtype`` between identifiers, as a share of the largest.
        tolerance: what the error was asked to be.
        tokens: how many were tried.
        dtype: type of the weights.
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
        """Whether the error is within the tolerance."""
        return self.error <= self.tolerance

    def __str__(self) -> str:
        which = "all" if self.exhaustive else "one for every multiset,"
        verdict = "within" if self.holds else "NOT within"
        restriction = f" {self.restriction}" if self.restriction else ""
        text = (
            f"{which} {self.sequences} sequences{restriction} {verdict} {self.tolerance:.0e}: error {self.error:.1e},"
            f" {self.wrong}"
            f" tokens wrong, identifiers {self.margin:.1e} machine epsilons apart"
        )
        if self.dtype == torch.float64 or self.holds:
            return text
        name = str(self.dtype).removeprefix("torch.")
        return (
            f"{text}; {name} gets {self.right:.1%} of the tokens right: go back with .double(), or construct with"
            " wider strips, such as ramp=0.01"
        )


class Realization(nn.Module):
    """Feed-forward net, one rank-one softmax head with residual connection, feed-forward net, in float64.

    Made by :func:`construct` and :func:`memorize`. The first net gives each token its code, the head adds what tells
    its context, and the second net looks up the value.

    Args:
        encode: from tokens to codes, in coordinate zero.
        block: attention and residual connection.
        decode: from identifiers to values.
        input_dim: size of the tokens; zero for word numbers.
        output_dim: size of the values.
        length: tokens of a sequence.
        margin: machine epsilons of float64 between identifiers.
        cost: what was built.
        cases: gives what :meth:`certify` goes through.
    """

    def __init__(
        self,
        encode: nn.Sequential,
        block: Block,
        decode: nn.Sequential,
        *,
        input_dim: int,
        output_dim: int,
        length: int,
        margin: float,
        cost: Cost,
        cases: Callable[[], Cases],
    ) -> None:
        super().__init__()
        self.encode, self.block, self.decode = encode, block, decode
        self.input_dim, self.output_dim, self.length = input_dim, output_dim, length
        self.margin, self.cost, self.cases = margin, cost, cases

    @property
    def num_parameters(self) -> int:
        """Weights and biases that are not zero."""
        return sum(int(parameter.count_nonzero()) for parameter in self.parameters())

    def forward(self, x: Tensor) -> Tensor:
        """Values ``(batch, length, output_dim)`` of sequences ``(batch, length, input_dim)``, or of words."""
        output: Tensor = self.decode(self.identify(x))
        return output[..., : self.output_dim]

    def identify(self, x: Tensor) -> Tensor:
        """The stream after attention, whose coordinate zero is the identifier, ``(batch, length, dim)``."""
        words = self.input_dim == 0
        shape = (self.length,) if words else (self.length, self.input_dim)
        if not isinstance(x, Tensor) or x.dim() != 1 + len(shape) or x.shape[1:] != shape:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            places = ", ".join(map(str, shape))
            raise ValueError(f"x must have shape (batch, {places}), got {got}; the weights are for this length alone")
        if x.is_floating_point() == words:
            kind = "word numbers" if words else "floating"
            raise TypeError(f"x must be {kind}, got {x.dtype}; pass what the network was built for")
        dtype = next(self.parameters()).dtype
        exact = words or torch.promote_types(x.dtype, dtype) == dtype  # nothing is lost
        tokens = (x[..., None] if words else x).to(dtype if exact else x.dtype)
        stream: Tensor = self.encode(functional.pad(tokens, (0, self.block.dim - tokens.shape[-1])))
        stream = self.block(stream)
        return stream

    def __getstate__(self) -> dict[str, Any]:
        """With the cases themselves in place of the function that gives them, which pickle may not know."""
        return {**self.__dict__, "cases": functools.partial(Cases, *self.cases())}

    def certify(self, tolerance: float | None = None) -> Certificate:
        """Go through every sequence, or one for every multiset where there are too many.

        Args:
            tolerance: what the error is asked to be; by default 1e-12 in float64, and in other types a hundred machine
                epsilons of the largest target, or of one.

        Returns:
            The certificate in the type of the weights. After ``network.float()`` tokens are rounded to float32 too, and
            the certificate says how many of them come out right.

        Example:
            >>> function = lambda x: x * x.sum(1, keepdim=True)
            >>> narrow, wide = (massieu.universal.construct(function, 4, 3, ramp=ramp) for ramp in (None, 0.01))
            >>> narrow.certify().holds, narrow.float().certify().right < 0.9, wide.float().certify().right
            (True, True, 1.0)
        """
        chunk = max(1, CHUNK // (2 * self.length * self.cost.identifiers))
        return certified(self, self.cases(), self.margin, tolerance, chunk)


@torch.no_grad()
def certified(network: nn.Module, cases: Cases, margin: float, tolerance: float | None, chunk: int) -> Certificate:
    """The certificate of a network on cases, in the type of its weights."""
    inputs, targets, exhaustive, restriction = cases
    dtype = next(network.parameters()).dtype
    epsilon = torch.finfo(dtype).eps
    if tolerance is None:
        double = dtype == torch.float64
        tolerance = 1e-12 if double else 100 * epsilon * max(1.0, float(targets.abs().max()))
    if inputs.is_floating_point():
        inputs = inputs.to(dtype)
    error, wrong = 0.0, 0
    for given, expected in zip(inputs.split(chunk), targets.split(chunk), strict=True):
        apart = (network(given) - expected).abs().nan_to_num(nan=torch.inf).amax(-1)
        error, wrong = max(error, float(apart.max())), wrong + int((~(apart <= tolerance)).sum())
    margin *= torch.finfo(torch.float64).eps / epsilon
    tokens = math.prod(targets.shape[:2])
    return Certificate(len(inputs), exhaustive, error, wrong, margin, tolerance, tokens, dtype, restriction)
