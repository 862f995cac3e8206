"""Projections between tokens and heads, shared by all attention layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from massieu.checks import UserError, check_count
from massieu.nn.cache import KeyValueCache, LinearCache
from massieu.nn.inputs import check_dtype, check_tokens
from massieu.nn.positions import rotate

__all__ = ["Heads", "present"]


class Heads(nn.Module):
    """Queries, keys and values by heads, rotary positions, and the output map; abstract.

    Weights have the names and shapes of most models: ``q_proj``, ``k_proj``, ``v_proj`` and ``out_proj``, each an
    ``nn.Linear`` whose rows (columns for the last) are sorted by head.
    """

    cache_type: type[KeyValueCache] | type[LinearCache]

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_key_heads: int | None,
        head_dim: int | None,
        *,
        context_dim: int | None,
        bias: bool,
        has_values: bool,
        causal: bool,
        window: int | None,
        rotary: float | None,
        dropout: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        for name, size in (("dim", dim), ("num_heads", num_heads)):
            check_count(size, name)
        optional = {"num_key_heads": num_key_heads, "head_dim": head_dim, "context_dim": context_dim, "window": window}
        for name, given in optional.items():
            if given is not None:
                check_count(given, name, remedy="pass None for the default")
        key_heads = num_heads if num_key_heads is None else num_key_heads
        if num_heads % key_heads:
            raise UserError(
                f"num_heads must be a multiple of num_key_heads, got {num_heads} and {key_heads};"
                " each key head serves the same number of query heads"
            )
        if head_dim is None and dim % num_heads:
            raise UserError(f"dim must be a multiple of num_heads, got {dim} and {num_heads}; or say head_dim yourself")
        self.dim = dim
        self.context_dim = dim if context_dim is None else context_dim
        self.num_heads, self.num_key_heads = num_heads, key_heads
        self.head_dim = dim // num_heads if head_dim is None else head_dim
        self.causal, self.window, self.rotary = causal, None if window is None else int(window), rotary
        if rotary is not None and (rotary <= 1 or self.head_dim % 2):
            raise UserError(
                f"rotary must be a base above one and head_dim even, got {rotary} and {self.head_dim};"
                " 10000.0 is the usual base"
            )

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=bias, device=device, dtype=dtype)

        self.q_proj = linear(dim, num_heads * self.head_dim)
        self.k_proj = linear(self.context_dim, key_heads * self.head_dim)
        self.v_proj = linear(self.context_dim, key_heads * self.head_dim) if has_values else None
        self.out_proj = linear(num_heads * self.head_dim, dim) if has_values else None
        self.dropout = nn.Dropout(dropout)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw Xavier-uniform matrices and set biases to zero, as in ``nn.MultiheadAttention``."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            if projection is not None:
                nn.init.xavier_uniform_(projection.weight, generator=generator)
                if projection.bias is not None:
                    nn.init.zeros_(projection.bias)

    def extra_repr(self) -> str:
        """Options beside the projections."""
        shown = f"num_heads={self.num_heads}, num_key_heads={self.num_key_heads}, causal={self.causal}"
        return f"{shown}, window={self.window}, rotary={self.rotary}"

    def project(self, x: Tensor, context: Tensor | None, past: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries ``(batch, heads, queries, head_dim)``, keys and values ``(batch, key_heads, atoms, head_dim)``.

        Keys of the ``past`` earlier tokens are not among them; the queries are the last of the atoms.
        """
        check_tokens(x, "x", self.dim)
        check_dtype(x, "x", self.q_proj)
        if context is None and self.context_dim != self.dim:
            raise UserError(
                f"context must have shape (batch, atoms, {self.context_dim}), got None; pass the tokens to attend to"
            )
        context = x if context is None else context
        check_tokens(context, "context", self.context_dim)
        check_dtype(context, "context", self.k_proj)
        if context.shape[0] not in (1, x.shape[0]) and x.shape[0] != 1:
            raise UserError(
                f"context must have the batch size of x or one, got {context.shape[0]} and {x.shape[0]};"
                " give every sequence its context"
            )
        query, key = self._split(self.q_proj(x)), self.activate(self._split(self.k_proj(context)))
        value = None if self.v_proj is None else self._split(self.v_proj(context))
        if self.rotary is not None:
            key = rotate(key, past, base=self.rotary)
            query = rotate(query, past + key.shape[-2] - query.shape[-2], base=self.rotary)
        return query, key, value

    def activate(self, key: Tensor) -> Tensor:
        """Map the projected keys ``(batch, key_heads, atoms, head_dim)`` to those of the scores; the identity here."""
        return key

    def merge(self, heads: Tensor) -> Tensor:
        """Reshape ``(batch, heads, tokens, head_dim)`` to ``(batch, tokens, heads * head_dim)``."""
        return heads.transpose(1, 2).flatten(2)

    def finish(self, heads: Tensor) -> Tensor:
        """Apply the output map and dropout."""
        assert self.out_proj is not None
        output: Tensor = self.dropout(self.out_proj(self.merge(heads)))
        return output

    def check_cache(self, context: Tensor | None, cache: object) -> None:
        """Raise if there is a cache without causal self-attention."""
        if cache is None:
            return
        self.check_cache_type(cache)
        if context is not None or not self.causal:
            got = "a context" if self.causal else "causal=False"
            raise UserError(
                f"a cache needs causal self-attention, got {got}; build the layer with causal=True and pass x only"
            )

    def check_cache_type(self, cache: object) -> None:
        """Raise unless the cache is of this layer's kind."""
        if not isinstance(cache, self.cache_type):
            raise UserError(
                f"cache must be a {self.cache_type.__name__}, got {type(cache).__name__}; make one with new_cache()"
            )

    def _split(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim))
        return heads.transpose(1, 2)


def present(lengths: Tensor | int, atoms: int, device: torch.device) -> Tensor:
    """True for the atoms within the lengths, ``(batch or 1, heads or 1, 1, atoms)``."""
    lengths = torch.as_tensor(lengths, device=device)
    return torch.arange(atoms, device=device) < lengths.reshape(*lengths.shape, *[1] * (4 - lengths.dim()))
