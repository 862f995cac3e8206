"""Files of partial results and checkpoints: named tensors and a JSON header in the safetensors format.

They are written atomically. Each carries a digest of its tensors and its header, which every reader compares.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from massieu.accumulators.serialization import pack, unpack
from massieu.checks import UserError
from massieu.engine.checkpoints import draft_of
from massieu.inspection.partial_result import SCHEMA, Identity, PartialResult
from massieu.inspection.result import PARTIAL, PARTIAL_BYTES
from massieu.inspection.validation import Unsound, check_partial, is_finite
from massieu.outputs.folders import check_digest, in_manifest

__all__ = [
    "load_checkpoint",
    "load_partial",
    "partial_from_bytes",
    "partial_to_bytes",
    "save_checkpoint",
    "save_partial",
]

DONE = "checkpoint.done"
MOST_SHARDS = 1 << 31
UNREADABLE = (LookupError, ValueError, TypeError, AttributeError, RuntimeError, ArithmeticError, MemoryError)
"""Errors that a header with damaged values can raise."""


def save_partial(partial: PartialResult, path: str | Path, *, most: float = math.inf) -> Path | None:
    """Write a partial result atomically into one file; None instead of its path if it exceeds ``most`` bytes.

    The metadata of the safetensors file has two entries: ``massieu``, JSON with ``schema``, ``finite`` and
    ``partial``, and ``digest``, which :func:`digest_of` computes.
    """
    tensors: dict[str, Tensor] = {}
    metadata = _metadata(partial, {}, tensors)
    size = sum(map(len, metadata.values())) + sum(x.nbytes for x in tensors.values())
    return _write(Path(path), metadata, tensors) if size <= most else None


def load_partial(path: str | Path) -> PartialResult:
    """Read a partial result from its file, or from the folder of an inspection."""
    place = check_digest(_file(path))
    without = not place.exists() and (place.parent / "inspection.json").exists()
    if place.name == PARTIAL and (without or in_manifest(place) is False):
        raise UserError(
            f"{place.parent} holds a run without the partial result that merge needs, which is written up to"
            f" {PARTIAL_BYTES >> 20} MB; inspect again with --partial"
        )
    partial, header, _ = _load(place)
    if "corpus" in header:
        raise UserError(
            f"{place} must be the partial result of a finished run, and it is the checkpoint of an unfinished one;"
            " finish it with --resume"
        )
    return partial


def partial_to_bytes(partial: PartialResult) -> bytes:
    """Content of the file of a partial result, to be sent to another process."""
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    return save(tensors, metadata=_metadata(partial, {}, tensors))


def partial_from_bytes(data: bytes) -> PartialResult:
    """Inverse of :func:`partial_to_bytes`."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        length = int.from_bytes(data[:8], "little")  # the format begins with the size of its JSON
        metadata, tensors = json.loads(data[8 : 8 + length])["__metadata__"], load(data)
    except (*UNREADABLE, SafetensorError) as error:
        raise UserError(f"the partial result is damaged ({_short(error)}); send it again") from None
    return _partial(metadata, tensors, "the partial result")[0]


