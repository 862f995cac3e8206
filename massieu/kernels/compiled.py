"""The compiled kernel: its library, the structures that it reads, and the three functions of every kernel.

The source lies in ``native/``. The library knows nothing of torch or Python; it reads tensors where they are, through
pointers and strides, on as many threads as torch uses.
"""

from __future__ import annotations

import ctypes
import math
from ctypes import c_double, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from massieu.kernels.blocks import masked_log_weight
from massieu.kernels.results import Best, Found, Gradients, Moments, Slope
from massieu.kernels.rows import Inputs, Plan

__all__ = ["Library", "serves"]

LIBRARY = Path(__file__).with_name("libmassieu.so")
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2}
NO_MEMORY = 1
MOST_KEPT = 2**14  # entries whose starts are kept for the next call
MOST_ATOMS = 2**31 - 1  # the library counts them in 32 bits

Whole: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


class _Starts(NamedTuple):
    """Where entries start, and where that is written."""

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
        *((name, c_void_p) for name in ("statistics", "coefficients", "output", "grad_output")),
        *((name, c_void_p) for name in ("grad_query", "grad_key", "grad_value")),
        *((f"{name}_at", _Place) for name in ("output", "grad_output", "grad_query", "grad_key", "grad_value")),
        *((name, c_void_p) for name in ("grad_weight", "grad_weight_batch", "order")),
        *((name, c_int64) for name in ("grad_weight_group", "grad_weight_query", "grad_weight_atom")),
    ]


class _Count(ctypes.Structure):
    _fields_ = [("rows", _Rows), ("mass", c_double), ("count", c_void_p)]


def serves(inputs: Inputs) -> bool:
    """Whether the compiled kernel can read these tensors: plain ones, not empty, on the processor."""
    query, key = inputs.query, inputs.key
    tensors = [x for x in inputs[:4] if x is not None]
    return (
        all(type(x) in (Tensor, torch.nn.Parameter) and x.device.type == "cpu" and x.numel() > 0 for x in tensors)
        and query.dtype in (*TYPES, torch.float16)
        and torch._C._get_tracing_state() is None  # a trace would not hold the call
        and query.shape[-2] + key.shape[-2] < MOST_ATOMS
    )


