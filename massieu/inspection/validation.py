"""Check that a partial result from a file could have been made by reading: kinds, dtypes, shapes and signs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from types import UnionType
from typing import Any, get_origin, get_type_hints

import torch
from torch import Tensor

from massieu.accumulators.moments import HashSample, Moments, document_hash
from massieu.accumulators.regression import Regression
from massieu.accumulators.serialization import FIELDS
from massieu.accumulators.streams import Extremes, Means
from massieu.corpus.bad_records import BadRecord, BadRecords
from massieu.corpus.document_counts import MODULUS, SKETCHED, DocumentCounts
from massieu.inspection.heads import HeadStatistics, LayerOfHeads
from massieu.inspection.layer_statistics import LayerStatistics, LayerSums
from massieu.inspection.massive import MassiveSums
from massieu.inspection.partial_result import Identity, PartialResult
from massieu.inspection.sampled_passages import KeptPassage, PassageSample
from massieu.taps.coverage import Coverage

__all__ = ["Unsound", "check_partial", "is_finite"]

WIDEST = 1 << 20
"""The largest width of a residual stream that a file may claim: templates of that width are made."""

ELEMENTS: dict[tuple[type, str], type] = {
    (HeadStatistics, "layers"): LayerOfHeads,
    (LayerOfHeads, "notes"): str,
    (LayerSums, "statistics"): LayerStatistics,
    (LayerSums, "notes"): str,
    (LayerStatistics, "clouds"): Moments,
    (LayerStatistics, "aliases"): str,
    (MassiveSums, "clouds"): Moments,
    (PassageSample, "_kept"): KeptPassage,
    (KeptPassage, "content"): Tensor,
    (DocumentCounts, "sketch"): int,
    **{(Coverage, name): str for name in FIELDS[Coverage]},
    (BadRecords, "counts"): int,
    (BadRecords, "first"): BadRecord,
    (PartialResult, "sources"): str,
    (PartialResult, "versions"): str,
}
"""Kinds of the elements of containers that an empty partial result leaves open."""

FIXED = {(HeadStatistics, "sampled"), (PassageSample, "count"), (HashSample, "size"), (LayerStatistics, "width")}
"""Numbers that follow from the options or from other fields."""

NOT_NEGATIVE = {"count", "counts", "count_squared", "hashes", "keys", "empty", "broken"}
"""Tensors without negative entries, by the names of their fields."""

OPTIONAL = {(PartialResult, "layers_by_passage")}
"""Fields that an empty partial result has and another may lack."""

ANY_VALUE = {*((KeptPassage, name) for name in ("key", "document", "inputs")), (Identity, "options")}
"""Fields that hold whatever the caller of the model has passed."""


class Unsound(ValueError):  # noqa: N818  # said of the value, not a mistake in itself
    """A field that no reading could have made; the message names it, as the beginning of a sentence."""


def check_partial(partial: Any, *, finite: bool = True) -> None:
    """Raise :class:`Unsound` for the first field that no reading could have made.

    An empty partial result of the same options, and accumulators as new ones of the same size, say which dtypes,
    shapes and names there must be; so a new field of an accumulator is checked without a line here.

    Args:
        part: the partial result.
        finite: whether sums must be finite: they are, unless the model gave numbers that are not.
    """
    _expect(type(partial) is PartialResult, "it holds no partial result")
    _expect(type(partial.identity) is Identity, "identity is not as expected")
    for value in (partial.identity, partial):
        _check_hints(value)
    like = PartialResult.empty(partial.identity)
    _expect((partial.layers is None) == (like.layers is None), "layers is not as expected")
    _Check(finite).compare(partial, like, "")
    if partial.identity.options.get("reads") == "text":
        for passage in partial.passages.kept:
            _check_words(passage)


def is_finite(tensors: Mapping[str, Tensor]) -> bool:
    """Return True if all sums of a packed partial result are finite; extremes of no rows and passages need not be.

    Example:
        >>> is_finite({"heads.sum": torch.ones(2), "heads.largest": torch.tensor(-torch.inf)})
        True
    """
    free = (".largest", ".smallest")
    sums = (x for name, x in tensors.items() if not name.endswith(free) and ".passages." not in name)
    return all(bool(x.isfinite().all()) for x in sums)


class _Check:
    """Compares values with templates, field by field."""

    def __init__(self, finite: bool) -> None:
        self.finite = finite

    def compare(self, value: Any, like: Any, path: str) -> None:
        """Compare a value with a template of its kind."""
        kind = type(like)
        _expect(type(value) is kind, f"{path} is not as expected")
        if kind in FIELDS:
            like = TEMPLATES[kind](value, like) if kind in TEMPLATES else like
            for name in FIELDS[kind]:
                self._field(value, like, name, f"{path}.{name}" if path else name)
            if kind in RULES:
                RULES[kind](value, path)
        elif kind is dict and like:
            _expect(value.keys() == like.keys(), f"{path} has other names than expected")
            for key, own in like.items():
                self.compare(value[key], own, f"{path}.{key}")
        elif kind is tuple:
            _expect(len(value) == len(like), f"{path} is not as expected")
            for number, own in enumerate(like):
                self.compare(value[number], own, f"{path}.{number}")
        else:
            _check_plain(value, path)

    def _field(self, owner: Any, like: Any, name: str, path: str) -> None:
        kind, value, expected = type(owner), getattr(owner, name), getattr(like, name)
        if (kind, name) in ANY_VALUE:
            return
        if (kind, name) in ELEMENTS:
            _expect(type(value) is type(expected), f"{path} is not as expected")
            self._elements(value, ELEMENTS[kind, name], path)
        elif (kind, name) in FIXED:
            _expect(type(value) is type(expected) and value == expected, f"{path} is {value}, not {expected}")
        elif isinstance(expected, Tensor):
            _check_tensor(value, expected, path)
            _expect(name not in NOT_NEGATIVE or not bool((value < 0).any()), f"{path} has negative entries")
            self._check_finite(kind, value, path)
        elif value is None:
            _expect(expected is None or (kind, name) in OPTIONAL, f"{path} is missing")
        elif expected is None:
            pass  # its own rule says what it may be
        else:
            self.compare(value, expected, path)

    def _check_finite(self, kind: type, value: Tensor, path: str) -> None:
        if kind is Extremes:  # infinite before anything was seen
            _expect(not bool(value.isnan().any()), f"{path} is not a number")
        elif self.finite:
            _expect(bool(value.isfinite().all()), f"{path} is not finite")

    def _elements(self, value: Any, kind: type, path: str) -> None:
        """Check the elements of a container of one kind."""
        if isinstance(value, dict):
            for key in value:
                _check_plain(key, path)
        named: Iterable[Any] = value.items() if isinstance(value, dict) else enumerate(value)
        for key, own in named:
            _expect(isinstance(own, kind), f"{path}.{key} is not as expected")
            if kind in FIELDS:
                self.compare(own, own, f"{path}.{'-'.join(map(str, key)) if isinstance(key, tuple) else key}")
            elif kind is not Tensor:
                _check_plain(own, f"{path}.{key}")


def _layer_of_heads(value: LayerOfHeads, like: Any) -> LayerOfHeads:
    return LayerOfHeads.of(value.name, value.heads, value.by_passage is not None)


def _layer_statistics(value: LayerStatistics, like: Any) -> LayerStatistics:
    _expect(type(value.dim) is int and 0 < value.dim <= WIDEST, "the width of a layer is not as expected")
    return LayerStatistics(value.dim)


def _moments(value: Moments, like: Any) -> Moments:
    found, zero = Moments(0), torch.zeros(1, dtype=torch.float64)
    found.mean, found.other_mean = zero.expand(len(value.mean)), zero.expand(len(value.other_mean))
    if value.rows is None:
        found._scatter = zero.expand(len(value.mean), len(value.other_mean))
    return found


def _hash_sample(value: HashSample, like: HashSample) -> HashSample:
    found = HashSample(like.size, like.rows.shape[-1])
    found.hashes = found.hashes.new_zeros(len(value.hashes))
    found.rows = found.rows.new_zeros(1, 1).expand(len(value.hashes), like.rows.shape[-1])
    return found


TEMPLATES: dict[type, Callable[[Any, Any], Any]] = {
    LayerOfHeads: _layer_of_heads,
    LayerStatistics: _layer_statistics,
    Moments: _moments,
    HashSample: _hash_sample,
}
"""New accumulators of the same size, where the one that is compared says the size."""


def _check_means(value: Means, path: str) -> None:
    _expect(value._open == {}, f"{path} has documents without an end")
    _expect((value.shift is None) == (value.documents == 0), f"{path}.shift is not as expected")
    if value.shift is not None:
        _check_tensor(value.shift, value.sum, f"{path}.shift")
        _expect(bool(value.shift.isfinite().all() | ~value.sum.isfinite().all()), f"{path}.shift is not finite")


def _check_moments(value: Moments, path: str) -> None:
    for rows, mean in ((value.rows, value.mean), (value.other_rows, value.other_mean)):
        if rows is not None:
            fits = isinstance(rows, Tensor) and rows.shape == (value.count, len(mean)) and rows.is_floating_point()
            _expect(fits, f"{path}.rows is not as expected")
            _expect(bool(rows.isfinite().all() | ~mean.isfinite().all()), f"{path}.rows is not finite")
    _expect(value.other_rows is None or value.rows is not None, f"{path}.rows is missing")


def _check_massive(value: MassiveSums, path: str) -> None:
    _expect(value.first <= value.count, f"{path}.first exceeds the count")


def _check_layer(value: LayerStatistics, path: str) -> None:
    clouds = (*value.clouds.values(), *value.massive.clouds.values())
    widths = {len(cloud.mean) for cloud in clouds if cloud.count}
    _expect(widths <= {value.width}, f"{path}.clouds is not as expected")
    _expect({*value.aliases.values()} <= {*value.clouds, "mlp_input"}, f"{path}.aliases is not as expected")


def _check_regression(value: Regression, path: str) -> None:
    _expect(len(value.inputs.mean) == len(value.cross.mean), f"{path} is not as expected")
    _expect(value.inputs.count == value.cross.count, f"{path}.count is not as expected")


def _check_sample(value: HashSample, path: str) -> None:
    fits = len(value.hashes) <= value.size and not bool((value.hashes.diff() < 0).any())
    _expect(fits, f"{path}.hashes is not as expected")


def _check_passages(value: PassageSample, path: str) -> None:
    _expect(len(value._kept) <= value.count, f"{path} has too many passages")
    for hashed, passage in value._kept.items():
        _expect(type(passage.inputs) is dict, f"{path}.inputs is not as expected")
        _expect(hashed == document_hash(passage.key), f"{path} has a passage under another name")
        for name, own in passage.inputs.items():
            words = str(name).endswith("input_ids") and isinstance(own, Tensor)
            _expect(not words or (not own.is_floating_point() and not bool((own < 0).any())), f"{path}.{name} is odd")
        for mask in passage.content.values():
            sound = mask.dtype == torch.bool and mask.dim() == 2 and len(mask) == 1
            _expect(sound, f"{path}.content is not as expected")


def _check_words(passage: KeptPassage) -> None:
    """Check the arguments of a forward pass over a text: one row each, of the same tokens, without padding."""
    widths: dict[bool, int] = {}
    for name, own in passage.inputs.items():
        if isinstance(own, Tensor):
            width = widths.setdefault(name.startswith("decoder_"), own.shape[-1] if own.dim() else 0)
            whole = not name.endswith("attention_mask") or bool((own == 1).all())
            _expect(own.shape == (1, width) and width > 0 and whole, f"passages.{name} is not as expected")


def _check_rows(layers: Mapping[Any, Any], path: str) -> None:
    """Check the names of the rows of a table: a stack and the number of a layer."""
    for row in layers:
        sound = type(row) is tuple and [type(each) for each in row] == [str, int]
        _expect(sound, f"{path} has a row that is not as expected")


def _check_counts(value: DocumentCounts, path: str) -> None:
    _expect(value.blank <= value.documents, f"{path}.blank exceeds the documents")
    for name in ("counted", "unknown"):
        _expect(getattr(value, name) <= value.tokens, f"{path}.{name} exceeds the tokens")
    _expect(value.digest < MODULUS, f"{path}.digest is not as expected")
    ascending = all(one < other for one, other in zip(value.sketch, value.sketch[1:], strict=False))
    fits = len(value.sketch) <= min(SKETCHED, value.documents) and all(each < 1 << 64 for each in value.sketch)
    _expect(ascending and fits, f"{path}.sketch is not as expected")


def _check_identity(value: Identity, path: str) -> None:
    plain = (bool, int, str, type(None))
    sound = all(type(name) is str and type(own) in plain for name, own in value.options.items())
    _expect(sound, f"{path}.options is not as expected")


def _check_fault(value: BadRecord, path: str) -> None:
    kinds = [type(getattr(value, name)) for name in FIELDS[BadRecord]]
    _expect(kinds == [str, int, str, str, str], f"{path} is not as expected")


RULES: dict[type, Callable[[Any, str], None]] = {
    HeadStatistics: lambda value, path: _check_rows(value.layers, path),
    LayerSums: lambda value, path: _check_rows(value.statistics, path),
    Identity: _check_identity,
    Means: _check_means,
    Moments: _check_moments,
    MassiveSums: _check_massive,
    LayerStatistics: _check_layer,
    Regression: _check_regression,
    HashSample: _check_sample,
    PassageSample: _check_passages,
    DocumentCounts: _check_counts,
    BadRecord: _check_fault,
}
"""Relations between the fields of a class."""


def _check_hints(value: Any) -> None:
    """Check the fields of a dataclass against their annotations."""
    for name, kind in get_type_hints(type(value)).items():
        plain = kind if isinstance(kind, UnionType) else get_origin(kind) or kind
        _expect(isinstance(getattr(value, name), plain), f"{name} is not as expected")


def _check_tensor(value: Any, like: Tensor, path: str) -> None:
    _expect(isinstance(value, Tensor), f"{path} is not as expected")
    _expect(value.dtype == like.dtype, f"{path} has the dtype {value.dtype}, not {like.dtype}")
    _expect(value.shape == like.shape, f"{path} has the shape {tuple(value.shape)}, not {tuple(like.shape)}")


def _check_plain(value: Any, path: str) -> None:
    """Check numbers and strings, also inside of a tuple."""
    if isinstance(value, tuple):
        for own in value:
            _check_plain(own, path)
    elif isinstance(value, str):
        _expect(value.encode("utf-8", "replace").decode() == value, f"{path} is no text")
    elif isinstance(value, (int, float)):
        _expect(math.isfinite(value) and value >= 0, f"{path} is {value}")


def _expect(holds: bool, why: str) -> None:
    if not holds:
        raise Unsound(why)
