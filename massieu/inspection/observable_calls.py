"""Attention calls that a tap observes in a model, without measurements."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from massieu.checks import UserError
from massieu.models.loading import load
from massieu.taps import AttentionCall, tap

__all__ = ["observable_calls"]


def observable_calls(name: str, **loading: Any) -> dict[str, Any]:
    """Load a model, run it on a few tokens and list its attention calls.

    Returns:
        ``model``, ``coverage`` (a sentence), ``missing`` (paths) and ``modules``: one line for each call, with its
        stack, number of heads and special features.
    """
    loaded = load(name, **loading)
    calls: list[AttentionCall] = []
    with torch.no_grad(), tap(loaded.model, calls.append) as found:
        _run(loaded.model)
    return {
        "model": f"{name} ({type(loaded.model).__name__})",
        "coverage": found.sentence,
        "missing": found.missing,
        "modules": [_line(call, found.bypassed) for call in calls],
        "notes": [*loaded.notes, *([loaded.tokenizer_fault] if loaded.tokenizer_fault else []), *found.notes],
    }


def _run(model: nn.Module) -> None:
    """Run a model once; what goes wrong in it is one sentence."""
    try:
        model(**_few_tokens(model))
    except Exception as error:  # models are anything
        text = " ".join(str(error).split())[:160]
        raise UserError(
            f"the model cannot be run on a few tokens ({type(error).__name__}: {text});"
            " massieu.taps.tap in Python takes one that needs other arguments"
        ) from error


def _few_tokens(model: nn.Module) -> dict[str, Any]:
    """Eight tokens, or one small image or sound, by what the model calls its main input."""
    config, device = model.config, next(model.parameters()).device
    dtype = next(model.parameters()).dtype
    ids = torch.arange(1, 9, device=device)[None] % max(2, int(getattr(config, "vocab_size", 9) or 9))
    wanted = getattr(model, "main_input_name", "input_ids")
    if wanted == "pixel_values":
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return {
            "pixel_values": torch.zeros(
                1, getattr(config, "num_channels", 3), height, width, device=device, dtype=dtype
            )
        }
    inputs: dict[str, Any] = {"input_ids": ids}
    if wanted == "input_features":
        length = 2 * getattr(config, "max_source_positions", 1500)
        shape = (1, getattr(config, "num_mel_bins", 80), length)
        inputs = {"input_features": torch.zeros(shape, device=device, dtype=dtype)}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids
    return inputs


def _line(call: AttentionCall, bypassed: dict[str, str]) -> str:
    heads = call.shape[1]
    words = [f"{call.stack} {call.layer}: {call.name}, {heads} heads"]
    if call.key is not None and call.key.shape[1] != heads:
        words.append(f"{call.key.shape[1]} key heads")
    if call.causal:
        words.append("causal")
    if call.window is not None:
        words.append(f"window {call.window}")
    if call.sink is not None:
        words.append("learned sink")
    if call.softcap is not None:
        words.append(f"scores capped at {call.softcap:g}")
    if call.name in bypassed:
        words.append(f"outside the attention interface, observed as {bypassed[call.name]}")
    return ", ".join(words)
