"""The residual stream of a transformer, found in the numbers of one small pass instead of in the names of a family."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from massieu.taps import AttentionCall, tap
from massieu.taps.passes import in_this_thread

__all__ = ["Anatomy", "Block", "Place", "Sublayer", "block_input", "hidden_tensors", "read_anatomy", "with_input"]

ENTRIES = 4096
"""How many entries of a tensor are kept to recognize it: sums are sums in every entry."""

ROUNDINGS = 4
"""How many units of rounding an entry of a sum may be away from the sum of the entries."""

STRAYS = 0.02
"""Share of entries that may be farther away."""


@dataclass(frozen=True)
class Place:
    """The output of one call of one module inside a block: its path from the block and how many calls came before."""

    path: str
    call: int = 0


@dataclass(frozen=True)
class Sublayer:
    """One summand of the residual stream.

    Attributes:
        kind: "attention", "cross" (the second attention of a block) or "mlp".
        update: where the summand appears.
        factor: what it is multiplied with before it is added, 1 in most models.
        entry: the norm in front of the sublayer, whose output does not stay in the stream; None if there is none.
        stream_norm: the norm that takes the sum and whose output goes on as the stream (post-norm); None if none does.
    """

    kind: Literal["attention", "cross", "mlp"]
    update: Place
    factor: float = 1.0
    entry: Place | None = None
    stream_norm: Place | None = None


@dataclass(frozen=True)
class Block:
    """One call of one block.

    Attributes:
        name: path of the block in the model.
        number: how many calls of this block came before in the pass (ALBERT calls one block for every layer).
        stack: "encoder" or "decoder", as the attention call inside it.
        layer: running number in the stack.
        sublayers: in the order in which they are added; empty if the block could not be read.
        parallel: whether attention and MLP both start from the block's input.
        problem: a sentence when the block could not be read, else None.
    """

    name: str
    number: int
    stack: str
    layer: int
    sublayers: tuple[Sublayer, ...]
    parallel: bool = False
    problem: str | None = None

    def find(self, kind: str) -> Sublayer | None:
        """The sublayer of a kind, None if the block has none."""
        return next((sublayer for sublayer in self.sublayers if sublayer.kind == kind), None)

    @property
    def places(self) -> set[Place]:
        """Everything that has to be seen to rebuild the stream."""
        found = ((sublayer.update, sublayer.entry, sublayer.stream_norm) for sublayer in self.sublayers)
        return {place for places in found for place in places if place is not None}


@dataclass(frozen=True)
class Anatomy:
    """The blocks of a model in the order of their calls, and sentences about what could not be read."""

    blocks: tuple[Block, ...]
    notes: tuple[str, ...] = ()


def read_anatomy(model: nn.Module, inputs: Mapping[str, Any]) -> Anatomy:
    """Find the blocks of a model and in each the updates that attention and MLP add to the residual stream.

    A block is an element of a list of modules that contains attention. All tensors of the stream's shape that enter
    and leave the modules of a block are recorded in one pass; from the block's input on, an update is an output whose
    sum with the current state appears later. If no sum with the state appears but one with a norm of it does, the
    norm is part of the stream. If the block's output is its input plus two outputs, they are parallel.

    Args:
        model: any module; nothing in it is changed.
        inputs: keyword arguments of one forward pass. A few tokens are enough; not all of them may be padding.

    Returns:
        One :class:`Block` for every call of a block.

    Example:
        >>> model = massieu.nn.Transformer(8, 1, 2, vocabulary=9)
        >>> block = read_anatomy(model, {"inputs": torch.arange(6)[None]}).blocks[0]
        >>> [(sublayer.kind, sublayer.update.path) for sublayer in block.sublayers]
        [('attention', 'attention'), ('mlp', 'feed_forward')]
    """
    recorder = _Recorder(model)
    calls: list[tuple[int, AttentionCall]] = []
    observed = tap(model, lambda call: calls.append((recorder.clock, call)), this_thread=True)
    with torch.no_grad(), recorder.recording(), observed:
        model(**inputs)
    readings = [_read(visit, recorder) for visit in recorder.visits if visit.path in recorder.candidates]
    chosen = _innermost(readings)
    return _number(chosen, [(time, call.name, call.stack, call.layer) for time, call in calls])


def hidden_tensors(found: Any) -> Iterator[Tensor]:
    """The floating-point tensors with at least two axes in the arguments or the result of a module, in order."""
    if isinstance(found, Tensor):
        if found.is_floating_point() and found.dim() >= 2:
            yield found
    elif isinstance(found, Mapping):
        for value in found.values():
            yield from hidden_tensors(value)
    elif isinstance(found, (tuple, list)):
        for value in found:
            yield from hidden_tensors(value)


def block_input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int | str, Tensor] | None:
    """The stream among the arguments of a block: the first tensor, by position or else by name."""
    named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    tensors = ((key, value) for key, value in named if isinstance(value, Tensor))
    return next(((key, value) for key, value in tensors if value.is_floating_point() and value.dim() >= 2), None)


def with_input(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], place: int | str, state: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a block with another stream at the place that :func:`block_input` found."""
    if isinstance(place, int):
        return (*args[:place], state, *args[place + 1 :]), dict(kwargs)
    return args, {**kwargs, place: state}


