"""Watch a model while it trains: one line around any training loop."""

from __future__ import annotations

import contextlib
import random
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from massieu.inspection.run import NotObservable
from massieu.kernels.graphs import call_eagerly
from massieu.monitor.flags import RULES, Flags, Rule
from massieu.monitor.listening import Listening
from massieu.monitor.quantities import HEADS, LAYERS, chosen
from massieu.monitor.reading import Flag, Place, Reading
from massieu.monitor.tallies import Tally
from massieu.taps.structure import attention_modules
from massieu.taps.tap import _is_compiled, _recomputes

if TYPE_CHECKING:
    import pandas

__all__ = ["Watch", "watch"]

PATIENCE = 1000  # training passes without a change of the weights, before somebody is told
COMPILED = "the model is compiled: each reading runs a forward pass of its own, uncompiled"
_WATCHED: weakref.WeakSet[nn.Module] = weakref.WeakSet()

Receiver = Callable[[Reading], object]
Gather = Callable[[list[Tally]], list[Tally]]


def watch(
    model: nn.Module,
    every: int = 100,
    log: Any = None,
    heads: bool = False,
    quantities: Iterable[str] | Literal["all"] = "all",
    *,
    rules: Sequence[Rule] = RULES,
    gather: Gather | None = None,
) -> Watch:
    r"""Read the thermodynamics of a model's attention now and then while it trains.

    At steps 0, ``every``, 2 ``every`` and so on, the forward pass is listened to and becomes a :class:`Reading`:
    entropy, log Z, scores and sinks of every head, the size of its weights, the likeness of tokens, and flags. In
    between, one hook compares two numbers. Weights, gradients and random numbers are those of an unwatched run, to the
    last bit.

    A step is what happens between two changes of the weights, so that accumulated gradients count as one step and
    evaluation as none. Changes are seen where an optimizer of torch makes them, or anything that writes parameters in
    place; in other loops, and where you want to count yourself, call :meth:`Watch.step` behind each update. Of several
    passes of one step the first is read.

    A compiled model is read in a pass of its own that runs uncompiled, with random numbers and buffers put back, before
    the compiled one: a reading then costs a forward pass more. Pass what ``torch.compile`` returned.

    Args:
        model: any module with attention that :func:`massieu.taps.tap` can hear.
        every: how many steps lie between two readings.
        log: where readings go: a callable, a path (``.jsonl``, ``.csv``), a name ("tensorboard", "wandb", "trackio"),
            or a list of these; readings are kept in :attr:`Watch.readings` anyway.
        heads: whether :attr:`Watch.history` and logs of single numbers have a series for each head, too.
        quantities: "all", or some names of :data:`massieu.monitor.WATCHED`, such as ``("log_normalizer", "entropy")``.
        rules: when to raise flags.
        gather: called with the sums of each reading before they become figures: merges those of several processes.

    Returns:
        A handle that is also a context manager; leaving it, by whatever way, removes every hook.

    Example:
        >>> model = massieu.nn.Transformer(16, num_layers=2, num_heads=4, vocabulary=10)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with massieu.watch(model, every=2) as watched:
        ...     for _ in range(4):
        ...         model(torch.tensor([[1, 2, 3, 4]])).square().mean().backward()
        ...         optimizer.step()
        >>> [reading.step for reading in watched.readings]
        [0, 2]
        >>> bool(watched.readings[0].heads["entropy"].shape == (2, 4))
        True
    """
    return Watch(model, every, log, heads, quantities, rules=rules, gather=gather)


