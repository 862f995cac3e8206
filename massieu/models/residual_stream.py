"""The residual stream of a transformer, found in the tensors of one small pass instead of in the names of a family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from massieu.models.module_calls import ModuleCall, Recorder
from massieu.models.sublayers import BlockUpdates, ModuleOutput, Sublayer, block_updates
from massieu.taps import AttentionCall, tap

__all__ = ["BlockCall", "ResidualStream", "find_residual_stream"]


@dataclass(frozen=True)
class BlockCall:
    """One call of one block.

    Attributes:
        name: path of the block in the model.
        number: number of earlier calls of this block in the pass (ALBERT calls one block for every layer).
        stack: "encoder" or "decoder", as the attention call inside it.
        layer: running number in the stack.
        sublayers: in the order in which they are added; empty if none could be found.
        parallel: whether attention and MLP both start from the block's input.
        problem: reason for empty sublayers, as a sentence, else None.
    """

    name: str
    number: int
    stack: str
    layer: int
    sublayers: tuple[Sublayer, ...]
    parallel: bool = False
    problem: str | None = None

    def find(self, kind: str) -> Sublayer | None:
        """Return the sublayer of a kind, None if the block has none."""
        return next((sublayer for sublayer in self.sublayers if sublayer.kind == kind), None)

    @property
    def places(self) -> set[ModuleOutput]:
        """Outputs from which the stream can be rebuilt."""
        found = ((sublayer.update, sublayer.entry, sublayer.stream_norm) for sublayer in self.sublayers)
        return {place for places in found for place in places if place is not None}


@dataclass(frozen=True)
class ResidualStream:
    """Blocks of a model in the order of their calls, and sentences about those that could not be read."""

    blocks: tuple[BlockCall, ...]
    notes: tuple[str, ...] = ()


def find_residual_stream(model: nn.Module, inputs: Mapping[str, Any]) -> ResidualStream:
    """Find the blocks of a model and in each the updates that attention and MLP add to the residual stream.

    A block is an element of a list of modules that contains attention. All tensors of the stream's shape that enter
    and leave the modules of a block are recorded in one pass; from the block's input on, an update is an output whose
    sum with the current state appears later. If no sum with the state appears but one with a norm of it does, the
    norm is part of the stream. If the block's output is its input plus two outputs, they are parallel.

    Args:
        model: any module; nothing in it is changed.
        inputs: keyword arguments of one forward pass. A few tokens are enough; not all of them may be padding.

    Returns:
        One :class:`BlockCall` for every call of a block.

    Example:
        >>> model = massieu.nn.Transformer(8, 1, 2, vocabulary=9)
        >>> block = find_residual_stream(model, {"inputs": torch.arange(6)[None]}).blocks[0]
        >>> [(sublayer.kind, sublayer.update.path) for sublayer in block.sublayers]
        [('attention', 'attention'), ('mlp', 'feed_forward')]
    """
    recorder = Recorder(model)
    attention: list[tuple[int, AttentionCall]] = []
    observed = tap(model, lambda call: attention.append((recorder.clock, call)), this_thread=True)
    with torch.no_grad(), recorder.recording(), observed:
        model(**inputs)
    candidates = [block_updates(call, recorder) for call in recorder.calls if call.path in recorder.candidates]
    return _number(_innermost(candidates), [(time, call.stack, call.layer) for time, call in attention])


def _innermost(candidates: list[BlockUpdates]) -> list[BlockUpdates]:
    """Of candidates that contain each other, the innermost that has attention and MLP, or else attention alone."""

    def rank(updates: BlockUpdates) -> tuple[int, int]:
        quality = 2 if updates.complete else 1 if updates.sublayers else 0
        return quality, updates.call.path.count(".")

    def contains(first: ModuleCall, second: ModuleCall) -> bool:
        return first.begin <= second.begin and second.end <= first.end

    chosen: list[BlockUpdates] = []
    for updates in sorted(candidates, key=rank, reverse=True):
        others = [other.call for other in chosen]
        if not any(contains(updates.call, other) or contains(other, updates.call) for other in others):
            chosen.append(updates)
    return sorted(chosen, key=lambda updates: updates.call.begin)


def _number(chosen: list[BlockUpdates], attention: list[tuple[int, str, int]]) -> ResidualStream:
    """Give every block the stack and the number of the attention observed in it."""
    blocks: list[BlockCall] = []
    notes: list[str] = []
    for updates in chosen:
        call = updates.call
        observed = [(stack, layer) for time, stack, layer in attention if call.begin <= time < call.end]
        if not observed and attention:
            notes.append(f"block {call.path} has no softmax attention that was observed and is left out of the layers")
            continue
        stack, layer = observed[0] if observed else ("encoder", len(blocks))
        number = sum(block.name == call.path for block in blocks)
        if updates.problem is not None:
            notes.append(f"block {call.path} could not be read: {updates.problem}; its columns are empty")
        blocks.append(BlockCall(call.path, number, stack, layer, updates.sublayers, updates.parallel, updates.problem))
    if not blocks:
        notes.append("no block was found: a block is an element of a ModuleList that contains an attention module")
    return ResidualStream(tuple(blocks), tuple(notes))
