"""Checks of the weights loaded from a checkpoint: missing, unused and misshapen ones."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from massieu.checks import UserError

__all__ = ["check_weights", "unwrapping"]

WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Names inserted into those of weights by torch.compile, FSDP and checkpointing of activations."""

_WRAPPER = "|".join(re.escape(name) for name in WRAPPERS)
PREFIX = re.compile(rf"^(?:module\.|{_WRAPPER})+")
INFIX = re.compile(rf"(?<=\.)(?:{_WRAPPER})+")

HEADS = {"pooler", "cls", "classifier", "score", "qa_outputs", "predictions", "logit_scale", "logit_bias"}
"""Modules behind the last block, which do not affect an inspection, beside those that end in ``head``."""


def unwrapping(names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Return patterns of wrappers in the names of tensors, each with its replacement, and a note on them.

    Example:
        >>> unwrapping(["module.wte.weight"])[1]
        ['Names of tensors had the prefix module. of a wrapper of the training, which was removed.']
        >>> unwrapping(["wte.weight"])
        ({}, [])
    """
    names = list(names)
    mapping, found = {}, set()
    for pattern in (PREFIX, INFIX):
        matches = {match.group() for match in map(pattern.search, names) if match}
        if matches:
            mapping[pattern.pattern] = ""
            found |= matches
    if not mapping:
        return {}, []
    (twice, times), *_ = Counter(INFIX.sub("", PREFIX.sub("", name)) for name in names).most_common(1)
    if times > 1:
        raise UserError(
            f"the checkpoint holds {twice} twice, with and without the prefix of a wrapper; remove one of them"
        )
    shown = ", ".join(sorted(found)[:3])
    return mapping, [f"Names of tensors had the prefix {shown} of a wrapper of the training, which was removed."]


def check_weights(name: str, model: nn.Module, report: Mapping[str, Any]) -> list[str]:
    """Raise for weights that the checkpoint does not determine; return notes on everything else.

    Missing weights of heads, which do not affect an inspection, are set to zero.

    Args:
        name: name of the model in messages.
        model: the model.
        report: ``missing_keys``, ``unexpected_keys`` and ``mismatched_keys`` of transformers.
    """
    _check_shapes(name, report["mismatched_keys"])
    missing = _ordered(report["missing_keys"], model)
    missing = [key for key in missing if not _is_fixed(key, model)]
    needed = [key for key in missing if not _in_head(key)]
    if needed:
        raise UserError(
            f"{name} lacks {len(needed)} of the weights that its config.json asks for, the first of them {needed[0]},"
            " and random ones would be measured in their place; correct model_type or the names of the tensors,"
            " or save the model there again"
        )
    unused = sorted(report["unexpected_keys"])
    foreign = [key for key in unused if _changes_block(key, model)]
    if foreign:
        raise UserError(
            f"{name} holds weights inside of its blocks that {type(model).__name__} does not have, the first of"
            f" {len(foreign)} is {foreign[0]}; correct model_type or the options in its config.json"
        )
    _set_to_zero(model, missing)
    notes = []
    if missing:
        notes.append(
            f"The checkpoint lacks {_some(missing)}: weights behind the last block, on which no value depends."
        )
    if unused:
        notes.append(f"The checkpoint holds tensors that are not used by {type(model).__name__}: {_some(unused)}.")
    return notes


def _check_shapes(name: str, mismatched: Collection[tuple[str, Any, Any]]) -> None:
    for key, arrived, expected in sorted(mismatched, key=lambda each: str(each[0])):
        raise UserError(
            f"the weights in {name} do not fit its config.json: {key} is {tuple(arrived)}, expected {tuple(expected)},"
            f" the first of {len(mismatched)} that differ; correct config.json, or save the model there again"
        )


def _ordered(keys: Collection[str], model: nn.Module) -> list[str]:
    """Names in the order of the model."""
    known = [key for key in model.state_dict() if key in keys]
    return [*known, *sorted(set(keys) - set(known))]


def _in_head(key: str) -> bool:
    """Return whether a weight belongs to a head: a module in HEADS with no number before it."""
    for part in key.split("."):
        if part.isdecimal():
            return False
        if part in HEADS or part.endswith(("head", "heads")):
            return True
    return False


def _is_fixed(key: str, model: nn.Module) -> bool:
    """Return whether a weight is a table of sines, which the model computes again."""
    return "Sinusoid" in type(model.get_submodule(key.rpartition(".")[0])).__name__


def _changes_block(key: str, model: nn.Module) -> bool:
    """Return whether a tensor is an unknown weight of a known block."""
    key = key.removeprefix(f"{getattr(model, 'base_model_prefix', '')}.")
    path, _, own = key.rpartition(".")
    blocks = re.match(r"(.*?\d+)\.", key)
    if blocks is None or own not in ("weight", "bias"):
        return False
    modules = dict(model.named_modules())
    # Older checkpoints store masks as the "bias" of a whole attention module.
    return blocks[1] in modules and (path not in modules or not any(True for _ in modules[path].children()))


@torch.no_grad()
def _set_to_zero(model: nn.Module, keys: Iterable[str]) -> None:
    state = model.state_dict(keep_vars=True)
    for key in keys:
        if key in state and not state[key].is_meta:
            state[key].zero_()


def _some(names: list[str]) -> str:
    """The first of some names, and the number of others."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