@dataclass
class _Visit:
    """One call of a module, with the entries that were kept of each tensor of the stream's shape."""

    path: str
    module: nn.Module
    begin: int
    end: int = -1
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32


class _Recorder:
    """Hooks on every module inside a candidate for a block."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.clock = 0
        self.visits: list[_Visit] = []
        self._open: list[_Visit] = []
        self._kept: dict[tuple[int, torch.device], Tensor] = {}
        modules = dict(model.named_modules())
        self.attention = {path for path, module in modules.items() if _is_attention(module)}
        lists = {path for path, module in modules.items() if isinstance(module, (nn.ModuleList, nn.Sequential))}
        elements = {path for path in modules if path.rpartition(".")[0] in lists and path.rpartition(".")[2].isdigit()}
        self.candidates = {path for path in elements if any(_inside(name, path) for name in self.attention)}
        self.modules = {
            path: module
            for path, module in modules.items()
            if path in self.candidates or any(_inside(path, candidate) for candidate in self.candidates)
        }

    @contextmanager
    def recording(self) -> Iterator[None]:
        with ExitStack() as stack:
            for path, module in self.modules.items():
                before = module.register_forward_pre_hook(in_this_thread(self._enter(path)), with_kwargs=True)
                after = module.register_forward_hook(in_this_thread(self._leave(path)))
                stack.callback(before.remove)
                stack.callback(after.remove)
            yield

    def _enter(self, path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            visit = _Visit(path, module, self._tick())
            stream = block_input(args, kwargs)
            if path in self.candidates and stream is not None:
                visit.shape, visit.dtype = tuple(stream[1].shape), stream[1].dtype
            self.visits.append(visit)
            self._open.append(visit)
            if visit.shape and stream is not None:
                visit.inputs = [self._entries(stream[1])]
            else:
                visit.inputs = self._keep((args, kwargs))

        return hook

    def _leave(self, path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            # A module that raised and was called again left its first visit open: the last one of this path counts.
            visit = next(visit for visit in reversed(self._open) if visit.path == path)
            del self._open[self._open.index(visit) + 1 :]
            visit.outputs = self._keep(output)
            visit.end = self._tick()
            self._open.remove(visit)

        return hook

    def _tick(self) -> int:
        self.clock += 1
        return self.clock

    def _keep(self, found: Any) -> list[Tensor]:
        shapes = [visit.shape for visit in self._open if visit.shape]
        fits = (x for x in hidden_tensors(found) if any(_same_stream(x, shape) for shape in shapes))
        return [self._entries(x) for x in fits]

    def _entries(self, x: Tensor) -> Tensor:
        flat = x.detach().reshape(-1)
        key = (flat.numel(), flat.device)
        if key not in self._kept:
            generator = torch.Generator().manual_seed(flat.numel())
            self._kept[key] = torch.randperm(flat.numel(), generator=generator)[:ENTRIES].to(flat.device)
        return flat[self._kept[key]].double()


@dataclass
class _Reading:
    """What was read in one call of one candidate."""

    visit: _Visit
    sublayers: tuple[Sublayer, ...]
    parallel: bool = False
    problem: str | None = None

    @property
    def complete(self) -> bool:
        kinds = {sublayer.kind for sublayer in self.sublayers}
        return {"attention", "mlp"} <= kinds


@dataclass
class _Step:
    update: _Visit
    sum: Tensor
    time: int
    factor: float = 1.0


def _read(block: _Visit, recorder: _Recorder) -> _Reading:
    if not block.inputs or not block.outputs:
        return _Reading(block, (), problem="its input or output is not one tensor of the stream")
    inner = [visit for visit in recorder.visits if block.begin < visit.begin and 0 < visit.end < block.end]
    return _Stream(block, inner, recorder.attention).read()


class _Stream:
    """Follows the state of one block from sum to sum."""

    def __init__(self, block: _Visit, inner: list[_Visit], attention: set[str]) -> None:
        self.block, self.inner, self.attention = block, inner, attention
        self.start, self.final = block.inputs[0], block.outputs[0]
        self.rounding = ROUNDINGS * torch.finfo(block.dtype).eps
        size = len(self.start)
        self.updates = [(visit, x) for visit in inner for x in visit.outputs if len(x) == size]
        self.outputs = torch.stack([x for _, x in self.updates]) if self.updates else self.start.new_zeros(0, size)
        seen = [(visit.begin, x) for visit in inner for x in visit.inputs]
        seen += [(visit.end, x) for visit in inner for x in visit.outputs]
        seen += [(block.end, x) for x in block.outputs[:1]]
        self.seen = sorted(((time, x) for time, x in seen if len(x) == size), key=lambda pair: pair[0])

    def read(self) -> _Reading:
        sublayers: list[Sublayer] = []
        state, time = self.start, self.block.begin
        while True:
            step = self._step(state, time)
            norm = None
            if step is None:
                norm, step = self._step_after_norm(state, time)
            if step is None and not sublayers:
                parallel = self._parallel()
                if parallel is not None:
                    return parallel
            if step is None:
                step = self._scaled_step(state, time)
            if step is None:
                break
            if norm is not None and sublayers:
                sublayers[-1] = replace(sublayers[-1], stream_norm=self._place(norm))
            if norm is not None:
                state, time = norm.outputs[0], norm.end
            sublayers.append(self._sublayer(step, state, time, sublayers))
            state, time = step.sum, step.time
        if not sublayers:
            return _Reading(self.block, (), problem="no output of a module was found again as a summand of the stream")
        if not self._equal(state, self.final):
            last = next((norm for norm in self._norms(state, time) if self._equal(norm.outputs[0], self.final)), None)
            if last is None:
                return _Reading(self.block, (), problem="its output is not the sum of the updates that were found")
            sublayers[-1] = replace(sublayers[-1], stream_norm=self._place(last))
        return _Reading(self.block, tuple(sublayers))

    def _step(self, state: Tensor, time: int) -> _Step | None:
        """The first sum of the state with an output."""
        for moment, total in self.seen:
            if moment <= time or self._equal(total, state):
                continue
            update = self._summand(total, state, self.outputs, time, moment)
            if update is not None:
                return _Step(self.updates[update][0], total, moment)
        return None

    def _scaled_step(self, state: Tensor, time: int) -> _Step | None:
        """The first sum of the state with a multiple of an output (a residual multiplier)."""
        for moment, total in self.seen:
            if moment <= time or self._equal(total, state):
                continue
            factor = (self.outputs @ (total - state)) / self.outputs.square().sum(1).clamp_min(1e-300)
            update = self._summand(total, state, factor[:, None] * self.outputs, time, moment)
            if update is not None:
                return _Step(self.updates[update][0], total, moment, float(factor[update]))
        return None

    def _summand(self, total: Tensor, state: Tensor, outputs: Tensor, time: int, moment: int) -> int | None:
        """Which of the outputs of that time gives the total when the state is added."""
        error = (total - state - outputs).abs()
        strays = (error > self.rounding * (total.abs() + state.abs() + outputs.abs())).double().mean(1)
        size = error.norm(dim=1)
        ends = [visit.end for visit, _ in self.updates]
        allowed = [i for i, end in enumerate(ends) if time < end <= moment and float(strays[i]) <= STRAYS]
        if not allowed:
            return None
        closest = min(float(size[i]) for i in allowed)
        # A projection, a dropout that is off and the module around them give the same tensor: name the outermost.
        equal = [i for i in allowed if float(size[i]) <= 1.01 * closest]
        return min(equal, key=lambda i: (self.updates[i][0].path.count("."), -self.updates[i][0].end))

    def _step_after_norm(self, state: Tensor, time: int) -> tuple[_Visit | None, _Step | None]:
        for norm in self._norms(state, time):
            step = self._step(norm.outputs[0], norm.end)
            if step is not None:
                return norm, step
        return None, None

    def _norms(self, state: Tensor, time: int) -> list[_Visit]:
        """Norms that read the state."""
        norms = (visit for visit in self.inner if visit.begin >= time and _is_norm(visit.module))
        norms = (visit for visit in norms if len(visit.inputs) == 1 and len(visit.outputs) == 1)
        return [visit for visit in norms if self._equal(visit.inputs[0], state)]

    def _parallel(self) -> _Reading | None:
        """The block's output as its input plus two outputs, the first of which comes from attention."""
        for visit, first in self.updates:
            if not self._attends(visit, self.block.begin) or self._equal(self.start + first, self.final):
                continue
            second = self._summand(self.final, self.start + first, self.outputs, self.block.begin, self.block.end)
            if second is not None and self._apart(visit, self.updates[second][0]):
                return self._two(first, self.updates[second][1])
        return None

    def _apart(self, first: _Visit, second: _Visit) -> bool:
        return first.end < second.begin or second.end < first.begin

    def _two(self, first: Tensor, second: Tensor) -> _Reading:
        attention, mlp = self._outermost(first), self._outermost(second)
        norms = self._norms(self.start, self.block.begin)
        entries: list[Place | None] = [*map(self._place, norms)] or [None]
        return _Reading(
            self.block,
            (
                Sublayer("attention", self._place(attention), entry=entries[0]),
                Sublayer("mlp", self._place(mlp), entry=entries[-1]),
            ),
            parallel=True,
        )

    def _outermost(self, x: Tensor) -> _Visit:
        equal = [visit for visit, other in self.updates if self._equal(other, x)]
        return min(equal, key=lambda visit: (visit.path.count("."), -visit.end))

    def _sublayer(self, step: _Step, state: Tensor, time: int, before: list[Sublayer]) -> Sublayer:
        attends = self._attends(step.update, time)
        cross = attends and any(sublayer.kind == "attention" for sublayer in before)
        kind: Literal["attention", "cross", "mlp"] = "cross" if cross else "attention" if attends else "mlp"
        entry = next((norm for norm in self._norms(state, time) if norm.end <= step.update.end), None)
        return Sublayer(kind, self._place(step.update), step.factor, None if entry is None else self._place(entry))

    def _attends(self, update: _Visit, time: int) -> bool:
        """Whether attention began between the state and the update."""
        return any(time < visit.begin < update.end for visit in self.inner if visit.path in self.attention)

    def _place(self, visit: _Visit) -> Place:
        calls = [other for other in self.inner if other.path == visit.path]
        return Place(visit.path[len(self.block.path) + 1 :], calls.index(visit))

    def _equal(self, first: Tensor, second: Tensor) -> bool:
        # What is seen twice is the same tensor up to the rounding of a copy.
        return len(first) == len(second) and float((first - second).norm()) <= self.rounding * float(second.norm())


