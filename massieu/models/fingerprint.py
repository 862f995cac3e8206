"""Fingerprints of models and tokenizers, the same on every machine."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["model_fingerprint", "tokenizer_fingerprint"]

ELSEWHERE = (
    "_name_or_path",
    "name_or_path",
    "_commit_hash",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "architectures",
)
"""Entries of a configuration that do not change the model: its origin, and dtypes and classes of its files."""


def model_fingerprint(model: nn.Module) -> str:
    """Return the SHA-256 of configuration, modules and weights of a model, with their dtypes.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> before = model_fingerprint(model)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> model_fingerprint(model) == before
        False
    """
    digest = hashlib.sha256()
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        found = {name: value for name, value in config.to_dict().items() if name not in ELSEWHERE}
        digest.update(json.dumps(found, sort_keys=True, default=str).encode())
    # A compiled model equals the model in it.
    model = getattr(model, "_orig_mod", model)
    digest.update("\n".join(f"{name} {type(module).__name__}" for name, module in model.named_modules()).encode())
    for name, value in sorted(model.state_dict().items()):
        if isinstance(value, Tensor):
            digest.update(f"\n{name} {value.dtype} {tuple(value.shape)} ".encode())
            plain = (_from_disk(model, name) if value.is_meta else value).detach().cpu().contiguous()
            digest.update(plain.flatten().view(torch.uint8).numpy().data if plain.numel() else b"")
    return digest.hexdigest()


def _from_disk(model: nn.Module, name: str) -> Tensor:
    """Tensor of a part that accelerate keeps on disk."""
    from accelerate.utils import align_module_device

    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    with align_module_device(module, torch.device("cpu")):
        found: Tensor = getattr(module, own).detach().clone()
    return found


def tokenizer_fingerprint(tokenizer: Any | None) -> str | None:
    """Return the SHA-256 of the rules of a tokenizer, or of its words if it is written in Python; None for none.

    Example:
        >>> tokenizer_fingerprint(None) is None
        True
    """
    if tokenizer is None:
        return None
    rules: Any = getattr(tokenizer, "backend_tokenizer", None)
    if hasattr(rules, "to_str"):
        known = json.loads(rules.to_str())
        # These two are left over from the last call.
        content: Any = {name: value for name, value in known.items() if name not in ("truncation", "padding")}
    else:
        content = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    special = sorted(getattr(tokenizer, "all_special_ids", ()))
    found = json.dumps([type(tokenizer).__name__, content, special], sort_keys=True, default=str)
    return hashlib.sha256(found.encode()).hexdigest()
