"""One block of a transformer: attention, then a feed-forward net, each beside a residual connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from massieu.checks import UserError, check_choice, check_count
from massieu.nn.cache import KeyValueCache, LinearCache
from massieu.nn.inputs import check_dtype, check_tokens
from massieu.nn.norms import Norm, build_norm, normalize
from massieu.statistics import Attended

__all__ = ["Activation", "Block", "FeedForward"]

Activation = Literal["gelu", "gelu_tanh", "relu", "swiglu"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "swiglu": functional.silu,
}


class FeedForward(nn.Module):
    r"""Two linear maps around a pointwise function, applied to each token.

    .. math:: W_2 \, \sigma(W_1 x + b_1) + b_2, \qquad \text{swiglu:} \quad
              W_2 (\mathrm{silu}(W_g x + b_g) \odot (W_1 x + b_1)) + b_2

    Args:
        dim: size of the tokens.
        hidden_dim: width in between; four times ``dim`` by default.
        activation: ``"gelu"``, ``"gelu_tanh"`` (as in GPT-2), ``"relu"`` or ``"swiglu"`` (as in Llama).
        bias: whether the maps have biases.
        dropout: probability of dropping an entry of the output in training.

    Example:
        >>> FeedForward(8, activation="swiglu")(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int | None = None,
        *,
        activation: Activation = "gelu",
        bias: bool = True,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_choice(activation, "activation", ACTIVATIONS)
        check_count(dim, "dim")
        width = check_count(4 * dim if hidden_dim is None else hidden_dim, "hidden_dim")
        self.dim, self.activation = dim, activation
        self.up = nn.Linear(dim, width, bias=bias, device=device, dtype=dtype)
        self.gate = nn.Linear(dim, width, bias=bias, device=device, dtype=dtype) if activation == "swiglu" else None
        self.down = nn.Linear(width, dim, bias=bias, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)

    def extra_repr(self) -> str:
        """The pointwise function."""
        return f"activation={self.activation!r}"

    def forward(self, x: Tensor) -> Tensor:
        """Apply to the last axis of ``(..., dim)``."""
        check_tokens(x, "x", self.dim, sequences=False)
        check_dtype(x, "x", self.up)
        pointwise = ACTIVATIONS[self.activation]
        inner = pointwise(self.up(x)) if self.gate is None else pointwise(self.gate(x)) * self.up(x)
        output: Tensor = self.dropout(self.down(inner))
        return output


class Block(nn.Module):
    r"""Attention and feed-forward net with residual connections and norms.

    .. math:: \text{pre-norm:}\quad y = x + \mathrm{attention}(N_1 x), \quad y + \mathrm{ff}(N_2 y)

    .. math:: \text{post-norm:}\quad y = N_1 (x + \mathrm{attention}(x)), \quad N_2 (y + \mathrm{ff}(y))

    Args:
        dim: size of the tokens.
        attention: a :class:`MeasureAttention`, a :class:`LinearAttention` or a module with the same ``forward``.
        feed_forward: a module on ``(..., dim)``; None leaves that half out.
        norm: ``"layer"``, ``"rms"``, ``"zca"`` (:class:`Renormalization`) or None for the identity.
        pre_norm: whether norms stand before the sublayers, or after the residual sums.
        norm_eps: floor inside the norms.

    Example:
        >>> block = Block(8, massieu.nn.MeasureAttention(8, 2), FeedForward(8), norm="rms")
        >>> block(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        dim: int,
        attention: nn.Module,
        feed_forward: nn.Module | None,
        *,
        norm: Norm | None = "layer",
        pre_norm: bool = True,
        norm_eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, module in (("attention", attention), ("feed_forward", feed_forward)):
            if not isinstance(module, nn.Module) and (module is not None or name == "attention"):
                got = module.__name__ if isinstance(module, type) else type(module).__name__
                raise UserError(f"{name} must be a module, got {got}; build it first, as in MeasureAttention(dim, 4)")
        self.dim, self.pre_norm = dim, pre_norm
        self.attention_norm = build_norm(norm, dim, norm_eps, device, dtype)
        self.attention = attention
        self.feed_forward_norm = None if feed_forward is None else build_norm(norm, dim, norm_eps, device, dtype)
        self.feed_forward = feed_forward

    def forward(
        self,
        x: Tensor,
        log_weight: Tensor | None = None,
        *,
        lengths: Tensor | int | None = None,
        cache: KeyValueCache | LinearCache | None = None,
        return_statistics: bool = False,
    ) -> Tensor | Attended:
        """Apply to ``(batch, tokens, dim)``; arguments and result as in :meth:`MeasureAttention.forward`."""
        check_tokens(x, "x", self.dim)
        check_dtype(x, "x", self)
        inner = normalize(self.attention_norm, x, lengths) if self.pre_norm else x
        found = self.attention(
            inner, None, log_weight, lengths=lengths, cache=cache, return_statistics=return_statistics
        )
        attended = found if return_statistics else Attended(found, None)
        x = x + attended.output
        if not self.pre_norm:
            x = normalize(self.attention_norm, x, lengths)
        if self.feed_forward is not None and self.feed_forward_norm is not None:
            inner = normalize(self.feed_forward_norm, x, lengths) if self.pre_norm else x
            x = x + self.feed_forward(inner)
            if not self.pre_norm:
                x = normalize(self.feed_forward_norm, x, lengths)
        return Attended(x, attended.statistics) if return_statistics else x
