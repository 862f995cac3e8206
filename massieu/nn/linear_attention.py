"""Linear attention: weights are inner products without softmax."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from massieu.checks import UserError, check_choice, check_count
from massieu.kernels import visible
from massieu.nn.cache import LinearCache
from massieu.nn.inputs import check_measure
from massieu.nn.multihead import Heads, present
from massieu.statistics import Attended

__all__ = ["Form", "LinearAttention"]

Form = Literal["sum", "mean", "elu"]

CHUNK = 128  # tokens of a causal sequence whose products are computed at once


class LinearAttention(Heads):
    r"""Attention without softmax: a sum of values, each weighed by the inner product of its key with the query.

    .. math:: o_i = W_O \sum_j h_{ij} \langle k_j, q_i \rangle v_j

    ``"sum"``
        As written: with set weights, one step of gradient descent on the examples in the context.
    ``"mean"``
        Divided by :math:`\sum_j h_{ij}`, for plain masks the number of atoms: with queries, keys and values the tokens
        themselves, the Hebbian field :math:`\frac1N X X^\top \eta` of a classical Hopfield memory.
    ``"elu"``
        With the positive features :math:`\phi = 1 + \mathrm{elu}` of queries and keys, divided by
        :math:`\sum_j h_{ij} \langle \phi(k_j), \phi(q_i) \rangle`: weights that sum to one.

    Time and memory are linear in the tokens, unless a window is set or ``log_weight`` differs between queries; then
    the matrix of weights is computed. A causal layer keeps a state of fixed size instead of a growing cache. There are
    no row statistics, since the weights are not an exponential family.

    Args:
        form: see above.
        rotary: base of rotary positions; not with ``"elu"``, whose features must stay positive.
        others: as in :class:`MeasureAttention`, with the defaults shown.

    Source:
        von Oswald et al. 2022, Proposition 1 ("sum"); Ahn et al. 2023 ("mean"); Katharopoulos et al. 2020 ("elu").

    Example:
        >>> layer = LinearAttention(16, num_heads=4, causal=True)
        >>> layer(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    cache_type = LinearCache

    def __init__(
        self,
        dim: int,
        num_heads: int = 1,
        num_key_heads: int | None = None,
        head_dim: int | None = None,
        *,
        context_dim: int | None = None,
        bias: bool = False,
        form: Form = "sum",
        causal: bool = False,
        window: int | None = None,
        scale: float = 1.0,
        rotary: float | None = None,
        dropout: float = 0.0,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_choice(form, "form", get_args(Form))
        if form == "elu" and rotary is not None:
            raise UserError(f'form="elu" needs positive features, got rotary={rotary}; use form="sum" or "mean"')
        super().__init__(
            dim,
            num_heads,
            num_key_heads,
            head_dim,
            context_dim=context_dim,
            bias=bias,
            has_values=True,
            causal=causal,
            window=window,
            rotary=rotary,
            dropout=dropout,
            device=device,
            dtype=dtype,
        )
        self.form = form
        self.scale = scale
        self.reset_parameters(generator)

    def extra_repr(self) -> str:
        """Options beside the projections."""
        return f"form={self.form!r}, {super().extra_repr()}"

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        log_weight: Tensor | None = None,
        *,
        lengths: Tensor | int | None = None,
        cache: LinearCache | None = None,
        return_statistics: bool = False,
    ) -> Tensor | Attended:
        r"""Attend from the tokens to themselves or to a context, as :meth:`MeasureAttention.forward`.

        A row without atoms gives zero. The cache holds sums over earlier tokens, and the statistics are None.
        """
        self.check_cache(context, cache)
        if self.window is not None:
            check_count(self.window, "window", remedy="pass None for no window")
        if cache is not None and not (log_weight is None and lengths is None and self.window is None):
            raise UserError(
                "LinearAttention with a cache must see every token alike, got log_weight, lengths or a window;"
                " its sums cannot be weighed afterwards, so call it without a cache"
            )
        query, key, value = self.project(x, context, 0 if cache is None else cache.length)
        assert value is not None
        check_measure(query, key, log_weight, lengths)
        share = self.num_heads // self.num_key_heads
        key, value = (heads.repeat_interleave(share, 1) for heads in (key, value))
        if self.form == "elu":
            query, key = 1 + functional.elu(query), 1 + functional.elu(key)
            value = functional.pad(value, (0, 1), value=1.0)  # its sum is the divisor
        weight = _weight(key, log_weight, lengths)
        if not (log_weight is None and lengths is None):
            # Zero times nan is nan: keys and values that no query sees are set to zero.
            absent = (weight == 0).all(-2, keepdim=True).mT
            key, value = key.masked_fill(absent, 0.0), value.masked_fill(absent, 0.0)
        sums, total = self._sum(self.scale * query, key, value, weight, cache)
        if self.form == "elu":
            sums, total = sums[..., :-1], sums[..., -1]
        if self.form != "sum":
            sums = sums / total.masked_fill(total == 0, 1.0)[..., None]
        output = self.finish(sums)
        return Attended(output, None) if return_statistics else output

    def new_cache(self, capacity: int = 0) -> LinearCache:
        """An empty cache for this layer; its size is fixed."""
        return LinearCache()

    def _sum(
        self, query: Tensor, key: Tensor, value: Tensor, weight: Tensor, cache: LinearCache | None
    ) -> tuple[Tensor, Tensor]:
        """Weighted sums of values, ``(batch, heads, queries, value_dim)``, and sums of the weights."""
        queries, atoms = query.shape[-2], key.shape[-2]
        if self.window is not None or weight.shape[-2] > 1 or (self.causal and queries != atoms):
            own = torch.arange(atoms - queries, atoms, device=query.device)[:, None]
            weight = weight * visible(own, torch.arange(atoms, device=query.device), self.causal, self.window)
            return (query @ key.mT * weight).masked_fill(weight == 0, 0.0) @ value, weight.sum(-1)
        key = key * weight.mT
        if not self.causal:
            return query @ (key.mT @ value), weight.sum(-1)
        memory = LinearCache() if cache is None else cache
        past = memory.length
        sums, state = _scan(query, key, value, memory.recall(key, value))
        if cache is not None:
            cache.store(state, atoms)
        return sums, past + weight.squeeze(-2).cumsum(-1)


def _weight(key: Tensor, log_weight: Tensor | None, lengths: Tensor | int | None) -> Tensor:
    """The measure of the atoms, ``(batch or 1, heads or 1, queries or 1, atoms)``."""
    weight = torch.ones(1, 1, 1, key.shape[-2], device=key.device, dtype=key.dtype)
    if log_weight is not None:
        given = log_weight if log_weight.dtype == torch.bool else log_weight.exp()
        weight = weight * given.to(key.dtype)
    if lengths is not None:
        weight = weight * present(lengths, key.shape[-2], key.device)
    return weight


def _scan(query: Tensor, key: Tensor, value: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Causal sums by chunks, and the state after the last of them."""
    parts = []
    for q, k, v in zip(*(x.split(CHUNK, dim=-2) for x in (query, key, value)), strict=True):
        parts.append((q @ k.mT).tril() @ v + q @ state)
        state = state + k.mT @ v
    return torch.cat(parts, dim=-2), state
