"""Accumulators as named tensors and plain values, and back: what a file can hold without running code."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from massieu.accumulators.moments import HashSample, LogHistogram, Mean, Moments
from massieu.accumulators.regression import Regression
from massieu.accumulators.streams import Extremes, Means, Shares
from massieu.corpus.bad_records import BadRecord, BadRecords
from massieu.corpus.document_counts import DocumentCounts
from massieu.inspection.heads import HeadStatistics, LayerOfHeads
from massieu.inspection.layer_statistics import LayerStatistics, LayerSums
from massieu.inspection.massive import MassiveSums
from massieu.inspection.partial_result import Heard, Identity, Part
from massieu.inspection.sampled_passages import KeptPassage, PassageSample

__all__ = ["Unpackable", "pack", "unpack"]

STATE: dict[type, tuple[str, ...]] = {
    Means: ("documents", "sum", "count", "sum_squared", "sum_count", "count_squared", "shift", "_open"),
    Extremes: ("largest", "smallest"),
    Shares: ("counts",),
    LayerOfHeads: ("name", "means", "extremes", "shares", "keys", "empty", "broken", "rows", "notes", "by_passage"),
    HeadStatistics: ("sampled", "by_passage", "layers"),
    Mean: ("totals", "counts"),
    Moments: ("count", "mean", "other_mean", "rows", "other_rows", "_scatter"),
    LogHistogram: ("counts",),
    HashSample: ("size", "hashes", "rows"),
    Regression: ("inputs", "cross", "spread"),
    LayerStatistics: (
        *("dim", "width", "tokens", "broken", "ratios", "means", "clouds", "aliases", "sample", "fits", "shuffled"),
        "massive",
    ),
    MassiveSums: ("count", "first", "largest", "clouds", "fits", "sample", "means"),
    LayerSums: ("statistics", "notes"),
    KeptPassage: ("key", "document", "inputs", "content"),
    PassageSample: ("count", "_kept"),
    DocumentCounts: ("documents", "blank", "passages", "tokens", "counted", "long", "unknown", "digest", "sketch"),
    Heard: ("expected", "heard", "ran", "linear", "notes"),
    Identity: ("model", "tokenizer", "options", "schema", "name", "revision", "dtype"),
    BadRecord: ("name", "position", "place", "reason", "sentence"),
    BadRecords: ("counts", "first"),
    Part: (
        *("identity", "counts", "heard", "heads", "layers", "layers_by_passage", "passages", "faults"),
        *("sources", "versions"),
    ),
}
"""What each class consists of; nothing else can be in a file."""

CLASSES = {kind.__name__: kind for kind in STATE}
MOST = 1 << 26
"""Entries of the largest tensor that is kept without its zeros; a file that claims more is damaged."""

LONG = 1024
"""From this length on, tensors are kept without the zeros at both ends of their last axis: histograms are wide."""


class Unpackable(TypeError):  # noqa: N818  # said of the value, not a mistake in itself
    """Something that no file can hold."""


def pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON has it; its tensors are put among the others, by their paths.

    An object of JSON has one key, which says what is in it: a tensor, a container, or a class of :data:`STATE`.

    Example:
        >>> tensors = {}
        >>> packed = pack({"mean": torch.ones(2), "of": ("a", 1)}, "part", tensors)
        >>> list(tensors), unpack(packed, {**tensors})["of"]
        (['part.mean'], ('a', 1))
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        x, how = _smaller(value.detach().cpu())
        tensors[path] = x.clone() if x.data_ptr() == value.data_ptr() and _occurs(x, tensors) else x
        return {"tensor": [path, *how]}
    kind = type(value)
    if kind in STATE:
        return {kind.__name__: {name: pack(getattr(value, name), f"{path}.{name}", tensors) for name in STATE[kind]}}
    if isinstance(value, Mapping):
        pairs = ((key, own, f"{path}.{_label(key)}") for key, own in value.items())
        return {"dict": [[pack(key, place, tensors), pack(own, place, tensors)] for key, own, place in pairs]}
    if isinstance(value, (list, tuple, set)):
        name = "set" if isinstance(value, set) else "tuple" if isinstance(value, tuple) else "list"
        every = sorted(value) if isinstance(value, set) else value
        return {name: [pack(own, f"{path}.{number}", tensors) for number, own in enumerate(every)]}
    raise Unpackable(f"a part can hold tensors and plain values, got {kind.__name__} in {path}; leave it out")


def unpack(packed: Any, tensors: MutableMapping[str, Tensor]) -> Any:
    """What :func:`pack` was given; tensors are taken out of the mapping, since each belongs to one field."""
    if not isinstance(packed, dict):
        return packed
    ((name, own),) = packed.items()
    if name == "tensor":
        return _larger(tensors.pop(own[0]), *own[1:])
    if name == "dict":
        found = {unpack(key, tensors): unpack(value, tensors) for key, value in own}
        if len(found) < len(own):
            raise ValueError("a name that occurs twice")
        return found
    if name in CONTAINERS:
        return CONTAINERS[name](unpack(value, tensors) for value in own)
    kind, values = CLASSES[name], {field: unpack(value, tensors) for field, value in own.items()}
    if values.keys() != {*STATE[kind]}:
        raise ValueError(f"a field of {name}")
    if issubclass(kind, tuple):
        return kind(**values)
    made = kind.__new__(kind)
    for field in STATE[kind]:
        object.__setattr__(made, field, values[field])
    return made


CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set}


def _label(key: Any) -> str:
    return "-".join(str(each) for each in key) if isinstance(key, tuple) else str(key)


def _smaller(x: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
    """What a file keeps of a tensor, and how to undo it."""
    if x.dim() == 2 and 1 < len(x) == x.shape[1] and torch.equal(x, x.mT):
        rows, columns = torch.triu_indices(len(x), len(x))
        return x[rows, columns], ("symmetric", len(x))
    if x.dim() and x.shape[-1] >= LONG and x.is_floating_point():
        filled = (x != 0).reshape(-1, x.shape[-1]).any(0).nonzero()[:, 0]
        begin, end = (int(filled[0]), int(filled[-1]) + 1) if len(filled) else (0, 0)
        return x[..., begin:end].clone(memory_format=torch.contiguous_format), ("padded", x.shape[-1], begin)
    if x.dim() == 2 and x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes:
        return x, ()  # a vector may be the same one as another
    return x.clone(memory_format=torch.contiguous_format), ()


def _occurs(x: Tensor, tensors: Mapping[str, Tensor]) -> bool:
    """Whether one of the tensors is kept in the same memory: few rows are kept once for several moments."""
    return any(x.data_ptr() == other.data_ptr() for other in tensors.values())


def _larger(x: Tensor, how: str = "", length: int = 0, begin: int = 0) -> Tensor:
    """What :func:`_smaller` was given; sizes are checked first, since a file may claim any."""
    if type(length) is not int or type(begin) is not int:
        raise ValueError("the size of a tensor")
    if how == "symmetric":
        if x.shape != (length * (length + 1) // 2,):
            raise ValueError("a symmetric tensor")
        full = x.new_zeros(length, length)
        rows, columns = torch.triu_indices(length, length)
        full[rows, columns] = full[columns, rows] = x
        return full
    if how == "padded":
        if not 0 <= begin <= begin + x.shape[-1] <= length or math.prod(x.shape[:-1]) * length > MOST:
            raise ValueError("a padded tensor")
        full = x.new_zeros(*x.shape[:-1], length)
        full[..., begin : begin + x.shape[-1]] = x
        return full
    if how:
        raise ValueError(f"a tensor kept as {how}")
    return x
