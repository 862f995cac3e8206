"""Associations with trained patterns: pooling of a set by trained states, lookup in trained prototypes."""

from __future__ import annotations

import abc
from typing import Any

import torch
from torch import Tensor, nn

from massieu.checks import UserError, check_count
from massieu.nn.hopfield import Associated, Hopfield

__all__ = ["HopfieldLayer", "HopfieldPooling"]

Input = Tensor | tuple[Tensor, Tensor]


class _Owner(nn.Module, abc.ABC):
    """A :class:`Hopfield` with patterns of its own beside the input; abstract."""

    hopfield: Hopfield

    @abc.abstractmethod
    def _patterns(self, input: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Stored patterns, states and projections."""

    def forward(
        self, input: Input, stored_pattern_padding_mask: Tensor | None = None, association_mask: Tensor | None = None
    ) -> Tensor:
        """The output alone; arguments as in :meth:`Hopfield.associate`, without the patterns of this layer."""
        return self.associate(input, stored_pattern_padding_mask, association_mask).output

    def associate(
        self, input: Input, stored_pattern_padding_mask: Tensor | None = None, association_mask: Tensor | None = None
    ) -> Associated:
        """As :meth:`Hopfield.associate`, with the output of this layer."""
        return self.hopfield.associate(self._patterns(input), stored_pattern_padding_mask, association_mask)

    def get_association_matrix(
        self, input: Input, stored_pattern_padding_mask: Tensor | None = None, association_mask: Tensor | None = None
    ) -> Tensor:
        """As :meth:`Hopfield.get_association_matrix`."""
        given = self._patterns(input)
        return self.hopfield.get_association_matrix(given, stored_pattern_padding_mask, association_mask)

    def _own(self, patterns: Tensor) -> Tensor:
        """Patterns of the layer as a batch of one, which serves every entry."""
        return patterns[None] if self.hopfield.batch_first else patterns[:, None]


class HopfieldPooling(_Owner):
    """Pooling of a set of patterns by trained states.

    The input is ``(batch, patterns, size)``, or ``(stored, projection)``; the output ``(batch, quantity *
    output_size)``, and the association matrix ``(batch, heads, quantity, patterns)``.

    Args:
        input_size: size of the patterns.
        quantity: number of states.
        trainable: whether the states (``pooling_weights``) are trained.
        options: those of :class:`Hopfield`.

    Example:
        >>> pool = HopfieldPooling(8, num_heads=2, quantity=3)
        >>> absent = torch.arange(5) >= torch.tensor([[5], [2]])
        >>> pool(torch.randn(2, 5, 8), stored_pattern_padding_mask=absent).shape
        torch.Size([2, 24])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int | None = None,
        output_size: int | None = None,
        pattern_size: int | None = None,
        num_heads: int = 1,
        *,
        quantity: int = 1,
        trainable: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        check_count(quantity, "quantity")
        self.hopfield = Hopfield(input_size, hidden_size, output_size, pattern_size, num_heads, **options)
        self.pooling_weights = _trained(quantity, input_size, trainable, options)

    def associate(
        self, input: Input, stored_pattern_padding_mask: Tensor | None = None, association_mask: Tensor | None = None
    ) -> Associated:
        """As :meth:`Hopfield.associate`, with one row of outputs for every entry of the batch."""
        found = super().associate(input, stored_pattern_padding_mask, association_mask)
        output = found.output if self.hopfield.batch_first else found.output.transpose(0, 1)
        return found._replace(output=output.flatten(1))

    def _patterns(self, input: Any) -> tuple[Tensor, Tensor, Tensor]:
        if not isinstance(input, Tensor) and not (isinstance(input, (tuple, list)) and len(input) == 2):
            got = f"{len(input)} of them" if isinstance(input, (tuple, list)) else type(input).__name__
            raise UserError(f"input must be a tensor, or stored patterns and projections, got {got}; pass one or both")
        stored, projection = (input, input) if isinstance(input, Tensor) else input
        return stored, self._own(self.pooling_weights), projection


class HopfieldLayer(_Owner):
    """Lookup in trained stored patterns (prototypes).

    The input is states ``(batch, states, input_size)``; the output ``(batch, states, output_size)``, and the
    association matrix ``(batch, heads, states, quantity)``.

    Args:
        input_size: size of the states.
        quantity: number of stored patterns.
        trainable: whether the stored patterns (``lookup_weights``) are trained.
        lookup_weights_as_separated: whether the values have their own weights (``target_weights``).
        lookup_targets_as_trainable: whether these are trained.
        options: those of :class:`Hopfield`.

    Example:
        >>> HopfieldLayer(8, quantity=100, output_size=3)(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 3])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int | None = None,
        output_size: int | None = None,
        pattern_size: int | None = None,
        num_heads: int = 1,
        *,
        quantity: int = 1,
        trainable: bool = True,
        lookup_weights_as_separated: bool = False,
        lookup_targets_as_trainable: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        check_count(quantity, "quantity")
        self.hopfield = Hopfield(input_size, hidden_size, output_size, pattern_size, num_heads, **options)
        stored, projection = self.hopfield.stored_size or 1, self.hopfield.projection_size or 1
        self.lookup_weights = _trained(quantity, stored, trainable, options)
        self.target_weights: nn.Parameter | None = None
        if lookup_weights_as_separated:
            self.target_weights = _trained(quantity, projection, lookup_targets_as_trainable, options)

    def _patterns(self, input: Any) -> tuple[Tensor, Tensor, Tensor]:
        stored = self._own(self.lookup_weights)
        return stored, input, stored if self.target_weights is None else self._own(self.target_weights)


def _trained(quantity: int, size: int, trainable: bool, options: dict[str, Any]) -> nn.Parameter:
    """Patterns of a layer, ``(quantity, size)``, drawn with standard deviation 0.02."""
    patterns = torch.empty(quantity, size, device=options.get("device"), dtype=options.get("dtype"))
    return nn.Parameter(nn.init.normal_(patterns, std=0.02, generator=options.get("generator")), trainable)
