"""Where a model keeps its attention, read from its modules."""

from __future__ import annotations

import re

from torch import nn

__all__ = ["attention_modules", "is_compiled", "is_encoder_decoder", "is_linear", "named", "template"]

NAME = re.compile(r"(attention|attn|mha)(block|module|subsample)?\d*$", re.IGNORECASE)
LINEAR = re.compile(r"(linear|lightning)\w*(attention|attn)", re.IGNORECASE)


def named(model: nn.Module) -> dict[nn.Module, str]:
    """Every module and its path, without what ``torch.compile`` adds; the model itself goes by its class."""
    found = {}
    for path, module in model.named_modules():
        parts = [part for part in path.split(".") if part not in ("", "_orig_mod")]
        found[module] = ".".join(parts) or type(module).__name__
    return found


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The attention modules by path, in the order of the model.

    An attention module says so at the end of its class name, contains no other one, and holds at least two matrices:
    its projections. That tells ``BertSelfAttention`` from the ``BertAttention`` around it and from a norm or a dropout.
    """
    candidates = {module for module in model.modules() if NAME.search(type(module).__name__) and _projects(module)}
    paths = named(model)
    return {path: module for module, path in paths.items() if module in candidates and not _holds(module, candidates)}


def is_linear(module: nn.Module) -> bool:
    """Whether the attention has no softmax, by its class name."""
    return LINEAR.search(type(module).__name__) is not None


def is_compiled(model: nn.Module) -> bool:
    """Whether ``torch.compile`` made the model or a part of it, or ``.compile()`` changed one.

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
    """Whether the configuration, or else the paths of the attention modules, name an encoder and a decoder."""
    said = getattr(getattr(model, "config", None), "is_encoder_decoder", None)
    if said is not None:
        return bool(said)
    return any("decoder" in path for path in paths) and any(re.search(r"\bencoder", path) for path in paths)


def template(path: str) -> str:
    """The path without its numbers: what the layers of one stack share.

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