def _innermost(readings: list[_Reading]) -> list[_Reading]:
    """Of candidates that contain each other, the innermost that has attention and MLP, or else attention alone."""

    def rank(reading: _Reading) -> tuple[int, int]:
        quality = 2 if reading.complete else 1 if reading.sublayers else 0
        return quality, reading.visit.path.count(".")

    def clash(first: _Visit, second: _Visit) -> bool:
        return first.begin <= second.begin and second.end <= first.end

    chosen: list[_Reading] = []
    for reading in sorted(readings, key=rank, reverse=True):
        others = [other.visit for other in chosen]
        if not any(clash(reading.visit, other) or clash(other, reading.visit) for other in others):
            chosen.append(reading)
    return sorted(chosen, key=lambda reading: reading.visit.begin)


def _number(readings: list[_Reading], calls: list[tuple[int, str, str, int]]) -> Anatomy:
    """Give every block the stack and the number of the attention observed in it."""
    blocks: list[Block] = []
    notes: list[str] = []
    for reading in readings:
        visit = reading.visit
        observed = [(stack, layer) for time, _, stack, layer in calls if visit.begin <= time < visit.end]
        if not observed and calls:
            notes.append(f"block {visit.path} has no softmax attention that was observed and is left out of the layers")
            continue
        stack, layer = observed[0] if observed else ("encoder", len(blocks))
        number = sum(block.name == visit.path for block in blocks)
        if reading.problem is not None:
            notes.append(f"block {visit.path} could not be read: {reading.problem}; its columns are empty")
        blocks.append(Block(visit.path, number, stack, layer, reading.sublayers, reading.parallel, reading.problem))
    if not blocks:
        notes.append("no block was found: a block is an element of a ModuleList that contains an attention module")
    return Anatomy(tuple(blocks), tuple(notes))


def _is_attention(module: nn.Module) -> bool:
    return re.search(r"attention|attn", type(module).__name__, re.IGNORECASE) is not None


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _inside(path: str, outer: str) -> bool:
    return path.startswith(outer + ".")


def _same_stream(x: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether a tensor has the stream's shape, possibly with batch and tokens on one axis."""
    return x.shape[-1] == shape[-1] and x.numel() == torch.Size(shape).numel()
