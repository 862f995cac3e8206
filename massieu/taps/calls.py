"""Attention calls: queries, keys, values and log weights in one form for every model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["AttentionCall", "Scores"]


@dataclass(frozen=True)
class Scores:
    r"""Tensors and options that determine the weights of an attention call; attributes of :class:`AttentionCall`."""

    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    log_weight: Tensor | None = None
    scale: float = 1.0
    causal: bool = False
    window: int | None = None
    sink: Tensor | None = None
    softcap: float | None = None
    scores: Tensor | None = None
    output: Tensor | None = None
    present: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``(batch, heads, queries, keys)``."""
        if self.query is None or self.key is None:
            batch, heads, queries, keys = self._tensor.shape
            return batch, heads, queries, keys
        return self.query.shape[0], self.query.shape[1], self.query.shape[2], self.key.shape[2]

    @property
    def device(self) -> torch.device:
        """Device of the call."""
        return self._tensor.device

    @property
    def _tensor(self) -> Tensor:
        tensor = self.scores if self.query is None else self.query
        assert tensor is not None
        return tensor


@dataclass(frozen=True, kw_only=True)
class AttentionCall(Scores):
    r"""One attention call observed inside a running model.

    .. math:: p_{ij} \propto e^{s_{ij} + \log h_{ij}}, \qquad
              s_{ij} = \mathrm{scale} \, \langle q_i, k_j \rangle

    and with a softcap c the score is :math:`c \tanh(s_{ij} / c)`. Tensors are the model's own: they may be part of its
    graph (detach what you keep) and must not be changed in place. Weights are those before dropout.

    Attributes:
        name: path of the attention module in the model, such as ``"encoder.layer.0.attention.self"``.
        number: number of earlier calls of this module in the forward pass.
        layer: number of ``(name, number)`` among those of the same stack, the same in every pass.
        stack: "encoder" (tokens see each other), "decoder" (tokens see earlier ones), "cross" (tokens see others).
        query: ``(batch, heads, queries, dim)``, rotary positions included.
        key: ``(batch, key_heads, keys, dim)``; ``key_heads`` divides ``heads``.
        value: ``(batch, key_heads, keys, value_dim)``.
        log_weight: boolean (True = visible) or floating :math:`\log h`, minus infinity for hidden keys;
            broadcasts to ``(batch, heads, queries, keys)``. None if causality and the window say everything.
        scale: factor of the inner products.
        causal: query ``i`` sees the keys up to ``i + keys - queries``, as in :func:`massieu.attend`.
        window: a query sees only keys less than this many positions away.
        sink: ``(heads,)``, log weight of one more key at the origin with value zero.
        softcap: bound of the scores, or None.
        scores: ``(batch, heads, queries, keys)``, masks included, only where queries and keys cannot be observed.
        output: ``(batch, heads, queries, value_dim)``, output of the model's own function; None for ``scores``.
        present: ``(batch, queries)``, False for padded tokens or, if these are unknown, for queries that see no key.
            None without padding.
        module: the attention module.
    """

    name: str
    number: int
    layer: int
    stack: str
    module: nn.Module