class Library:
    """One build of the compiled kernel, ready to be called.

    A library file runs one build at a time in a process: the one that was asked for last.
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
        """Output and statistics; with ``split_atoms`` threads share the atoms, and the best of them can be had too."""
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
        log_z, mean, entropy, variance, peak, collision, *moments = statistics
        light, full = level >= 1, level >= 2
        found = (
            log_z,
            mean if light else None,
            entropy if light else None,
            variance if full else None,
            peak,
            collision if full else None,
        )
        return Found(output, found, Moments(*moments), best)

    def backward(
        self,
        inputs: Inputs,
        moments: Moments,
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
        statistics = call.empty(9, *call.shape)
        for i, moment in enumerate(moments):
            statistics[6 + i] = 0.0 if moment is None else moment
        coefficients = call.empty(4, *call.shape).zero_()
        for i, coefficient in enumerate(slope):
            if coefficient is not None:
                coefficients[i] = coefficient
        output, grad_output = (None if x is None else call.dense(x) for x in (output, grad_output))
        grads = [None if x is None else call.like(x) for x in (call.query, call.key, call.value)]
        if grad_output is None and grads[2] is not None:
            grads[2].zero_()
        grad_weight, weight_batch, order, strides = None, None, None, (0, 0, 0)
        if want_log_weight and log_weight is not None:
            grad_weight = torch.zeros(log_weight.shape, dtype=statistics.dtype, device="cpu")
            weight_batch, strides = _weight_strides(grad_weight, inputs.plan)
            order = np.argsort(weight_batch, kind="stable")
        tensors = (statistics, coefficients, output, grad_output, *grads)
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
        """How many of the heaviest atoms hold the given mass, ``(batch, groups, queries)``, int64."""
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
    """The rows of one call as the library reads them. Holds on to every tensor that the structure points into."""

    def __init__(self, inputs: Inputs) -> None:
        query, key, value, log_weight, sink, plan = inputs
        self.dtype = torch.float32 if query.dtype == torch.float16 else query.dtype
        self.exact = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.axes = axes = plan.batch_axes
        batch, groups = math.prod(query.shape[:axes]), math.prod(query.shape[axes:-2])
        self.shape = (batch, groups, query.shape[-2])
        query, key = self.dense(query), self.dense(key)
        value = None if value is None else self.dense(value)
        self.query, self.key, self.value = query, key, value
        starts = [
            _starts(query.shape[:axes], query.stride()[:axes]),
            _starts(query.shape[axes:-2], query.stride()[axes:-2]),
            _starts(key.shape[:-2], key.stride()[:-2]),
            None if value is None else _starts(value.shape[:-2], value.stride()[:-2]),
        ]
        weight_batch, weight_strides = None, (0, 0, 0)
        if log_weight is not None:
            log_weight = masked_log_weight(log_weight).to(self.exact).resolve_neg()
            weight_batch, weight_strides = _weight_strides(log_weight, plan)
        lengths = None if plan.lengths is None else plan.lengths.contiguous()
        sink = None if sink is None else sink.double().contiguous().resolve_neg()
        self.rows = _Rows(
            query=_pointer(query),
            key=_pointer(key),
            value=_pointer(value),
            **{
                name: None if start is None else start.address
                for name, start in zip(("query_batch", "query_group", "key_batch", "value_batch"), starts, strict=True)
            },
            query_row=query.stride(-2),
            key_row=key.stride(-2),
            value_row=0 if value is None else value.stride(-2),
            log_weight=_pointer(log_weight),
            weight_batch=None if weight_batch is None else weight_batch.ctypes.data,
            weight_group=weight_strides[0],
            weight_query=weight_strides[1],
            weight_atom=weight_strides[2],
            lengths=_pointer(lengths),
            sink=_pointer(sink),
            batch=batch,
            groups=groups,
            queries=query.shape[-2],
            atoms=key.shape[-2],
            dim=query.shape[-1],
            value_dim=0 if value is None else value.shape[-1],
            causal=int(plan.causal),
            window=min(plan.window or 0, MOST_ATOMS),
            scale=plan.scale,
            type=TYPES[self.dtype],
            threads=torch.get_num_threads(),
        )
        self._kept: list[Any] = [log_weight, weight_batch, lengths, sink, starts]

    def dense(self, tensor: Tensor) -> Tensor:
        """The tensor in a type that the library reads, its last axis dense."""
        if tensor.dtype != self.dtype or tensor.is_neg():
            tensor = tensor.to(self.dtype).resolve_neg()
        return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()

    def place(self, tensor: Tensor | None) -> _Place:
        """Where the rows of a tensor lie; its first axes are those of the keys."""
        if tensor is None:
            return _Place()
        axes, sizes, strides = self.axes, tensor.shape, tensor.stride()
        batch, group = _starts(sizes[:axes], strides[:axes]), _starts(sizes[axes:-2], strides[axes:-2])
        self._kept += (batch, group)
        return _Place(batch.address, group.address, strides[-2])

    def like(self, tensor: Tensor, dim: int | None = None) -> Tensor:
        """A new tensor, its last axis dense and the others in the order of this one, so that nobody has to copy it."""
        if dim in (None, tensor.shape[-1]):
            new = torch.empty_like(tensor, dtype=self.dtype)
            if new.stride(-1) == 1 or new.shape[-1] == 1:
                return new
        shape = (*tensor.shape[:-1], tensor.shape[-1] if dim is None else dim)
        return torch.empty(shape, dtype=self.dtype, device="cpu")

    def empty(self, *shape: int) -> Tensor:
        """A new tensor for statistics, at least float32."""
        return torch.empty(shape, dtype=self.exact, device="cpu")


def _starts(sizes: tuple[int, ...], strides: tuple[int, ...]) -> _Starts:
    """Where each entry of the flattened leading axes starts, in elements."""
    find = _find_starts if math.prod(sizes) <= MOST_KEPT else _find_starts.__wrapped__
    return find(sizes, strides)


@lru_cache(maxsize=256)  # layer after layer asks for the same
def _find_starts(sizes: tuple[int, ...], strides: tuple[int, ...]) -> _Starts:
    start = np.zeros(1, dtype=np.int64)
    for size, stride in zip(sizes, strides, strict=True):
        start = np.add.outer(start, np.arange(size, dtype=np.int64) * stride).ravel()
    return _Starts(start, start.ctypes.data)


def _weight_strides(log_weight: Tensor, plan: Plan) -> tuple[Whole, tuple[int, int, int]]:
    """Where the log weights of each batch entry start, and their strides over groups, queries and atoms."""
    stride = [0 if size == 1 else own for size, own in zip(log_weight.shape, log_weight.stride(), strict=True)]
    return np.asarray(plan.weight_index, dtype=np.int64) * stride[0], (stride[1], stride[2], stride[3])


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
