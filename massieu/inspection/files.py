"""Parts and checkpoints as files: named tensors and a JSON header in the safetensors format, written whole or not."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path
from types import UnionType
from typing import Any, get_origin, get_type_hints

import torch
from torch import Tensor

from massieu.checks import UserError
from massieu.inspection.packing import pack, unpack
from massieu.inspection.parts import SCHEMA, Identity, Part
from massieu.inspection.result import PART

__all__ = ["load_checkpoint", "load_part", "part_from_bytes", "part_to_bytes", "save_checkpoint", "save_part"]

DONE = "checkpoint.done"


def save_part(part: Part, path: str | Path) -> Path:
    """Write a part into one file; a reader finds the old file or the new one, never half of one.

    The header is the metadata entry ``massieu`` of the safetensors file: JSON with ``schema`` and ``part``.
    """
    return _save(Path(path), part, {}, {})


def load_part(path: str | Path) -> Part:
    """Read a part from its file, or from the folder of an inspection."""
    place = _file(path)
    part, header, _ = _load(place)
    if "corpus" in header:
        raise UserError(
            f"{place} must be the part of a finished run, and it is the checkpoint of an unfinished one;"
            " finish it with --resume"
        )
    return part


def part_to_bytes(part: Part) -> bytes:
    """What :func:`save_part` would write, to be sent elsewhere; a part that is pickled travels like this."""
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    return save(tensors, metadata={"massieu": _header(part, {}, tensors)})


def part_from_bytes(data: bytes) -> Part:
    """A part from what :func:`part_to_bytes` gave."""
    from safetensors.torch import load

    length = int.from_bytes(data[:8], "little")  # the format begins with the size of its JSON
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    return _part(metadata, load(data), "the part")[0]


def save_checkpoint(path: str | Path, part: Part, done: Collection[int], corpus: str) -> Path:
    """Write how far a run has come, at once: what was read, and which splits it was.

    Args:
        path: the file.
        part: what these splits gave.
        done: the numbers of the splits.
        corpus: fingerprint of the corpus, so that the numbers mean the same splits when they are read again.
    """
    numbers = torch.tensor(sorted(done), dtype=torch.int64)
    # Stretches instead of numbers: a run of a million splits has few gaps.
    begins = torch.cat([numbers[:1], numbers[1:][numbers.diff() > 1]])
    ends = torch.cat([numbers[:-1][numbers.diff() > 1], numbers[-1:]]) + 1
    return _save(Path(path), part, {"corpus": corpus}, {DONE: torch.stack([begins, ends], 1)})


def load_checkpoint(path: str | Path, identity: Identity, corpus: str) -> tuple[Part, set[int]]:
    """How far a run had come: what it had read, and the numbers of the splits.

    Args:
        path: the file.
        identity: of the run that goes on; another model or other options are refused.
        corpus: fingerprint of the corpus that it reads; another one is refused.
    """
    part, header, tensors = _load(Path(path))
    if "corpus" not in header or DONE not in tensors:
        raise UserError(f"{path} must be the checkpoint of a run, and it is a finished part; name another file")
    difference = part.identity.difference(identity)
    if difference is not None:
        raise UserError(
            f"the checkpoint {path} was made by another run: {difference};"
            " resume with the same model and options, or remove it to begin again"
        )
    if header["corpus"] != corpus:
        raise UserError(
            f"the checkpoint {path} was made for another text ({str(header['corpus'])[:12]}, and this one is"
            f" {corpus[:12]}); resume with the same files, column, sample,"
            " seed, limit, strictness and --split-bytes, or remove it to begin again"
        )
    return part, {number for begin, end in tensors[DONE].tolist() for number in range(begin, end)}


def _file(path: str | Path) -> Path:
    place = Path(path)
    return place / PART if place.is_dir() else place


def _header(part: Part, header: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """The header of a file; the tensors of the part are put among the others."""
    return json.dumps({"schema": SCHEMA, **header, "part": pack(part, "part", tensors)}, separators=(",", ":"))


def _save(path: Path, part: Part, header: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    from safetensors.torch import save_file

    tensors = dict(tensors)
    text = _header(part, header, tensors)
    # Always the same name: a kill leaves one such file at most, which the next write takes for its own.
    temporary = path.with_name(f".{path.name}.part")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode & 0o777  # what others may do with new files; safetensors lets nobody in
        save_file(tensors, temporary, metadata={"massieu": text})
        temporary.chmod(mode)
        with open(temporary, "r+b") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


def _load(path: Path) -> tuple[Part, dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    except OSError as error:
        raise UserError(
            f"{path} must be a part that massieu inspect --out wrote, and it cannot be read"
            f" ({error.strerror or error}); name the folder of such a run"
        ) from None
    except SafetensorError as error:
        raise UserError(f"{path} is damaged ({' '.join(str(error).split())[:80]}); write it again") from None
    return (*_part(metadata, tensors, path), tensors)


def _part(metadata: dict[str, str], tensors: dict[str, Tensor], path: str | Path) -> tuple[Part, dict[str, Any]]:
    try:
        header = json.loads(metadata.get("massieu", "{}"))
    except ValueError:
        header = {}
    header = header if isinstance(header, dict) else {}
    if header.get("schema") != SCHEMA:
        raise UserError(
            f"{path} must have the schema {SCHEMA}, got {header.get('schema')}; inspect again with this version"
        )
    try:
        part = unpack(header["part"], tensors)
    except (LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        why = " ".join(str(error).split())[:80]
        raise UserError(f"{path} is damaged ({why} is missing or not as expected); write it again") from None
    if not isinstance(part, Part):
        raise UserError(f"{path} is damaged (it holds no part); write it again")
    odd = _odd_field(part) or _odd_field(part.identity) or _odd_field(part.counts)
    if odd is not None:
        raise UserError(f"{path} is damaged ({odd} is not as expected); write it again")
    return part, header


def _odd_field(value: Any) -> str | None:
    """The first field of a dataclass that is not of its kind."""
    for name, kind in get_type_hints(type(value)).items():
        plain = kind if isinstance(kind, UnionType) else get_origin(kind) or kind
        if not isinstance(getattr(value, name), plain):
            return name
    return None
