r"""Weights of every attention head of any model that a tap can observe, found by differentiation.

Queries, keys and values are linear in the tokens of ordinary attention, and its output is linear in that of the heads,
so the weights are derivatives: of the queries, keys and values in an attention call by the tokens that the attention
module received, and of the output of the module by the output of its attention function. This finds fused, interleaved,
grouped and pre-scaled projections alike, at the price of several runs and a backward pass for each layer:
:mod:`massieu.models.projections` finds fewer projections in a forward pass that runs anyway, as in training.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from massieu import geometry
from massieu.geometry import LowRank
from massieu.models.module_runs import (
    ModuleRun,
    RunningModule,
    at_rest,
    observe_calls,
    run_module,
    seeded,
    short_inputs,
)
from massieu.taps import AttentionCall

__all__ = ["HeadWeights", "each_layer", "head_weights"]

CHUNK = 2**22
"""Entries of a block of rows of a Jacobian at most."""

LEVELS = 3
"""Number of modules, from the attention module outwards, that may hold the projections of its heads."""

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 0.1}
"""Largest relative difference between two derivatives that counts as rounding."""

NOT_OBSERVED = "only scores were observed in this attention, not queries and keys: its weights are unknown"
POSITIONS = "queries and keys are turned by position: the query-key map is the one at relative position zero"
SOFTCAP = "scores are capped by tanh: the query-key map gives them before the cap"
CROSS = "queries and keys read different streams: the query-key map has no symmetric part and no whitened test"
NO_OUTPUT = "the map from the heads to the stream was not found: the output weights are unknown"
BARE_OUTPUT = "no linear map follows the heads before the next nonlinearity: their outputs are taken as they are"


@dataclass(frozen=True)
class HeadWeights:
    r"""Weights of the heads of one attention call, as :math:`W_Q, W_K, W_V` and :math:`W_O` of ``nn.Linear``.

    Attributes:
        stack: as in :class:`~massieu.taps.AttentionCall`, and so are ``layer`` and ``name``.
        heads: number of query heads.
        scale: factor of the inner products of these queries and keys.
        query: shape ``(heads, head_dim, dim)``; None, as all four, where it could not be found.
        key: shape ``(heads, head_dim, context_dim)``, repeated for heads that share it.
        value: shape ``(heads, value_dim, context_dim)``.
        output: shape ``(heads, dim, value_dim)``: into the residual stream, before any norm or scaling of the branch.
        exact: whether queries, keys, values and output are affine; if not, the weights are derivatives at one token.
        same_input: whether queries and keys read the same tokens (False in cross attention).
        note: sentences about exceptions, or None.
        input_module: path of the module whose argument ``input_argument`` holds the tokens of the queries.
    """

    stack: str
    layer: int
    name: str
    heads: int
    scale: float
    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    output: Tensor | None = None
    exact: bool = False
    same_input: bool = True
    note: str | None = None
    input_module: str = ""
    input_argument: int | str = 0

    @property
    def score_map(self) -> LowRank | None:
        r""":math:`A = \mathrm{scale}\, W_Q^\top W_K` of every head."""
        if self.query is None or self.key is None:
            return None
        return geometry.score_map(self.query, self.key, self.scale)

    @property
    def output_map(self) -> LowRank | None:
        r""":math:`B = W_O W_V` of every head."""
        if self.value is None or self.output is None:
            return None
        return geometry.output_map(self.value, self.output)


def head_weights(model: nn.Module, inputs: Mapping[str, Any] | Tensor) -> list[HeadWeights]:
    """Return the weights of every attention call of a model, in the order of the calls.

    Args:
        model: any module whose attention a tap can observe; nothing in it is changed.
        inputs: one batch for the model. The first two tokens of its first text are used; images and sounds as they are.

    Returns:
        One :class:`HeadWeights` for every call, in the dtype of the model. For large models see :func:`each_layer`.

    Example:
        >>> model = massieu.nn.Transformer(8, num_layers=1, num_heads=2, vocabulary=9)
        >>> (found,) = head_weights(model, torch.arange(6)[None])
        >>> found.exact, torch.allclose(found.query.flatten(0, 1), model.blocks[0].attention.q_proj.weight)
        (True, True)
    """
    return list(each_layer(model, inputs))


def each_layer(model: nn.Module, inputs: Mapping[str, Any] | Tensor) -> Iterator[HeadWeights]:
    """Yield the weights of :func:`head_weights` one call after the other, to hold one layer at a time."""
    # A compiled model runs uncompiled: inside a graph no call can be observed.
    model = getattr(model, "_orig_mod", model)
    with at_rest(model):
        observed = observe_calls(model, short_inputs(inputs))
    seen: dict[str, HeadWeights] = {}
    last = {call.name: at for at, (call, _) in enumerate(observed)}
    for at, (call, frames) in enumerate(observed):
        if call.name not in seen:
            with at_rest(model):
                seen[call.name] = _find(call, frames)
        # One module that is called for many layers (ALBERT) has the same weights in all of them.
        found = seen[call.name] if last[call.name] > at else seen.pop(call.name)
        yield replace(found, stack=call.stack, layer=call.layer)


def _find(call: AttentionCall, frames: Sequence[RunningModule]) -> HeadWeights:
    """Weights of one attention call, from the innermost of the running modules that holds them."""
    heads = next(x.shape[1] for x in (call.query, call.scores, call.output) if x is not None)
    found = HeadWeights(call.stack, call.layer, call.name, heads, call.scale)
    if call.query is None or call.key is None or call.value is None:
        return replace(found, note=NOT_OBSERVED)
    own = next((at for at, frame in enumerate(frames) if frame.module is call.module), len(frames) - 1)
    inner, outer = _climb([frame for frame in reversed(frames[: own + 1]) if frame.tensors()][:LEVELS], call.module)
    if inner is None:
        return replace(found, note=f"{call.name} could not be run alone: its weights are unknown")
    notes = [inner.remark, POSITIONS if inner.turned else None, SOFTCAP if call.softcap else None]
    notes += [None if inner.same_input else CROSS, NO_OUTPUT if outer is None else outer.output_remark]
    query, key, value = inner.weights()
    share = heads // key.shape[0]
    return replace(
        found,
        query=query,
        key=key.repeat_interleave(share, 0),
        value=value.repeat_interleave(heads // value.shape[0], 0),
        output=None if outer is None else outer.output_weights(),
        exact=inner.remark is None and outer is not None and outer.output_remark is None,
        same_input=inner.same_input,
        note="; ".join(note for note in notes if note) or None,
        input_module=inner.frame.name,
        input_argument=inner.reads[0].place,
    )


def _climb(levels: Sequence[RunningModule], target: nn.Module) -> tuple[_Trial | None, _Trial | None]:
    """Trials of the first module, from the attention module outwards, with input projections and with an output map."""
    inner = outer = first = None
    for level in levels:
        trial = _try(level, target)
        if trial is None:
            continue
        first = first or trial
        inner = inner or (None if trial.only_rearranges else trial)
        outer = outer or (None if trial.writes is None else trial)
        if inner and outer:
            break
    return inner or first, outer


class _Read(NamedTuple):
    """Dependence of the query, key or value of a token on the arguments of a module.

    ``row`` is the derivative of a fixed random combination of its entries by the token with the largest derivative.
    """

    place: int | str
    where: tuple[int, ...]
    row: Tensor
    alone: bool
    rearranges: bool


@dataclass(frozen=True)
class _Trial:
    """Results of the runs of one module with several tokens."""

    frame: RunningModule
    run: ModuleRun
    reads: tuple[_Read, ...]
    remark: str | None
    turned: bool
    writes: int | None
    output_remark: str | None

    @property
    def same_input(self) -> bool:
        first, second, _ = (self.run.tokens[read.place] for read in self.reads)
        return first is second

    @property
    def only_rearranges(self) -> bool:
        """True if the arguments of the module are queries, keys and values: the projections are outside of it."""
        return all(read.rearranges for read in self.reads)

    def weights(self) -> list[Tensor]:
        """Query, key and value weights, ``(heads, head_dim, dim)``."""
        found = []
        for part, read in zip(self.run.parts(0), self.reads, strict=True):
            # A token that is the only one has the index zero on all axes.
            leaf = self.run.tokens[read.place]
            where = tuple(min(at, size - 1) for at, size in zip(read.where, leaf.shape, strict=False))
            rows = _jacobian(part, leaf, (slice(None), *where))
            found.append(rows.unflatten(0, part.shape))
        return found

    def output_weights(self) -> Tensor:
        """Output weights, ``(heads, dim, value_dim)``."""
        assert self.writes is not None
        assert self.run.heads is not None
        rows = _first_token(self.run.outputs[self.writes])
        return _jacobian(rows, self.run.heads, (slice(None), 0, slice(None), 0)).transpose(0, 1)


def _try(frame: RunningModule, target: nn.Module) -> _Trial | None:
    """Run a module with its tokens, with equal ones, with others and with other heads, and compare."""
    given = frame.tensors()

    def run(change: Any, places: Iterable[int | str] = (), noise: float = 0.0) -> ModuleRun:
        changed = {id(given[place]): change(given[place]) for place in places}
        return run_module(frame, target, {place: changed.get(id(x), x) for place, x in given.items()}, noise)

    try:
        first = run(None)
        reads = _reads(first, 0)
        if reads is None:
            return None
        places = {read.place for read in reads}
        # With equal tokens, derivatives at two of them differ only if positions matter.
        equal = run(lambda x: x[(0,) * (x.dim() - 1)].expand_as(x), places)
        other = run(lambda x: x + x.square().mean().sqrt() * torch.randn(x.shape, generator=seeded()).to(x), places)
        moved = run(lambda x: x[(0,) * (x.dim() - 1)].expand_as(x), places, noise=1.0)
        here, there, last = _reads(equal, 0), _reads(other, 0), _reads(equal, -1)
        if here is None or there is None or last is None:
            return None
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, NotImplementedError):
        return None
    writes, output_remark = _writes(equal, other, moved)
    return _Trial(
        frame,
        _shortened(run, equal, here),
        here,
        _remark(here, there),
        any(not _agree(a.row, b.row) for a, b in zip(here[:2], last[:2], strict=True)),
        writes,
        output_remark,
    )


def _reads(run: ModuleRun, token: int) -> tuple[_Read, ...] | None:
    """Dependence of query, key and value of a token on the arguments; None if one of them depends on none."""
    if run.call is None:
        return None
    found = []
    for part in run.parts(token):
        seed = torch.randn(part.shape, generator=seeded()).to(part)
        leaves = {id(leaf): (place, leaf) for place, leaf in reversed(run.tokens.items())}
        places, tokens = zip(*reversed(leaves.values()), strict=True)
        slopes = torch.autograd.grad(part, tokens, seed, retain_graph=True, allow_unused=True)
        present = [(place, slope) for place, slope in zip(places, slopes, strict=True) if slope is not None]
        if not present:
            return None
        # Tokens come before tables of positions in every signature, so the first that matters are the tokens.
        place, slope = next(((place, slope) for place, slope in present if slope.any()), present[0])
        sizes = torch.linalg.vector_norm(slope.float(), dim=-1)
        where = tuple(int(at) for at in torch.unravel_index(sizes.argmax(), sizes.shape))
        largest = sizes[where].item()
        sizes[where] = 0
        row = slope[where]
        alone = bool((sizes <= TOLERANCE[slope.dtype] * largest).all())
        found.append(_Read(place, where, row, alone, _rearranges(seed, slope)))
    return tuple(found)


def _remark(here: Sequence[_Read], there: Sequence[_Read]) -> str | None:
    """Sentence about queries, keys or values that are not affine in their token."""
    names = ("queries", "keys", "values")
    bent = [name for name, a, b in zip(names, here, there, strict=True) if not _agree(a.row, b.row)]
    if bent:
        return (
            f"{_listed(bent)} are not linear in their tokens (a norm or a gate?): weights are derivatives at one token"
        )
    mixed = [name for name, read in zip(names, here, strict=True) if not read.alone]
    if mixed:
        return f"{_listed(mixed)} of a token depend on other tokens too: weights are those of its own"
    return None


def _writes(equal: ModuleRun, other: ModuleRun, moved: ModuleRun) -> tuple[int | None, str | None]:
    """Number of the first output after a map of the heads, and a sentence if that map is not linear."""
    bare = None
    for at, output in enumerate(equal.outputs):
        write = _write(equal, output)
        if write is None:
            continue
        again = [_write(run, run.outputs[at]) for run in (moved, other)]
        if any(each is None for each in again):
            continue
        by_heads, by_tokens = (each is not None and _agree(write[0], each[0]) for each in again)
        if not by_heads:
            return bare, BARE_OUTPUT
        if not write[1]:
            gated = "the output map depends on the token (a gate?): its weights are derivatives at one token"
            return at, None if by_tokens else gated
        bare = at
    return None, None


def _write(run: ModuleRun, output: Tensor) -> tuple[Tensor, bool] | None:
    """Derivative of a random combination of an output's entries by the heads, and whether it is a rearrangement."""
    rows = _first_token(output)
    if run.heads is None or rows.shape[0] not in {leaf.shape[-1] for leaf in run.tokens.values()}:
        return None
    seed = torch.randn(rows.shape, generator=seeded()).to(rows)
    (slope,) = torch.autograd.grad(rows, run.heads, seed, retain_graph=True, allow_unused=True)
    if slope is None:
        return None
    return slope[0, :, 0], _rearranges(seed, slope[0, :, 0])


