"""Attention calls made by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from massieu.taps import AttentionCall


def call_of(query: Tensor | None, key: Tensor | None, **options) -> AttentionCall:
    """A call of the first decoder layer with these queries and keys, and nothing else unless it is given."""
    defaults = {"log_weight": None, "scale": 1.0, "causal": False, "window": None, "sink": None, "softcap": None}
    rest = {"scores": None, "output": None, "present": None, "module": torch.nn.Identity(), "value": None}
    place = {"name": "a", "number": 0, "layer": 0, "stack": "decoder"}
    return AttentionCall(query=query, key=key, **{**place, **defaults, **rest, **options})
