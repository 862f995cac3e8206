"""Attention modules of a model, recognized by class name and weights."""

from __future__ import annotations

import re

from torch import nn

__all__ = ["attention_modules", "is_compiled", "is_encoder_decoder", "is_linear", "named", "template"]

NAME = re.compile(r"(attention|attn|mha)(block|module|subsample)?\d*$", re.IGNORECASE)
LINEAR = re.compile(r"(linear|lightning)\w*(attention|attn)", re.IGNORECASE)


def named(model: nn.Module) -> dict[nn.Module, str]:
    """Return every module and its path, without the prefix of ``torch.compile``; the model itself by its class name."""
    found = {}
    for path, module in model.named_modules():
        parts = [part for part in path.split(".") if part not in ("", "_orig_mod")]
        found[module] = ".".join(parts) or type(module).__name__
    return found


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the attention modules by path, in the order of the model.

    The class name of an attention module ends in attention, attn or mha; it contains no other one, and holds at least
    two matrices, its projections. ``BertSelfAttention`` is one; the ``BertAttention`` around it, norms and dropouts
    are not.
    """
    candidates = {module for module in model.modules() if NAME.search(type(module).__name__) and _projects(module)}
    paths = named(model)
    return {path: module for module, path in paths.items() if module in candidates and not _holds(module, candidates)}


def is_linear(module: nn.Module) -> bool:
    """Return whether the attention has no softmax, by its class name."""
    return LINEAR.search(type(module).__name__) is not None


def is_compiled(model: nn.Module) -> bool:
    """Return whether the model or a part of it is compiled by ``torch.compile`` or ``.compile()``.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> is_compiled(model), is_compiled(torch.compile(model, backend="eager"))
        (False, True)
    """
    return any(
        type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def is_encoder_decoder(model: nn.Module, paths: list[str]) -> bool:
    """Return whether the configuration, or else the paths of the attention modules, name an encoder and a decoder."""
    declared = getattr(getattr(model, "config", None), "is_encoder_decoder", None)
    if declared is not None:
        return bool(declared)
    return any("decoder" in path for path in paths) and any(re.search(r"\bencoder", path) for path in paths)


def template(path: str) -> str:
    """Return the path without its numbers, which the layers of one stack share.

    Example:
        >>> template("encoder.layer.11.attention.self")
        'encoder.layer.*.attention.self'
    """
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _projects(module: nn.Module) -> bool:
    # Buffers too: quantized weights are no parameters.
    tensors = [*module.parameters(), *module.buffers()]
    return sum(tensor.dim() > 1 for tensor in tensors) > 1


def _holds(module: nn.Module, candidates: set[nn.Module]) -> bool:
    return any(inner is not module and inner in candidates for inner in module.modules())