def digest_of(header: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of a header and of names, dtypes, shapes and bytes of tensors, in the order of their names.

    Example:
        >>> one, other = torch.zeros(2), torch.zeros(1, 2)
        >>> digest_of("{}", {"x": one}) == digest_of("{}", {"x": other})
        False
    """
    digest = hashlib.sha256(f"{len(header.encode())} {header}".encode())
    for name in sorted(tensors):
        x = tensors[name].contiguous()
        digest.update(json.dumps([name, str(x.dtype), list(x.shape)]).encode())
        digest.update(x.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save_checkpoint(path: str | Path, partial: PartialResult, done: Collection[int], corpus: str) -> Path:
    """Write a checkpoint atomically.

    Args:
        path: the file.
        partial: merged result of the shards that are done.
        done: numbers of these shards.
        corpus: fingerprint of all shards, so that the numbers mean the same ones later.
    """
    numbers = torch.tensor(sorted(done), dtype=torch.int64)
    # Ranges instead of numbers: a run of a million shards has few gaps.
    begins = torch.cat([numbers[:1], numbers[1:][numbers.diff() > 1]])
    ends = torch.cat([numbers[:-1][numbers.diff() > 1], numbers[-1:]]) + 1
    tensors = {DONE: torch.stack([begins, ends], 1)}
    return _write(Path(path), _metadata(partial, {"corpus": corpus}, tensors), tensors)


def load_checkpoint(
    path: str | Path, identity: Identity, corpus: str, shards: int = MOST_SHARDS
) -> tuple[PartialResult, set[int]]:
    """Read a checkpoint: the merged result of the shards that are done, and their numbers.

    Args:
        path: the file.
        identity: of the run that goes on; another model or other options are refused.
        corpus: fingerprint of all shards; another one is refused.
        shards: number of all shards.
    """
    partial, header, tensors = _load(Path(path))
    if "corpus" not in header or DONE not in tensors:
        raise UserError(
            f"{path} must be the checkpoint of a run, and it is a finished partial result; name another file"
        )
    partial.identity = partial.identity_like(identity)
    difference = partial.identity.difference(identity)
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
    return partial, _numbers(tensors[DONE], shards, path)


def _numbers(ranges: Tensor, shards: int, path: str | Path) -> set[int]:
    """Numbers of the shards that are done, from half-open ranges in ascending order."""
    flat = ranges.flatten()
    sound = ranges.dtype == torch.int64 and ranges.dim() == 2 and ranges.shape[1:] == (2,)
    inside = sound and (not len(flat) or bool((flat >= 0).all() & (flat <= shards).all() & (flat.diff() > 0).all()))
    if not inside:
        raise UserError(f"{path} is damaged ({DONE} is not as expected); remove it to begin again")
    return {number for begin, end in ranges.tolist() for number in range(begin, end)}


def _file(path: str | Path) -> Path:
    place = Path(path)
    return place / PARTIAL if place.is_dir() else place


def _metadata(partial: PartialResult, header: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, str]:
    """The metadata of a file; its tensors are put among the others."""
    packed = pack(partial, "partial", tensors)
    content = {"schema": SCHEMA, **header, "finite": is_finite(tensors), "partial": packed}
    text = json.dumps(content, separators=(",", ":"))
    return {"massieu": text, "digest": digest_of(text, tensors)}


def _write(path: Path, metadata: dict[str, str], tensors: dict[str, Tensor]) -> Path:
    from safetensors.torch import save_file

    temporary = draft_of(path)
    try:
        temporary.touch()
        mode = temporary.stat().st_mode & 0o777  # usual permissions of new files; safetensors gives none to others
        save_file(tensors, temporary, metadata=metadata)
        temporary.chmod(mode)
        with open(temporary, "r+b") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


def _load(path: Path) -> tuple[PartialResult, dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    except OSError as error:
        raise UserError(
            f"{path} must be a partial result that massieu inspect --out wrote, and it cannot be read"
            f" ({error.strerror or error}); name the folder of such a run"
        ) from None
    except SafetensorError as error:
        raise UserError(f"{path} is damaged ({_short(error)}); write it again") from None
    return (*_partial(metadata, tensors, path), tensors)


def _partial(
    metadata: dict[str, str], tensors: dict[str, Tensor], path: str | Path
) -> tuple[PartialResult, dict[str, Any]]:
    """Partial result of a file and its header, after checks of its digest and fields."""
    text = metadata.get("massieu", "{}")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = {}
    header = header if isinstance(header, dict) else {}
    if header.get("schema") != SCHEMA:
        got = str(header.get("schema"))[:40]
        raise UserError(
            f"{path} must have the schema {SCHEMA}, got {got} of another version; inspect again with this one"
        )
    if metadata.get("digest") != digest_of(text, tensors):
        raise UserError(f"{path} is damaged (its content does not have its digest); copy or write it again")
    try:
        left = {name: x for name, x in tensors.items() if name != DONE}
        partial = unpack(header["partial"], left)
        check_partial(partial, finite=header["finite"] is not False)
        if left:
            raise Unsound(f"{min(left)[:40]} belongs to nothing")
    except Unsound as error:
        raise UserError(f"{path} is damaged ({_short(error)}); write it again") from None
    except UNREADABLE as error:
        why = _short(error)
        raise UserError(f"{path} is damaged ({why} is missing or not as expected); write it again") from None
    return partial, header


def _short(error: BaseException) -> str:
    """Message of an error on one line."""
    return " ".join(str(error).split())[:120]
