"""Watch a model that several processes train: each reads its own batch, and the first one writes for all."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from massieu.monitor.sums import PlaceSums
from massieu.monitor.watch_options import WatchOptions
from massieu.monitor.watch_session import Watch, check_model

__all__ = ["merge_processes", "unwrap", "watch_distributed", "watch_joined"]

FIELDS = ("total", "count", "known", "largest")


def watch_distributed(model: nn.Module, *, group: dist.ProcessGroup | None = None, **options: Any) -> Watch:
    r"""Watch a model in every process of a distributed run; readings are those of the joined batch.

    Means are sums over all rows of all processes, divided by their number,

    .. math:: \bar x = \sum_r \sum_{i \in r} x_i \Big/ \sum_r n_r,

    so that a process with more padding counts less. All processes hold the merged readings and raise the same flags;
    the first one alone writes to ``log`` and the console. Without ``torch.distributed`` this is :func:`massieu.watch`.

    Args:
        model: the module, or the result of ``DistributedDataParallel`` or ``Accelerator.prepare``.
        group: the processes that share the batch; all of them by default. They must make the same number of steps.
        options: those of :func:`massieu.watch` but ``gather``; ``every`` is the same in all processes.

    Example:
        >>> model = massieu.nn.Transformer(16, num_layers=2, num_heads=4, vocabulary=10)
        >>> with watch_distributed(model, every=1) as watched:
        ...     _ = model(torch.tensor([[1, 2, 3, 4]]))
        >>> [reading.step for reading in watched.readings]
        [0]
    """
    return watch_joined(model, WatchOptions.from_keywords(options, "gather"), group)


def watch_joined(model: nn.Module, options: WatchOptions, group: dist.ProcessGroup | None = None) -> Watch:
    """Watch a model in every process, as :func:`watch_distributed` does."""
    if dist.is_available() and dist.is_initialized():
        first = dist.get_rank(group) == 0
        gather = partial(merge_processes, group=group)
        log = options.log if first else None
        options = replace(options, gather=gather, log=log, console=options.console and first)
    return Watch(unwrap(model), options)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside ``DistributedDataParallel``.

    Example:
        >>> inner = torch.nn.Linear(2, 2)
        >>> unwrap(inner) is inner
        True
    """
    check_model(model)
    return model.module if isinstance(model, DistributedDataParallel) else model


def merge_processes(sums: list[PlaceSums], group: dist.ProcessGroup | None = None) -> list[PlaceSums]:
    """Return the sums of all processes, in each of them, as ``gather`` of :func:`massieu.watch` does.

    Processes with sums of the same shapes reduce them. Where they differ, as after a layer that one process skipped, or
    a sequence of a single token, which has no rank, the objects themselves are exchanged.

    Args:
        sums: sums of this process.
        group: all processes by default; each of them has to call this.
    """
    device = _device(group)
    mark = float(zlib.crc32(repr([(own.place, key) for own, key in _tensors(sums)]).encode()))
    # The smallest and the largest one at once.
    marks = torch.tensor([mark, -mark], dtype=torch.float64, device=device)
    dist.all_reduce(marks, dist.ReduceOp.MAX, group=group)
    if marks.tolist() == [mark, -mark]:
        return _reduced(sums, device, group)
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, sums, group=group)
    return _joined(found)


def _reduced(sums: list[PlaceSums], device: torch.device, group: dist.ProcessGroup | None) -> list[PlaceSums]:
    merged = [PlaceSums(own.place) for own in sums]
    for fields, kind in ((FIELDS[:3], dist.ReduceOp.SUM), (FIELDS[3:], dist.ReduceOp.MAX)):
        keys = [(i, key) for i, own in enumerate(sums) for _, key in _tensors([own]) if key[0] in fields]
        values = [getattr(sums[i], field)[name].double().cpu() for i, (field, name, _) in keys]
        if not values:
            continue
        flat = torch.cat([value.flatten() for value in values]).to(device)
        dist.all_reduce(flat, kind, group=group)
        reduced = flat.cpu().split([value.numel() for value in values])
        for (i, (field, name, shape)), value in zip(keys, reduced, strict=True):
            # Weights are the same everywhere but for rounding.
            value = value / dist.get_world_size(group) if field == "known" else value
            getattr(merged[i], field)[name] = value.reshape(shape)
    return merged


def _joined(processes: list[list[PlaceSums]]) -> list[PlaceSums]:
    merged: dict[tuple[str, int], PlaceSums] = {}
    for own in (own for sums in processes for own in sums):
        joined = merged.setdefault((own.place.stack, own.place.layer), PlaceSums(own.place))
        joined.merge(own)
        joined.known = {**own.known, **joined.known}
    return list(merged.values())


def _tensors(sums: list[PlaceSums]) -> Iterator[tuple[PlaceSums, tuple[str, str, tuple[int, ...]]]]:
    """Yield field, name and shape of every tensor of the sums, in an order that all processes share."""
    for own in sums:
        for field in FIELDS:
            values: dict[str, Tensor] = getattr(own, field)
            yield from ((own, (field, name, tuple(values[name].shape))) for name in sorted(values))


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device of a collective: backends of accelerators need tensors there."""
    accelerator = torch.accelerator.current_accelerator()
    hosts = ("gloo", "mpi", "undefined")  # the last: several, one for each kind of device
    if accelerator is None or any(host in dist.get_backend(group) for host in hosts):
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
