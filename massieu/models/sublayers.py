"""Sublayers of a block: the updates that attention and MLP add to the residual stream, found by their sums."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from massieu.models.module_calls import ModuleCall, Recorder

__all__ = ["BlockUpdates", "ModuleOutput", "Sublayer", "block_updates"]

ROUNDINGS = 4
"""Largest difference between an entry of a sum and the sum of the entries, in units of rounding."""

STRAYS = 0.02
"""Largest share of entries with a larger difference."""


@dataclass(frozen=True)
class ModuleOutput:
    """Output of a module inside a block: path of the module in the block, and number of its call."""

    path: str
    call: int = 0


@dataclass(frozen=True)
class Sublayer:
    """One summand of the residual stream.

    Attributes:
        kind: "attention", "cross" (the second attention of a block) or "mlp".
        update: output that is the summand.
        factor: factor of the summand, 1 in most models.
        entry: the norm in front of the sublayer, outside of the stream (pre-norm); None without one.
        stream_norm: the norm of the sum, whose output is the stream (post-norm); None without one.
    """

    kind: Literal["attention", "cross", "mlp"]
    update: ModuleOutput
    factor: float = 1.0
    entry: ModuleOutput | None = None
    stream_norm: ModuleOutput | None = None


@dataclass
class BlockUpdates:
    """Sublayers found in one call of a candidate for a block, or the problem as a sentence."""

    call: ModuleCall
    sublayers: tuple[Sublayer, ...]
    parallel: bool = False
    problem: str | None = None

    @property
    def complete(self) -> bool:
        """True if there are attention and MLP."""
        return {"attention", "mlp"} <= {sublayer.kind for sublayer in self.sublayers}


class _Sum(NamedTuple):
    """Sum of the stream and a multiple of an output."""

    update: ModuleCall
    sum: Tensor
    time: int
    factor: float


def block_updates(block: ModuleCall, recorder: Recorder) -> BlockUpdates:
    """Find the updates of one call of a candidate for a block."""
    if not block.inputs or not block.outputs:
        return BlockUpdates(block, (), problem="its input or output is not one tensor of the stream")
    inner = [call for call in recorder.calls if block.begin < call.begin and 0 < call.end < block.end]
    return _UpdateFinder(block, inner, recorder.attention).read()


class _UpdateFinder:
    """The state of one block followed from sum to sum."""

    def __init__(self, block: ModuleCall, inner: list[ModuleCall], attention: set[str]) -> None:
        self.block, self.inner, self.attention = block, inner, attention
        self.start, self.final = block.inputs[0], block.outputs[0]
        self.rounding = ROUNDINGS * torch.finfo(block.dtype).eps
        size = len(self.start)
        self.updates = [(call, x) for call in inner for x in call.outputs if len(x) == size]
        self.outputs = torch.stack([x for _, x in self.updates]) if self.updates else self.start.new_zeros(0, size)
        seen = [(call.begin, x) for call in inner for x in call.inputs]
        seen += [(call.end, x) for call in inner for x in call.outputs]
        seen += [(block.end, x) for x in block.outputs[:1]]
        self.seen = sorted(((time, x) for time, x in seen if len(x) == size), key=lambda pair: pair[0])

    def read(self) -> BlockUpdates:
        sublayers: list[Sublayer] = []
        state, time = self.start, self.block.begin
        while True:
            norm = None
            found = self._sum(state, time)
            if found is None:
                norm, found = self._sum_after_norm(state, time)
            if found is None and not sublayers:
                parallel = self._parallel()
                if parallel is not None:
                    return parallel
            found = found or self._sum(state, time, scaled=True)
            if found is None:
                break
            if norm is not None:
                if sublayers:
                    sublayers[-1] = replace(sublayers[-1], stream_norm=self._output(norm))
                state, time = norm.outputs[0], norm.end
            sublayers.append(self._sublayer(found, state, time, sublayers))
            state, time = found.sum, found.time
        if not sublayers:
            problem = "no output of a module was found again as a summand of the stream"
            return BlockUpdates(self.block, (), problem=problem)
        if not self._equal(state, self.final):
            last = next((norm for norm in self._norms(state, time) if self._equal(norm.outputs[0], self.final)), None)
            if last is None:
                return BlockUpdates(self.block, (), problem="its output is not the sum of the updates that were found")
            sublayers[-1] = replace(sublayers[-1], stream_norm=self._output(last))
        return BlockUpdates(self.block, tuple(sublayers))

    def _sum(self, state: Tensor, time: int, *, scaled: bool = False) -> _Sum | None:
        """The first sum of the state with an output, or with a multiple of one (a residual multiplier)."""
        factor, outputs = self.outputs.new_ones(len(self.outputs)), self.outputs
        for moment, total in self.seen:
            if moment <= time or self._equal(total, state):
                continue
            if scaled:
                factor = (self.outputs @ (total - state)) / self.outputs.square().sum(1).clamp_min(1e-300)
                outputs = factor[:, None] * self.outputs
            update = self._summand(total, state, outputs, time, moment)
            if update is not None:
                return _Sum(self.updates[update][0], total, moment, float(factor[update]))
        return None

    def _summand(self, total: Tensor, state: Tensor, outputs: Tensor, time: int, moment: int) -> int | None:
        """Number of the output of that time that gives the total when the state is added."""
        error = (total - state - outputs).abs()
        strays = (error > self.rounding * (total.abs() + state.abs() + outputs.abs())).double().mean(1)
        size = error.norm(dim=1)
        ends = [call.end for call, _ in self.updates]
        allowed = [i for i, end in enumerate(ends) if time < end <= moment and float(strays[i]) <= STRAYS]
        if not allowed:
            return None
        closest = min(float(size[i]) for i in allowed)
        # A projection, a dropout that is off and the module around them give the same tensor: name the outermost.
        equal = [i for i in allowed if float(size[i]) <= 1.01 * closest]
        return min(equal, key=lambda i: (self.updates[i][0].path.count("."), -self.updates[i][0].end))

    def _sum_after_norm(self, state: Tensor, time: int) -> tuple[ModuleCall | None, _Sum | None]:
        for norm in self._norms(state, time):
            found = self._sum(norm.outputs[0], norm.end)
            if found is not None:
                return norm, found
        return None, None

    def _norms(self, state: Tensor, time: int) -> list[ModuleCall]:
        """Norms that read the state."""
        norms = (call for call in self.inner if call.begin >= time and _is_norm(call.module))
        norms = (call for call in norms if len(call.inputs) == 1 and len(call.outputs) == 1)
        return [call for call in norms if self._equal(call.inputs[0], state)]

    def _parallel(self) -> BlockUpdates | None:
        """Parallel attention and MLP: the block's output is its input plus two outputs, the first from attention."""
        for call, first in self.updates:
            if not self._attends(call, self.block.begin) or self._equal(self.start + first, self.final):
                continue
            second = self._summand(self.final, self.start + first, self.outputs, self.block.begin, self.block.end)
            if second is not None and self._apart(call, self.updates[second][0]):
                return self._two(first, self.updates[second][1])
        return None

    def _apart(self, first: ModuleCall, second: ModuleCall) -> bool:
        return first.end < second.begin or second.end < first.begin

    def _two(self, first: Tensor, second: Tensor) -> BlockUpdates:
        attention, mlp = self._outermost(first), self._outermost(second)
        norms = self._norms(self.start, self.block.begin)
        entries: list[ModuleOutput | None] = [*map(self._output, norms)] or [None]
        first_sublayer = Sublayer("attention", self._output(attention), entry=entries[0])
        return BlockUpdates(self.block, (first_sublayer, Sublayer("mlp", self._output(mlp), entry=entries[-1])), True)

    def _outermost(self, x: Tensor) -> ModuleCall:
        equal = [call for call, other in self.updates if self._equal(other, x)]
        return min(equal, key=lambda call: (call.path.count("."), -call.end))

    def _sublayer(self, found: _Sum, state: Tensor, time: int, before: list[Sublayer]) -> Sublayer:
        attends = self._attends(found.update, time)
        cross = attends and any(sublayer.kind == "attention" for sublayer in before)
        kind: Literal["attention", "cross", "mlp"] = "cross" if cross else "attention" if attends else "mlp"
        entry = next((norm for norm in self._norms(state, time) if norm.end <= found.update.end), None)
        return Sublayer(kind, self._output(found.update), found.factor, None if entry is None else self._output(entry))

    def _attends(self, update: ModuleCall, time: int) -> bool:
        """Return whether attention began between the state and the update."""
        return any(time < call.begin < update.end for call in self.inner if call.path in self.attention)

    def _output(self, call: ModuleCall) -> ModuleOutput:
        calls = [other for other in self.inner if other.path == call.path]
        return ModuleOutput(call.path[len(self.block.path) + 1 :], calls.index(call))

    def _equal(self, first: Tensor, second: Tensor) -> bool:
        # Copies of a tensor are equal up to rounding.
        return len(first) == len(second) and float((first - second).norm()) <= self.rounding * float(second.norm())


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()
