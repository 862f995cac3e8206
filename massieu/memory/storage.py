"""Storage of patterns: in memory, in a mapped file, or in a safetensors file that is read tile by tile."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from massieu.checks import UserError, check_floating

__all__ = ["Stored", "open_stored"]

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Supported floating-point types of a safetensors file."""


@dataclass(frozen=True)
class Stored:
    """Stored patterns.

    Attributes:
        shape: number of patterns, and their size.
        dtype: of the storage.
        read: function from two indices to a tensor of the patterns between them; valid until the next call.
        resident: True if all patterns lie in memory, so that they may be read at once.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]
    resident: bool


def open_stored(source: Any, name: str) -> Stored:
    """Open a tensor, an array, a ``np.memmap``, the path of a safetensors file, or a slice of one."""
    if isinstance(source, (str, os.PathLike)):
        stored = _safetensors_file(Path(source), name)
    elif isinstance(source, np.ndarray):
        stored = _tensor(_from_numpy(source, name), name, resident=not isinstance(source, np.memmap))
    elif hasattr(source, "get_shape") and hasattr(source, "get_dtype"):
        stored = _safetensors_slice(source, name)
    elif isinstance(source, Tensor):
        stored = _tensor(source, name, resident=source.stride()[-1:] == (1,))
    else:
        got = type(source).__name__
        raise UserError(
            f"{name} must be a tensor, an array, a memory map or a safetensors file, got {got};"
            " convert it with torch.as_tensor"
        )
    if not all(stored.shape):
        raise UserError(f"{name} must hold at least one vector of size one, got {stored.shape}")
    return stored


def _tensor(tensor: Tensor, name: str, *, resident: bool) -> Stored:
    check_floating(tensor, name)
    shape = _matrix(tuple(tensor.shape), name)
    return Stored(shape, tensor.dtype, lambda start, stop: tensor.detach()[start:stop], resident)


def _from_numpy(array: Any, name: str) -> Tensor:
    if array.dtype not in (np.float64, np.float32, np.float16) or not array.dtype.isnative:
        raise UserError(
            f"{name} must be an array of native float16, float32 or float64, got {array.dtype};"
            " a raw file of bfloat16 opens with torch.from_file(path, True, size, dtype=torch.bfloat16)"
        )
    if any(stride < 0 for stride in array.strides):
        raise UserError(f"{name} must run forwards in memory, got a reversed array; copy it, or reverse the answer")
    with warnings.catch_warnings():
        # Read-only maps: the tensor is only read too.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
        return torch.from_numpy(array)


def _safetensors_slice(source: Any, name: str) -> Stored:
    shape, dtype = _matrix(tuple(source.get_shape()), name), _dtype(source.get_dtype(), name)
    return Stored(shape, dtype, lambda start, stop: torch.as_tensor(source[start:stop]), False)


def _safetensors_file(path: Path, name: str) -> Stored:
    """Open a file for plain reads instead of a map: memory holds one tile only."""
    if not path.is_file():
        raise UserError(f"{name} must be an existing file, got {path}; check the path")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        # No header is longer; the length in a file of another format may be huge.
        header = file.read(length) if length < 100_000_000 else b""
    try:
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        entries = {key: (tuple(x["shape"]), x["dtype"], int(x["data_offsets"][0])) for key, x in tensors.items()}
    except (ValueError, AttributeError, TypeError, KeyError, IndexError):
        raise UserError(
            f"{name} must be a safetensors file, got {path.name} without its header; open other files with np.memmap"
        ) from None
    if len(entries) != 1:
        raise UserError(
            f"{name} must be a file of one tensor, got {', '.join(sorted(entries)) or 'none'};"
            ' pick one with safetensors.safe_open(path, "pt").get_slice(key)'
        )
    ((sizes, code, offset),) = entries.values()
    shape, dtype = _matrix(sizes, name), _dtype(code, name)
    first = 8 + length + offset
    buffer = torch.empty(0, dtype=dtype)

    def read(start: int, stop: int) -> Tensor:
        nonlocal buffer
        if len(buffer) < stop - start:
            buffer = torch.empty(stop - start, shape[1], dtype=dtype)
        tile = buffer[: stop - start]
        into: Any = tile.view(torch.uint8).numpy().reshape(-1)
        with path.open("rb") as file:
            file.seek(first + start * shape[1] * dtype.itemsize)
            count = file.readinto(into)
        if count < len(into):
            raise UserError(f"{name} must hold {shape[0]} patterns, got a file that ends earlier; write it again")
        return tile

    return Stored(shape, dtype, read, False)


def _matrix(shape: tuple[int, ...], name: str) -> tuple[int, int]:
    if len(shape) != 2:
        remedy = f"for a single pattern pass {name}[None]" if len(shape) == 1 else "flatten its leading axes into one"
        raise UserError(f"{name} must have shape (atoms, dim), got {shape}; {remedy}")
    return shape


def _dtype(code: str, name: str) -> torch.dtype:
    if code not in DTYPES:
        raise UserError(
            f"{name} must be stored as one of {', '.join(DTYPES)}, got {code}; convert it and save it again"
        )
    return DTYPES[code]
