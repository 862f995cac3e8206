"""Attention weights rebuilt from observed calls, in float64 and with the whole matrix; and the model's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from massieu.taps import AttentionCall


def weights(call: AttentionCall) -> Tensor:
    """``(batch, heads, queries, atoms)``; a row without atoms is zero."""
    scores = _scores(call) if call.scores is None else call.scores.double()
    if call.sink is not None:
        sink = call.sink.double()[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    found = torch.softmax(scores, -1).nan_to_num(0.0)
    return found[..., :-1] if call.sink is not None else found


def _scores(call: AttentionCall) -> Tensor:
    key = call.key.double().repeat_interleave(call.query.shape[1] // call.key.shape[1], 1)
    scores = call.query.double() @ key.mT * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    queries, atoms = scores.shape[-2:]
    distance = torch.arange(queries)[:, None] + atoms - queries - torch.arange(atoms)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if call.causal:
        hidden |= distance < 0
    if call.window is not None:
        hidden |= distance.abs() >= call.window
    if call.log_weight is not None and call.log_weight.dtype == torch.bool:
        scores = scores.masked_fill(~call.log_weight, -torch.inf)
    elif call.log_weight is not None:
        scores = scores + call.log_weight.double()
    return scores.masked_fill(hidden, -torch.inf)


def output(call: AttentionCall) -> Tensor:
    """Weights times values."""
    return weights(call) @ call.value.double().repeat_interleave(call.query.shape[1] // call.value.shape[1], 1)


def rows(x: Tensor, call: AttentionCall) -> Tensor:
    """The rows of real tokens, ``(rows, heads, ...)``."""
    x = x.transpose(1, 2)
    return x.flatten(0, 1) if call.present is None else x[call.present]


def own_weights(model: nn.Module, inputs: dict[str, Any]) -> dict[tuple[str, int], Tensor]:
    """What the model itself says its weights are, by stack and layer; it must have been built as eager.

    The stack is "" in models that have only one. Swin models tell only the last layer of each stage.
    """
    with torch.no_grad():
        result = model(**inputs, output_attentions=True)
    found = {}
    names = {"attentions": "", "encoder_attentions": "encoder", "decoder_attentions": "decoder"}
    for field, stack in {**names, "cross_attentions": "cross"}.items():
        for place, own in enumerate(result.get(field) or ()):
            depths = getattr(model.config, "depths", None)
            layer = place if depths is None else sum(depths[: place + 1]) - 1
            found[stack, layer] = own
    return found


def prediction(result: Any) -> Tensor:
    """The tensor that a forward call is about."""
    for field in ("logits", "last_hidden_state"):
        if hasattr(result, field):
            return getattr(result, field)
    return result[0] if isinstance(result, tuple) else result
