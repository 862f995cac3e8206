"""Weight files of a saved model: safetensors inside its folder, and no file that could run code."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from massieu.checks import UserError

__all__ = ["INDEX", "SINGLE", "StoredWeights", "check_shard_names", "read_config", "stored_tensors"]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
RANKS = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
COUNTS = ("layer", "head", "expert", "depth", "label")
"""Parts of the names of configuration entries with numbers of modules or labels."""

MOST = 1000
"""Modules of a kind allowed for any number of tensors: some models share weights."""


class StoredWeights(NamedTuple):
    """Contents of the weight files of a model.

    Attributes:
        config: content of config.json.
        sizes: number of elements of every tensor by its name.
    """

    config: dict[str, Any]
    sizes: dict[str, int]


def stored_tensors(name: str, folder: Path) -> StoredWeights:
    """Check a model folder before anything is loaded from it, and return the contents of its weight files.

    Args:
        name: name of the model in messages.
        folder: a folder with ``config.json``.
    """
    files = _listed(name, folder)
    _check_kind(name, files)
    config = read_config(name, folder)
    sizes: dict[str, int] = {}
    for file in _weight_names(name, folder, files, config):
        for tensor, size in _sizes(name, _inside(name, folder, file)).items():
            if tensor in sizes:
                raise UserError(f"{name} holds the tensor {tensor} in two files, {file} is one; remove the wrong one")
            sizes[tensor] = size
    _check_counts(name, config, sizes)
    return StoredWeights(config, sizes)


def read_config(name: str, folder: Path) -> dict[str, Any]:
    """Read ``config.json`` of a folder."""
    content = _json(name, folder / "config.json")
    if not isinstance(content.get("model_type", ""), str):
        raise UserError(f"model_type in the config.json of {name} must be a name; save the model there again")
    return content


def check_shard_names(name: str, index: Path) -> list[str]:
    """Return the names of the shards in an index; each must be a safetensors file beside it."""
    found = _json(name, index).get("weight_map")
    shards = list(found.values()) if isinstance(found, dict) else []
    if not shards or not all(isinstance(shard, str) for shard in shards):
        raise UserError(
            f"{index.name} of {name} must map tensors to files under weight_map; save the model there again"
        )
    for shard in sorted(set(shards)):
        _check_name(name, shard, index.name)
    return sorted(set(shards))


def _check_name(name: str, file: str, where: str) -> None:
    shown = file if file.isprintable() else repr(file)
    if not file.endswith(".safetensors"):
        raise UserError(
            f"{where} of {name} names {shown} as weights, which must end with .safetensors, since a pickle may run code"
            " when it is read; convert it with save_pretrained, which writes safetensors"
        )
    if file != Path(file).name or "\\" in file or "\0" in file:
        raise UserError(
            f"{where} of {name} names {shown} as weights, which must be a file in the same folder; move it there"
        )


def _weight_names(name: str, folder: Path, files: set[str], config: dict[str, Any]) -> list[str]:
    """Weight files that transformers would read, in its order of search."""
    for chosen in [*_explicit(config), SINGLE, INDEX]:
        if not isinstance(chosen, str):
            raise UserError(f"transformers_weights in the config.json of {name} must be a name; leave it out")
        if not chosen.endswith(".safetensors.index.json"):
            _check_name(name, chosen, "config.json")
            if chosen in files:
                return [chosen]
        elif chosen in files:
            return check_shard_names(name, folder / chosen)
    pickles = sorted(file for file in files if file.endswith(PICKLES))
    if pickles:
        raise UserError(
            f"{name} has its weights only as a pickle ({pickles[0]}), which may run code when it is read;"
            " convert it with save_pretrained, which writes safetensors"
        )
    raise UserError(f"{name} must hold weights in safetensors files, and there are none; save the model there again")


def _explicit(config: Any) -> Iterator[Any]:
    """Weight files that a configuration names, on any level."""
    for where, value in _entries(config):
        if where == "transformers_weights" and value is not None:
            yield value


def _entries(config: Any) -> Iterator[tuple[str, Any]]:
    """Entries of a configuration with those of the configurations in it."""
    waiting = [config]
    while waiting:
        for where, value in waiting.pop().items():
            yield where, value
            if isinstance(value, dict):
                waiting.append(value)


def _check_kind(name: str, files: set[str]) -> None:
    """Raise for adapters and for checkpoints of several processes."""
    if "adapter_config.json" in files:
        raise UserError(
            f"{name} is an adapter or carries one (adapter_config.json), which changes the weights of another model;"
            " merge the two with merge_and_unload of the package peft, and save the result"
        )
    ranks = sorted(file for file in files if RANKS.fullmatch(file))
    if ranks:
        raise UserError(
            f"{name} holds the weights of several processes ({ranks[0]}); load it where it was trained,"
            " and save it whole with save_pretrained"
        )


def _inside(name: str, folder: Path, file: str) -> Path:
    """Path of a file, which must lie in the folder or in the blobs of a Hugging Face cache."""
    path = folder / file
    try:
        target, home = path.resolve(strict=True), folder.resolve()
    except (OSError, RuntimeError) as error:
        raise UserError(f"{name} names the weight file {file}, which cannot be read ({_why(error)})") from None
    allowed = [home, *([home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [])]
    if not any(place in target.parents for place in allowed):
        raise UserError(f"in {name}, {file} is a link to {target}, outside of the folder; copy that file into it")
    return path


def _sizes(name: str, path: Path) -> dict[str, int]:
    """Number of elements of each tensor in a safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {key: math.prod(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118  # no mapping
    except SafetensorError as error:
        raise UserError(
            f"the weights of {name} cannot be read ({path.name}: {_why(error)}); the file is damaged or no safetensors"
            " file, fetch or save it again"
        ) from None
    except OSError as error:
        raise UserError(f"the weights of {name} cannot be read ({path.name}: {_why(error)})") from None


def _check_counts(name: str, config: dict[str, Any], sizes: Mapping[str, int]) -> None:
    """Raise for a configuration with impossibly many modules."""
    most = max(MOST, len(sizes))
    for where, value in _entries(config):
        if isinstance(value, int) and value > most and any(word in where for word in COUNTS):
            raise UserError(
                f"the config.json of {name} asks for {where} = {value:.4g}, but the files hold {len(sizes):,} tensors;"
                " save the model there again"
            )


def _json(name: str, path: Path) -> dict[str, Any]:
    """An object from a JSON file that came with a model."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path.name} of {name} cannot be read ({_why(error)})") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path.name} of {name} must be JSON, and it is not; save the model there again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path.name} of {name} must hold one JSON object; save the model there again")
    return content


def _listed(name: str, folder: Path) -> set[str]:
    try:
        return {file.name for file in folder.iterdir()}
    except OSError as error:
        raise UserError(f"the folder {name} cannot be read ({_why(error)})") from None


def _why(error: BaseException) -> str:
    return " ".join(str(getattr(error, "strerror", None) or error).split())[:120]
