"""Watch a model that several processes train: each listens to its own batch, and the first one writes for all."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from massieu.monitor.flags import RULES, Rule
from massieu.monitor.sums import Tally
from massieu.monitor.watch_session import Watch, refuse_copies

__all__ = ["merge_processes", "unwrap", "watch_distributed"]

FIELDS = ("total", "count", "known", "largest")


def watch_distributed(
    model: nn.Module,
    every: int = 100,
    log: Any = None,
    heads: bool = False,
    quantities: Iterable[str] | Literal["all"] = "all",
    *,
    start: int = 0,
    rules: Sequence[Rule] = RULES,
    console: bool = True,
    group: dist.ProcessGroup | None = None,
) -> Watch:
    r"""As :func:`massieu.watch`, in every process of a run of several: readings are those of the joined batch.

    Means are sums over all rows of all processes, divided by their number,

    .. math:: \bar x = \sum_r \sum_{i \in r} x_i \Big/ \sum_r n_r,

    so that a process with more padding counts less. All processes hold the merged readings and raise the same flags;
    the first one alone writes them to ``log``. Without ``torch.distributed`` this is :func:`massieu.watch`.

    Args:
        model: the module, or what ``DistributedDataParallel`` or ``Accelerator.prepare`` made of it.
        every: as there, the same in all processes, which must make the same number of steps.
        log: as there; opened by the first process only.
        heads: as there.
        quantities: as there.
        start: as there.
        rules: as there.
        console: as there; the first process prints.
        group: the processes that share the batch; all of them by default.

    Example:
        >>> model = massieu.nn.Transformer(16, num_layers=2, num_heads=4, vocabulary=10)
        >>> with watch_distributed(model, every=1) as watched:
        ...     _ = model(torch.tensor([[1, 2, 3, 4]]))
        >>> [reading.step for reading in watched.readings]
        [0]
    """
    together = dist.is_available() and dist.is_initialized()
    writes = not together or dist.get_rank(group) == 0
    gather = partial(merge_processes, group=group) if together else None
    return Watch(
        *(unwrap(model), every, log if writes else None, heads, quantities),
        start=start,
        rules=rules,
        gather=gather,
        console=console and writes,
    )


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside ``DistributedDataParallel``.

    Example:
        >>> inner = torch.nn.Linear(2, 2)
        >>> unwrap(inner) is inner
        True
    """
    refuse_copies(model)
    return model.module if isinstance(model, DistributedDataParallel) else model


def merge_processes(tallies: list[Tally], group: dist.ProcessGroup | None = None) -> list[Tally]:
    """The sums of all processes, in each of them; what ``gather`` of :func:`massieu.watch` takes.

    Processes that heard the same exchange sums, however many they are. Where one heard less, such as a layer that was
    skipped, or a sequence of a single token, which has no rank, the tallies themselves are exchanged.

    Args:
        tallies: of this process.
        group: all processes by default; each of them has to call this.
    """
    device = _device(group)
    mark = float(zlib.crc32(repr([(tally.place, key) for tally, key in _parts(tallies)]).encode()))
    # The smallest and the largest one at once.
    marks = torch.tensor([mark, -mark], dtype=torch.float64, device=device)
    dist.all_reduce(marks, dist.ReduceOp.MAX, group=group)
    if marks.tolist() == [mark, -mark]:
        return _reduced(tallies, device, group)
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, tallies, group=group)
    return _joined(found)


def _reduced(tallies: list[Tally], device: torch.device, group: dist.ProcessGroup | None) -> list[Tally]:
    merged = [Tally(tally.place) for tally in tallies]
    for fields, kind in ((FIELDS[:3], dist.ReduceOp.SUM), (FIELDS[3:], dist.ReduceOp.MAX)):
        parts = [(i, key) for i, tally in enumerate(tallies) for _, key in _parts([tally]) if key[0] in fields]
        values = [getattr(tallies[i], field)[name].double().cpu() for i, (field, name, _) in parts]
        if not values:
            continue
        flat = torch.cat([value.flatten() for value in values]).to(device)
        dist.all_reduce(flat, kind, group=group)
        pieces = flat.cpu().split([value.numel() for value in values])
        for (i, (field, name, shape)), piece in zip(parts, pieces, strict=True):
            # Weights are the same everywhere but for rounding.
            piece = piece / dist.get_world_size(group) if field == "known" else piece
            getattr(merged[i], field)[name] = piece.reshape(shape)
    return merged


def _joined(found: list[list[Tally]]) -> list[Tally]:
    merged: dict[tuple[str, int], Tally] = {}
    for tally in (tally for tallies in found for tally in tallies):
        own = merged.setdefault((tally.place.stack, tally.place.layer), Tally(tally.place))
        own.merge(tally)
        own.known = {**tally.known, **own.known}
    return list(merged.values())


def _parts(tallies: list[Tally]) -> Iterator[tuple[Tally, tuple[str, str, tuple[int, ...]]]]:
    """Every tensor of the tallies, as its field, name and shape, in an order that all processes share."""
    for tally in tallies:
        for field in FIELDS:
            values: dict[str, Tensor] = getattr(tally, field)
            yield from ((tally, (field, name, tuple(values[name].shape))) for name in sorted(values))


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Where tensors must be for a collective: of the backends, those of accelerators take no others."""
    accelerator = torch.accelerator.current_accelerator()
    hosts = ("gloo", "mpi", "undefined")  # the last: several, one for each kind of device
    if accelerator is None or any(host in dist.get_backend(group) for host in hosts):
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
