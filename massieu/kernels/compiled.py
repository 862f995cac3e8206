"""Compiled kernel: its library, the structures that it reads, and the three functions of every kernel.

The source is in ``native/`` and independent of torch and Python: it reads tensors in place, through pointers and
strides, on as many threads as torch uses.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from massieu.kernels.blocks import masked_log_weight
from massieu.kernels.results import Best, Found, Gradients, Slope
from massieu.kernels.rows import Inputs, Plan

__all__ = ["Library", "serves"]

LIBRARY = Path(__file__).with_name("libmassieu.so")
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2}
READ = (*TYPES, torch.float16)  # the last one after conversion
PLAIN = (Tensor, torch.nn.Parameter)
NO_MEMORY = 1
MOST_KEPT = 2**12  # largest number of entries whose starts are cached for the next call
MOST_ATOMS = 2**31 - 1  # the library counts in 32 bits

Whole: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Layout: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # sizes and strides of a tensor


class _Starts(NamedTuple):
    """Offsets of entries, and the address of these offsets."""

    entries: Whole
    address: int


class _Rows(ctypes.Structure):
    """``Rows`` of native/interface.h, field by field."""

    _fields_ = [
        *((name, c_void_p) for name in ("query", "key", "value", "query_batch", "query_group")),
        *((name, c_void_p) for name in ("key_batch", "value_batch")),
        *((name, c_int64) for name in ("query_row", "key_row", "value_row")),
        *((name, c_void_p) for name in ("log_weight", "weight_batch")),
        *((name, c_int64) for name in ("weight_group", "weight_query", "weight_atom")),
        *((name, c_void_p) for name in ("lengths", "sink")),
        *((name, c_int64) for name in ("batch", "groups", "queries", "atoms", "dim", "value_dim", "causal", "window")),
        ("scale", c_double),
        *((name, c_int64) for name in ("type", "threads")),
    ]


class _Place(ctypes.Structure):
    _fields_ = [("batch", c_void_p), ("group", c_void_p), ("row", c_int64)]


class _Forward(ctypes.Structure):
    _fields_ = [
        ("rows", _Rows),
        ("output", c_void_p),
        ("output_at", _Place),
        ("statistics", c_void_p),
        ("top", c_int64),
        *((name, c_void_p) for name in ("top_score", "top_atom")),
    ]


class _Backward(ctypes.Structure):
    _fields_ = [
        ("rows", _Rows),
        *((name, c_void_p) for name in ("moments", "coefficients", "output", "grad_output")),
        *((name, c_void_p) for name in ("grad_query", "grad_key", "grad_value")),
        *((f"{name}_at", _Place) for name in ("output", "grad_output", "grad_query", "grad_key", "grad_value")),
        *((name, c_void_p) for name in ("grad_weight", "grad_weight_batch", "order")),
        *((name, c_int64) for name in ("grad_weight_group", "grad_weight_query", "grad_weight_atom")),
    ]


class _Count(ctypes.Structure):
    _fields_ = [("rows", _Rows), ("mass", c_double), ("count", c_void_p)]


def serves(inputs: Inputs) -> bool:
    """Return True if the compiled kernel can read these tensors: plain, not empty, on the processor."""
    query, key = inputs.query, inputs.key
    for x in inputs[:4]:
        if isinstance(x, Tensor) and not (type(x) in PLAIN and x.is_cpu and x.numel()):
            return False
    return (
        query.dtype in READ
        and torch._C._get_tracing_state() is None  # a trace would not hold the call
        and query.shape[-2] + key.shape[-2] < MOST_ATOMS
    )


class Library:
    """One build of the compiled kernel.

    A library file runs one build at a time in a process: the last one that was loaded.
    """

    def __init__(self, build: str = "", path: Path = LIBRARY) -> None:
        library = ctypes.CDLL(str(path))
        library.massieu_sizes.restype, library.massieu_sizes.argtypes = c_int64, [c_int64]
        ours = [ctypes.sizeof(structure) for structure in (_Forward, _Backward, _Count)]
        if [library.massieu_sizes(i) for i in range(3)] != ours:
            raise OSError(f"{path.name} was built from another version of the source; build it again")
        library.massieu_build.restype, library.massieu_build.argtypes = ctypes.c_char_p, [ctypes.c_char_p]
        for name in ("forward", "backward", "count", "retrieve"):
            function = getattr(library, f"massieu_{name}")
            function.restype, function.argtypes = c_int64, [c_void_p]
        name = library.massieu_build(build.encode())
        if name is None:
            raise OSError(f"this processor does not run the {build} build")
        self.build: str = name.decode()
        self._library = library

    def forward(self, inputs: Inputs, level: int, *, split_atoms: bool = False, top: int = 0) -> Found:
        """Compute output and statistics; with ``split_atoms`` threads share the atoms, and ``top`` returns the best."""
        call, value = _Call(inputs), inputs.value
        output = None if value is None else call.like(call.query, value.shape[-1])
        statistics = call.empty(9, *call.shape)
        fields = [_pointer(output), call.place(output), _pointer(statistics)]
        best = None
        if top:
            score = torch.empty(*call.shape, top, dtype=torch.float64, device="cpu")
            best = Best(score, torch.empty_like(score, dtype=torch.int64))
            fields += [top, *map(_pointer, best)]
        self._call("retrieve" if split_atoms else "forward", _Forward(call.rows, *fields))
        if not level:  # every view takes time that is visible in a small call
            return Found(output, (None,) * 6, statistics[6:], best)
        log_z, mean, entropy, variance, peak, collision = statistics[:6].unbind()
        second = (variance, collision) if level == 2 else (None, None)
        found = (log_z, mean, entropy, second[0], peak, second[1])
        return Found(output, found, statistics[6:], best)

    def backward(
        self,
        inputs: Inputs,
        moments: Tensor,
        slope: Slope,
        output: Tensor | None,
        grad_output: Tensor | None,
        *,
        want_log_weight: bool,
    ) -> Gradients:
        """Gradients in query, key, value and log weight; scores are recomputed."""
        call, log_weight = _Call(inputs), inputs.log_weight
        if grad_output is None or output is None:
            output = grad_output = None
        if len(moments) == 2:  # without the third, no coefficient needs it
            moments = torch.cat([moments, torch.zeros_like(moments[:1])])
        moments, coefficients = moments.to(call.exact).contiguous(), call.stack(slope)
        output, grad_output = (None if x is None else call.dense(x) for x in (output, grad_output))
        grads = [None if x is None else call.like(x) for x in (call.query, call.key, call.value)]
        if grad_output is None and grads[2] is not None:
            grads[2].zero_()
        grad_weight, weight_batch, order, strides = None, None, None, (0, 0, 0)
        if want_log_weight and log_weight is not None:
            grad_weight = torch.zeros(log_weight.shape, dtype=call.exact, device="cpu")
            weight_batch, strides = _weight_strides(grad_weight, inputs.plan)
            order = np.argsort(weight_batch, kind="stable")
        tensors = (moments, coefficients, output, grad_output, *grads)
        places = map(call.place, (output, grad_output, *grads))
        arrays = (None if x is None else x.ctypes.data for x in (weight_batch, order))
        fields = (*map(_pointer, tensors), *places, _pointer(grad_weight), *arrays, *strides)
        self._call("backward", _Backward(call.rows, *fields))
        own = inputs.query.dtype
        grad_query, grad_key, grad_value = (x if x is None or x.dtype == own else x.to(own) for x in grads)
        assert grad_query is not None
        assert grad_key is not None
        if grad_weight is not None and log_weight is not None:
            grad_weight = grad_weight.to(log_weight.dtype)
        return Gradients(grad_query, grad_key, grad_value, grad_weight)

    def mass_count(self, inputs: Inputs, mass: float) -> Tensor:
        """Number of the heaviest atoms that hold the given mass, ``(batch, groups, queries)``, int64."""
        call = _Call(inputs)
        count = torch.empty(call.shape, dtype=torch.int64, device="cpu")
        self._call("count", _Count(call.rows, mass, count.data_ptr()))
        return count

    def _call(self, name: str, structure: ctypes.Structure) -> None:
        status = getattr(self._library, f"massieu_{name}")(ctypes.byref(structure))
        if status == NO_MEMORY:
            raise MemoryError("not enough memory for the tiles of one call; pass fewer atoms or queries at a time")
        if status:
            raise RuntimeError(f"the compiled kernel refused a call with status {status}; set MASSIEU_KERNEL=torch")


class _Call:
    """Rows of one call as the library reads them; keeps references to all tensors that it points into."""

    def __init__(self, inputs: Inputs) -> None:
        query, key, value, log_weight, sink, plan = inputs
        self.dtype = torch.float32 if query.dtype == torch.float16 else query.dtype
        self.exact = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.axes = plan.batch_axes
        query, key = self.dense(query), self.dense(key)
        value = None if value is None else self.dense(value)
        self.query, self.key, self.value = query, key, value
        layouts = [None if x is None else (x.shape, x.stride()) for x in (query, key, value)]
        find = _cached(_same_rows, query)
        same = find(*layouts, self.axes, plan.causal, plan.window, plan.scale, self.dtype)
        self.rows = rows = _Rows.from_buffer_copy(same.rows)
        self.shape = (rows.batch, rows.groups, rows.queries)
        rows.query, rows.key, rows.value = query.data_ptr(), key.data_ptr(), _pointer(value)
        rows.threads = torch.get_num_threads()
        self._kept: list[Any] = [same]
        if log_weight is not None:
            log_weight = masked_log_weight(log_weight).to(self.exact).resolve_neg()
            weight_batch, strides = _weight_strides(log_weight, plan)
            rows.log_weight, rows.weight_batch = log_weight.data_ptr(), weight_batch.ctypes.data
            rows.weight_group, rows.weight_query, rows.weight_atom = strides
            self._kept += (log_weight, weight_batch)
        if plan.lengths is not None:
            lengths = plan.lengths.contiguous()
            rows.lengths = lengths.data_ptr()
            self._kept.append(lengths)
        if sink is not None:
            sink = sink.double().contiguous().resolve_neg()
            rows.sink = sink.data_ptr()
            self._kept.append(sink)

    def dense(self, tensor: Tensor) -> Tensor:
        """Return the tensor in a type that the library reads, with a dense last axis."""
        if tensor._is_zerotensor():  # without memory, under a transform of torch.func
            tensor = tensor.clone()
        if tensor.dtype != self.dtype or tensor.is_neg():
            tensor = tensor.to(self.dtype).resolve_neg()
        return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()

    def place(self, tensor: Tensor | None) -> _Place:
        """Return the offsets of the rows of a tensor; its first axes are those of the keys."""
        if tensor is None:
            return _Place()
        found: _SamePlace = _cached(_find_place, tensor)(tensor.shape, tensor.stride(), self.axes)
        self._kept.append(found)
        return found.place

    def like(self, tensor: Tensor, dim: int | None = None) -> Tensor:
        """Return a new tensor with a dense last axis and the other axes in the memory order of this one."""
        if dim in (None, tensor.shape[-1]):
            new = torch.empty_like(tensor, dtype=self.dtype)
            if new.stride(-1) == 1 or new.shape[-1] == 1:
                return new
        shape = (*tensor.shape[:-1], tensor.shape[-1] if dim is None else dim)
        return torch.empty(shape, dtype=self.dtype, device="cpu")

    def stack(self, tensors: Sequence[Tensor | None]) -> Tensor | None:
        """Stack tensors ``(batch, groups, queries)``, zeros for None; None if all are None."""
        some = next((x for x in tensors if x is not None), None)
        if some is None:
            return None
        return torch.stack([torch.zeros_like(some) if x is None else x for x in tensors]).to(self.exact)

    def empty(self, *shape: int) -> Tensor:
        """Return a new tensor for statistics, at least float32."""
        return torch.empty(shape, dtype=self.exact, device="cpu")


class _SameRows(NamedTuple):
    """Part of ``_Rows`` that calls on tensors of the same layouts share: all but addresses."""

    rows: _Rows
    starts: tuple[_Starts | None, ...]


class _SamePlace(NamedTuple):
    place: _Place
    starts: tuple[_Starts, _Starts]


@lru_cache(maxsize=256)  # the same for all layers of a model, and as slow to build as a small call
def _same_rows(
    query: Layout,
    key: Layout,
    value: Layout | None,
    axes: int,
    causal: bool,
    window: int | None,
    scale: float,
    dtype: Any,
) -> _SameRows:
    (shape, stride), (key_shape, key_stride) = query, key
    value_shape, value_stride = ((0, 0), (0, 0)) if value is None else value
    starts = (
        _starts(shape[:axes], stride[:axes]),
        _starts(shape[axes:-2], stride[axes:-2]),
        _starts(key_shape[:-2], key_stride[:-2]),
        None if value is None else _starts(value_shape[:-2], value_stride[:-2]),
    )
    names = ("query_batch", "query_group", "key_batch", "value_batch")
    addresses = {name: start.address for name, start in zip(names, starts, strict=True) if start is not None}
    rows = _Rows(
        **addresses,
        query_row=stride[-2],
        key_row=key_stride[-2],
        value_row=value_stride[-2],
        batch=math.prod(shape[:axes]),
        groups=math.prod(shape[axes:-2]),
        queries=shape[-2],
        atoms=key_shape[-2],
        dim=shape[-1],
        value_dim=value_shape[-1],
        causal=int(causal),
        window=min(window or 0, MOST_ATOMS),
        scale=scale,
        type=TYPES[dtype],
    )
    return _SameRows(rows, starts)


@lru_cache(maxsize=256)
def _find_place(sizes: tuple[int, ...], strides: tuple[int, ...], axes: int) -> _SamePlace:
    batch, group = _starts(sizes[:axes], strides[:axes]), _starts(sizes[axes:-2], strides[axes:-2])
    return _SamePlace(_Place(batch.address, group.address, strides[-2]), (batch, group))


def _cached(find: Any, tensor: Tensor) -> Any:
    """Return the function with its cache, or without it where results are large."""
    return find if math.prod(tensor.shape[:-2]) <= MOST_KEPT else find.__wrapped__


def _starts(sizes: tuple[int, ...], strides: tuple[int, ...]) -> _Starts:
    """Offset of each entry of the flattened leading axes, in elements."""
    start = np.zeros(1, dtype=np.int64)
    for size, stride in zip(sizes, strides, strict=True):
        start = np.add.outer(start, np.arange(size, dtype=np.int64) * stride).ravel()
    return _Starts(start, start.ctypes.data)


def _weight_strides(log_weight: Tensor, plan: Plan) -> tuple[Whole, tuple[int, int, int]]:
    """Offsets of the log weights of each batch entry, and their strides over groups, queries and atoms."""
    stride = [0 if size == 1 else own for size, own in zip(log_weight.shape, log_weight.stride(), strict=True)]
    return np.asarray(plan.weight_index, dtype=np.int64) * stride[0], (stride[1], stride[2], stride[3])


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