class Watch:
    """A model that is watched; see :func:`watch` for the arguments.

    Attributes:
        readings: every reading so far.
        notes: sentences about how the model is heard.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 100,
        log: Any = None,
        heads: bool = False,
        quantities: Iterable[str] | Literal["all"] = "all",
        *,
        rules: Sequence[Rule] = RULES,
        gather: Gather | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch module, got {type(model).__name__}; pass the model that you train")
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"every must be a whole number of steps, at least 1, got {every!r}; 100 costs nothing")
        plain = getattr(model, "_orig_mod", model)
        if plain in _WATCHED:
            raise RuntimeError(
                f"this {type(plain).__name__} is watched already; close the first watch, or give it several logs"
            )
        self.readings: list[Reading] = []
        self.notes: list[str] = []
        self._model, self._plain, self._every, self._per_head = model, plain, every, heads
        self._wanted, self._flags, self._gather = chosen(quantities), Flags(rules), gather
        self._receivers = _receivers(log, heads)
        self._parameters = [p for p in plain.parameters() if not p.is_inference()]
        self._shadow = any(_is_compiled(module) for module in model.modules())
        if self._shadow:
            self.notes.append(COMPILED)
        self._step, self._manual, self._due, self._passes, self._busy = -1, False, True, 0, False
        self._version, self._fallback = 0, True
        self._places: dict[tuple[str, int], Place] = {}
        self._vectors: dict[tuple[str, int], Tensor] = {}
        self._before: dict[str, list[Tensor]] = {}
        self._ratios: dict[str, float] = {}
        self._open: Listening | None = None
        self._stack = contextlib.ExitStack()
        _WATCHED.add(plain)
        self._stack.callback(_WATCHED.discard, plain)
        self._stack.callback(model.register_forward_pre_hook(_Hook(self, "_begin"), with_kwargs=True).remove)
        self._stack.callback(model.register_forward_hook(_Hook(self, "_end"), with_kwargs=True).remove)
        self._stack.callback(register_optimizer_step_post_hook(_optimized(self)).remove)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching: every hook is removed, every log closed."""
        self._abandon()
        self._stack.close()
        for receiver in self._receivers:
            getattr(receiver, "close", lambda: None)()
        self._receivers = []

    def step(self) -> None:
        """Say that the weights were updated; from the first call on, only these calls count."""
        self._manual = self._due = True

    @property
    def flags(self) -> tuple[Flag, ...]:
        """The flags that are raised now."""
        return self._flags.active

    @property
    def history(self) -> pandas.DataFrame:
        """One row for each reading, by its step; columns as in :meth:`Reading.series`."""
        try:
            import pandas
        except ModuleNotFoundError:
            raise ModuleNotFoundError("history needs pandas; pip install pandas, or use Watch.readings") from None
        rows = [reading.series(self._per_head) for reading in self.readings]
        return pandas.DataFrame(rows, index=pandas.Index([reading.step for reading in self.readings], name="step"))

    def _begin(self, in_graph: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before each forward pass of the model."""
        if self._busy or _recomputes():
            return
        self._abandon()  # a pass that did not end
        if not (module.training and torch.is_grad_enabled()) or not self._advances():
            return
        if self._step % self._every == 0:
            self._compare()
            if in_graph and not self._shadow:
                self._shadow = True
                self.notes.append(COMPILED)
            self._listen(module, args, kwargs)
        if (self._step + 1) % self._every == 0 and "update_ratio" in self._wanted:
            self._remember()

    def _advances(self) -> bool:
        """Whether this training pass is the first one of a step; counts it."""
        version = 0 if self._manual else sum(p._version for p in self._parameters)
        advances = self._due or (not self._manual and version != self._version)
        self._version, self._due = version, False
        self._passes = 0 if advances else self._passes + 1
        self._step += advances
        if self._passes == PATIENCE:
            warnings.warn(
                f"the weights have not changed in {PATIENCE} training passes, so step {self._step} has not ended;"
                " call the watch's step() behind each update",
                stacklevel=2,
            )
        return advances

    def _listen(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._open = Listening(self._model, self._wanted, self._vectors, fallback=self._fallback)
        if not self._shadow:
            self._open.begin(module, args, kwargs)
            return
        self._busy = True
        try:
            with _unnoticed(self._plain):
                self._plain(*args, **kwargs)
        finally:
            self._busy = False
            listening, self._open = self._open, None
            listening.close()
        self._read(listening)

    def _end(self, in_graph: bool, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        """After each forward pass of the model."""
        if self._open is not None and not self._busy and not _recomputes():
            listening, self._open = self._open, None
            listening.close()
            self._read(listening)

    def _abandon(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def _read(self, listening: Listening) -> None:
        heard = listening.tap
        if not listening.tallies:
            raise NotObservable(
                f"watch heard no attention in {type(self._plain).__name__} ({heard.sentence}); pass the model that"
                " holds the attention layers, and massieu.taps.tap shows what is heard"
            )
        missing = [name for name in heard.missing if name not in heard.idle]
        if missing and self._fallback and not self.readings:
            self.notes.append(f"{heard.sentence}; not heard: {', '.join(missing)}")
            warnings.warn(self.notes[-1], stacklevel=2)
        self._fallback = bool(heard.bypassed or missing)
        tallies = list(listening.tallies.values())
        for tally in tallies:
            ratio = self._ratios.get(tally.place.name.split("[")[0])
            if ratio is not None:
                tally.known["update_ratio"] = torch.tensor(ratio, dtype=torch.float64)
        reading = self._reading(tallies if self._gather is None else self._gather(tallies))
        self.readings.append(reading)
        for receiver in self._receivers:
            receiver(reading)

    def _reading(self, tallies: list[Tally]) -> Reading:
        self._places |= {(tally.place.stack, tally.place.layer): tally.place for tally in tallies}
        places = tuple(self._places.values())
        at = {(place.stack, place.layer): i for i, place in enumerate(places)}
        most = max(place.heads for place in places)
        heads = {name: _nan(len(places), most) for name in HEADS if name in self._wanted}
        layers = {name: _nan(len(places)) for name in LAYERS if name in self._wanted}
        for tally in tallies:
            row = at[tally.place.stack, tally.place.layer]
            for name, values in (*heads.items(), *layers.items()):
                value = tally.value(name)
                if value is not None:
                    values[(row, slice(0, len(value))) if value.dim() else row] = value
        found = Reading(self._step, places, heads, layers)
        return Reading(self._step, places, heads, layers, self._flags.update(found))

    def _weights(self) -> Iterator[tuple[str, list[Tensor]]]:
        for name, module in attention_modules(self._model).items():
            yield name, [p.detach() for p in module.parameters() if p.dim() > 1 and p.is_floating_point()]

    def _remember(self) -> None:
        self._before = {name: [weight.clone() for weight in weights] for name, weights in self._weights()}

    def _compare(self) -> None:
        """How much the last step changed the weights, if it is known where they were."""
        self._ratios = {}
        for name, weights in self._weights() if self._before else ():
            old = self._before[name]
            if old and all(x.shape == y.shape for x, y in zip(old, weights, strict=True)):
                change = sum(float((x - y).float().square().sum()) for x, y in zip(weights, old, strict=True))
                size = sum(float(x.float().square().sum()) for x in old)
                self._ratios[name] = (change / size) ** 0.5 if size else float("nan")
        self._before = {}


class _Hook:
    """A method of a watch as a hook; copies of the model, in memory or in a file, are not watched."""

    def __init__(self, owner: Watch, method: str) -> None:
        self._method: Callable[..., None] = getattr(owner, method)

    def __call__(self, *args: Any) -> None:
        # Where this runs inside a graph, the question is answered when the graph is made.
        call_eagerly(self._method, torch.compiler.is_compiling(), *args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _silent, ()


def _silent() -> Callable[..., None]:
    return _nothing


def _nothing(*_: Any) -> None:
    """The hook of a copy."""


def _optimized(owner: Watch) -> Callable[..., None]:
    """A hook of all optimizers: some write parameters where no version tells."""
    mine, known = weakref.ref(owner), {id(p) for p in owner._parameters}

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        watched = mine()
        if watched is not None and not watched._manual and not watched._due:
            watched._due = any(id(p) in known for group in optimizer.param_groups for p in group["params"])

    return hook


@contextlib.contextmanager
def _unnoticed(model: nn.Module) -> Iterator[None]:
    """What runs inside leaves random numbers, buffers and the casts of autocast as they were."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    numbers, cached = random.getstate(), torch.is_autocast_cache_enabled()
    # A cast that is made without gradients would be used by the pass that needs them.
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        random.setstate(numbers)
        with torch.no_grad():
            for buffer, value in buffers:
                # By value: batch norms write without a new version, and what was not written may be part of a graph.
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def _nan(*shape: int) -> Tensor:
    return torch.full(shape, torch.nan, dtype=torch.float64)


def _receivers(log: Any, per_head: bool) -> list[Receiver]:
    if log is None:
        return []
    logs = list(log) if isinstance(log, (list, tuple)) else [log]
    if all(callable(one) for one in logs):
        return logs
    from massieu.monitor.sinks import open_sink

    return [one if callable(one) else open_sink(one, per_head=per_head) for one in logs]
