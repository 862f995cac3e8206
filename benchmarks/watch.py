"""What it costs to watch a model in training, against the same steps unwatched.

Processor time in one process and one thread, in turns, each way with a model and an optimizer of its own; dropout is
off, which leaves torch its fastest attention. Steps differ by more than a reading costs, so beside the ratio of whole
steps stands the share of a plain step that is spent inside the functions of the watch.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import massieu
from benchmarks.runner import Row, track
from massieu.kernels.threads import torch_threads
from massieu.monitor.observation import Observation
from massieu.monitor.pass_reader import PassReader
from massieu.monitor.step_counter import WeightUpdates

LENGTH = 1024
ROUNDS = 7
CALLS = 1000
LIGHT = ("log_normalizer", "entropy")
INSIDE = {Observation: ("__init__", "_receive", "_end_block", "close"), WeightUpdates: ("compare", "store")}
INSIDE |= {PassReader: ("reading",), massieu.Watch: ("_keep",)}


def watch() -> list[Row]:
    """Training steps of a 6-layer GPT-2, read each time (log Z and entropy, or all), seldom, and by wandb.watch."""
    (case,) = track([f"GPT-2 shape, 6 layers, T = {LENGTH}"])
    with torch_threads(1):
        return [{"case": case, **compare()}]


def compare(rounds: int = ROUNDS) -> Row:
    """Median ratios of processor time over rounds in random order, with their quartiles."""
    ways = build()
    for step, _ in ways.values():
        step()
        step()  # the second reading has the values of the last step
    order, taken, own = random.Random(0), [], {name: [] for name in ways}
    for _ in range(rounds):
        times = {}
        for name in order.sample(list(ways), len(ways)):
            with inside() as spent:
                begin = time.process_time()
                ways[name][0]()
                times[name] = time.process_time() - begin
            own[name].append(sum(spent))
        taken.append(times)
    plain = statistics.median(each["plain"] for each in taken)
    row: Row = {"rounds": rounds, "plain CPU s": plain}
    for name in ways:
        if name != "plain":
            low, middle, high = statistics.quantiles([each[name] / each["plain"] for each in taken], n=4)
            row |= {name: middle, f"{name} low": low, f"{name} high": high}
        if name.startswith("every=1"):
            row[f"{name}, inside %"] = 100 * statistics.median(own[name]) / plain
    idle = seconds_between_readings(ways["between readings"][1])
    for _, handle in ways.values():
        if handle is not None:
            handle.close()
    # A hundredth of a reading, and the hooks of the other steps, which are too short to be seen in a step.
    every = (statistics.median(own["every=1, all"]) / 100 + idle) / plain
    return row | {"between readings us": 1e6 * idle, "every=100 %": 100 * every}


def build() -> dict[str, tuple[Callable[[], object], Any]]:
    """Every way as a training step, with its watch."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(n_layer=6, n_positions=LENGTH, **dropout)).train()
    ids = torch.randint(model.config.vocab_size, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    options: dict[str, dict[str, Any] | None] = {
        "plain": None,
        "every=1, log Z and entropy": {"every": 1, "quantities": LIGHT},
        "every=1, all": {"every": 1},
        "between readings": {"every": 10**6},
    }
    ways = {}
    for name, own in options.items():
        copied = copy.deepcopy(model)
        ways[name] = (step(copied, ids), None if own is None else massieu.watch(copied, **own))
    if importlib.util.find_spec("wandb"):
        copied = copy.deepcopy(model)
        ways["wandb.watch"] = (step(copied, ids, _wandb(copied)), None)
    return ways


def step(model: torch.nn.Module, ids: torch.Tensor, logged: Callable[[], object] | None = None) -> Callable[[], object]:
    """One training step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def run() -> None:
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if logged is not None:
            logged()

    return run


@contextlib.contextmanager
def inside() -> Iterator[list[float]]:
    """Processor time of each call of the functions that read a model; none of them calls another."""
    spent: list[float] = []

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            begin = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent.append(time.process_time() - begin)

        return wrapper

    with contextlib.ExitStack() as stack:
        for owner, names in INSIDE.items():
            for name in names:
                function = getattr(owner, name)
                setattr(owner, name, timed(function))
                stack.callback(setattr, owner, name, function)
        yield spent


def seconds_between_readings(handle: massieu.Watch) -> float:
    """How long both hooks take in a step that is not read."""
    model = handle._model
    begin = time.process_time()
    for _ in range(CALLS):
        handle._begin(False, model, (), {})
        handle._end(False, model, (), {}, None)
    return (time.process_time() - begin) / CALLS


def _wandb(model: torch.nn.Module) -> Callable[[], object]:
    import wandb

    os.environ["WANDB_SILENT"] = "true"
    run = wandb.init(mode="offline", dir=tempfile.mkdtemp())
    wandb.watch(model, log="all", log_freq=1)
    return lambda: run.log({"step": 1})