def _first_token(output: Tensor) -> Tensor:
    return output[(0,) * (output.dim() - 1)] if output.dim() else output[None]


def _shortened(run: Any, equal: ModuleRun, reads: Sequence[_Read]) -> ModuleRun:
    """A run with one token instead of many, if the module takes it and nothing changes; else the run itself."""
    places = {read.place for read in reads}
    if max(equal.tokens[place].shape[:-1].numel() for place in places) == 1:
        return equal
    try:
        short: ModuleRun = run(lambda x: x[(slice(1),) * (x.dim() - 1)], places)
        same = _reads(short, 0)
        tensors = () if short.call is None else (short.call.query, short.call.key, short.call.output)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, NotImplementedError):
        return equal
    if same is None or any(x is None or x.shape[2] != 1 for x in tensors) or len(short.outputs) != len(equal.outputs):
        return equal
    return short if all(_agree(a.row, b.row) for a, b in zip(reads, same, strict=True)) else equal


def _jacobian(rows: Tensor, leaf: Tensor, pick: tuple[Any, ...]) -> Tensor:
    """Derivatives of all entries of ``rows`` by the picked part of a leaf, ``(entries, ...)``, in blocks of rows."""
    flat = rows.flatten()
    count = flat.shape[0]
    step = max(1, CHUNK // max(leaf.numel(), count))
    found = []
    for start in range(0, count, step):
        seeds = torch.zeros(min(step, count - start), count, dtype=flat.dtype, device=flat.device)
        seeds.diagonal(start).fill_(1)
        found.append(_pull_back(flat, leaf, seeds)[pick])
    return torch.cat(found)


def _pull_back(flat: Tensor, leaf: Tensor, seeds: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some operations warn that they are slow in a batch of derivatives
        try:
            return torch.autograd.grad(flat, leaf, seeds, retain_graph=True, is_grads_batched=True)[0]
        except RuntimeError:  # and some fail in one
            return torch.stack([torch.autograd.grad(flat, leaf, seed, retain_graph=True)[0] for seed in seeds])


def _agree(first: Tensor, second: Tensor) -> bool:
    size = torch.maximum(torch.linalg.vector_norm(first.float()), torch.linalg.vector_norm(second.float()))
    return bool(torch.linalg.vector_norm((first - second).float()) <= TOLERANCE[first.dtype] * size)


def _rearranges(before: Tensor, after: Tensor) -> bool:
    """Return whether the entries are the same up to order, sign and one factor, as without a projection between."""
    ordered = [x.flatten().float().abs().sort(descending=True).values for x in (before, after)]
    width = min(x.shape[0] for x in ordered)
    if ordered[1][width:].any() or not ordered[1].any():
        return False
    one, two = (x[:width] / torch.linalg.vector_norm(x[:width]) for x in ordered)
    # Copies are exact, and the sorted entries of any two large random vectors are not far from each other.
    return bool(torch.linalg.vector_norm(one - two) <= torch.finfo(before.dtype).eps + 1e-5)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
