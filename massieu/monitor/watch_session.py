"""Watch a model while it trains: one line around any training loop."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from massieu.checks import MissingPackageError, UserError
from massieu.inspection.run import NotObservable
from massieu.kernels.graphs import call_eagerly
from massieu.monitor.console import Console
from massieu.monitor.delivery import Delivery
from massieu.monitor.display import in_one_line, last_reading
from massieu.monitor.flags import OF_ANY_PASS, RULES, Flags, Rule
from massieu.monitor.messages import cause, tell
from massieu.monitor.observation import Listening
from massieu.monitor.quantities import HEADS, LAYERS, chosen
from massieu.monitor.reading import Flag, Place, Reading
from massieu.monitor.restore_state import unnoticed
from massieu.monitor.sinks import TOOLS, Tool, open_sink
from massieu.monitor.steps import Steps, Updates
from massieu.monitor.sums import Tally
from massieu.taps import Tap
from massieu.taps.passes import recomputes
from massieu.taps.structure import is_compiled

if TYPE_CHECKING:
    import pandas

__all__ = ["Watch", "refuse_copies", "watch"]

COMPILED = "the model is compiled: each reading runs a forward pass of its own, uncompiled"
_WATCHED: weakref.WeakSet[nn.Module] = weakref.WeakSet()

Gather = Callable[[list[Tally]], list[Tally]]


def watch(
    model: nn.Module,
    every: int = 100,
    log: Any = None,
    heads: bool = False,
    quantities: Iterable[str] | Literal["all"] = "all",
    *,
    start: int = 0,
    rules: Sequence[Rule] = RULES,
    gather: Gather | None = None,
    console: bool = True,
    training: bool = True,
) -> Watch:
    r"""Read the thermodynamics of a model's attention now and then while it trains.

    At steps 0, ``every``, 2 ``every`` and so on, the forward pass is listened to and becomes a :class:`Reading`:
    entropy, log Z, scores and sinks of every head, the size of its weights, the likeness of tokens, and flags. In
    between, one hook compares two numbers. Weights, gradients and random numbers are those of an unwatched run, to the
    last bit.

    A step is what happens between two changes of the weights, so that accumulated gradients count as one step and
    evaluation as none. Changes are seen where an optimizer of torch makes them, or anything that writes parameters in
    place; in other loops, and where you want to count yourself, call :meth:`Watch.step` behind each update. Of several
    passes of one step the first is read. A pass in eval mode or without gradients counts as evaluation: call the
    model's ``train()`` before the loop. A line on the logger ``massieu.watch`` says so where weights change and nothing
    was ever read. With ``training=False`` every pass is a step and can be read, also the pass of each token in
    ``generate``.

    Nothing that fails in a reading ends the training: it is logged once, and the watch reads no more.

    A compiled model is read in a pass of its own that runs uncompiled, before the compiled one: a reading then costs a
    forward pass more. Random numbers, buffers, and tensors, numbers and generators that modules hold as attributes are
    put back; what a forward pass changes elsewhere, such as lists that it appends to, changes twice at a reading. Pass
    what ``torch.compile`` returned.

    Args:
        model: any module with attention that :func:`massieu.taps.tap` can hear.
        every: how many steps lie between two readings.
        log: where readings go when their step has ended: a callable, a path (``.jsonl``, ``.csv``), a name
            ("tensorboard", "wandb", "trackio"), or a list of these; they are kept in :attr:`Watch.readings` anyway.
            Tools that draw curves get a short set of series unless you name quantities or set ``heads``.
        heads: whether :attr:`Watch.history` and logs of single numbers have a series for each head, too.
        quantities: "all", or some names of :data:`massieu.monitor.WATCHED`, such as ``("log_normalizer", "entropy")``.
        start: number of the first step, for a run that is continued.
        rules: when to raise flags; of the usual ones, those for quantities that are not computed are left out.
        gather: called with the sums of each reading before they become figures: merges those of several processes.
        console: whether the main process prints a line to stderr when a flag is first raised, once for each head, and
            where the log is in the end.
        training: whether only passes of training count. False reads evaluation and generation, too: every forward pass
            is a step. Of the usual rules only "not finite" is followed then: the others are made for training.

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
    return Watch(
        *(model, every, log, heads, quantities),
        start=start,
        rules=rules,
        gather=gather,
        console=console,
        training=training,
    )


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
        start: int = 0,
        rules: Sequence[Rule] = RULES,
        gather: Gather | None = None,
        console: bool = True,
        training: bool = True,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise UserError(f"model must be a torch module, got {type(model).__name__}; pass the model that you train")
        refuse_copies(model)
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise UserError(f"every must be a whole number of steps, at least 1, got {every!r}; 100 costs nothing")
        if not isinstance(start, int) or isinstance(start, bool) or start < 0:
            raise UserError(f"start must be the number of the first step, got {start!r}; 0 for a new run")
        plain = getattr(model, "_orig_mod", model)
        if plain in _WATCHED:
            raise UserError(
                f"this {type(plain).__name__} is watched already; close the first watch, or give it several logs"
            )
        self.readings: list[Reading] = []
        self.notes: list[str] = []
        self._model, self._plain, self._every, self._per_head = model, plain, every, heads
        self._training, self._overlooked = training, 0
        # Between passes that are no training, weights do not change.
        self._wanted, self._gather = chosen(quantities) - (frozenset() if training else {"update_ratio"}), gather
        self._flags = Flags(rules if training or rules is not RULES else OF_ANY_PASS, self._wanted)
        if self._flags.left_out:
            names = ", ".join(f"{rule.name} ({rule.quantity})" for rule in self._flags.left_out)
            self.notes.append(f"not flagged, since the quantity is not computed: {names}")
        short = isinstance(quantities, str) and quantities == "all" and not heads
        self._files = _paths(log)
        self._delivery = Delivery(None if log is None else open_sink(log, per_head=heads, short=short))
        self._console = Console(console)
        self._shadow = is_compiled(model)
        if self._shadow:
            self.notes.append(COMPILED)
        self._steps, self._updates = Steps(plain, start), Updates(model)
        self._busy, self._fallback, self._due = False, True, False
        self._reads, self._told, self._closed, self._start = True, False, False, start
        self._places: dict[tuple[str, int], Place] = {}
        self._vectors: dict[tuple[str, int], Tensor] = {}
        self._ratios: dict[str, float] = {}
        self._open: Listening | None = None
        self._stack = contextlib.ExitStack()
        _WATCHED.add(plain)
        self._stack.callback(_WATCHED.discard, plain)
        self._stack.callback(model.register_forward_pre_hook(_Hook(self, "_begin"), with_kwargs=True).remove)
        self._stack.callback(model.register_forward_hook(_Hook(self, "_end"), with_kwargs=True).remove)
        self._stack.callback(self._steps.follow_optimizers().remove)
        # A script may end without closing the watch.
        self._stack.callback(weakref.finalize(self, self._delivery.flush).detach)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching: every hook is removed, every log closed."""
        self._abandon()
        self._stack.close()
        self._delivery.close()
        if not self._closed:
            self._closed = True
            self._say_the_end()

    def step(self) -> None:
        """Say that the weights were updated; from the first call on, only these calls count."""
        self._steps.update()

    def record(self, **values: Any) -> None:
        """Put numbers of your own, such as the loss, beside the flags in logs, views and :attr:`history`.

        A reading takes along the latest number of each name that was recorded since the reading before, up to the end
        of its own step. A tensor is asked for its value when the step has ended.

        Args:
            values: numbers, or tensors with one, by name.

        Example:
            >>> model = massieu.nn.Transformer(16, num_layers=2, num_heads=4, vocabulary=10)
            >>> with massieu.watch(model, every=1) as watched:
            ...     loss = model(torch.tensor([[1, 2, 3, 4]])).square().mean()
            ...     watched.record(loss=loss, rate=0.1)
            >>> sorted(watched.readings[0].recorded)
            ['loss', 'rate']
        """
        self._delivery.record(values)

    def flush(self) -> None:
        """Send the last reading to the logs now, without waiting for the end of its step."""
        self._delivery.flush()

    def __repr__(self) -> str:
        parts = [type(self._plain).__name__, *in_one_line(self.readings, self.flags)]
        if not self.readings and self._overlooked:
            parts.append(f"{self._overlooked} passes of evaluation or generation not read")
        parts += [] if self._reads else ["stopped"]
        parts += ["closed"] if self._closed else []
        parts += [f"log {', '.join(self._files)}"] if self._files else []
        return f"Watch({', '.join(parts)})"

    def _repr_html_(self) -> str:
        self._delivery.fill()
        return last_reading(repr(self), self.readings[-1] if self.readings else None, self.flags)

    @property
    def number(self) -> int:
        """Number of the step that training is in; one less than ``start`` before the first pass."""
        return self._steps.number

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
            raise MissingPackageError("history needs pandas; pip install pandas, or use Watch.readings") from None
        self._delivery.fill()
        rows = [reading.series(self._per_head) for reading in self.readings]
        return pandas.DataFrame(rows, index=pandas.Index([reading.step for reading in self.readings], name="step"))

    def _begin(self, in_graph: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before each forward pass of the model."""
        if self._busy or recomputes() or not self._takes_part:
            return
        if module is not self._model:
            self._tell_once(
                f"a copy of {type(module).__name__} ran, which is not read: massieu.watch reads the model it was given"
            )
            return
        self._abandon()  # a pass that did not end
        try:
            if self._steps_on(module):
                self._open_reading(in_graph, module, args, kwargs)
        except Exception as error:
            self._fail(cause(error))

    def _end(self, in_graph: bool, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        """After each forward pass of the model."""
        if self._due and module is self._model and not self._busy and not recomputes():
            self._close_reading()

    @property
    def _takes_part(self) -> bool:
        """Whether to count steps: a process that reads no more still exchanges sums with the others."""
        return self._reads or self._gather is not None

    def _steps_on(self, module: nn.Module) -> bool:
        """Count a pass; whether a step begins with it."""
        if not self._training:
            self._steps.update()
        elif not (module.training and torch.is_grad_enabled()):
            self._overlooked += 1
            self._steps.overlook(module.training)
            return False
        return self._steps.advance()

    def _open_reading(self, in_graph: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._delivery.flush()
        step = self._steps.number
        self._due = step % self._every == 0
        if self._due and self._reads:
            self._ratios = self._updates.compare()
            if in_graph and not self._shadow:
                self._shadow = True
                self.notes.append(COMPILED)
            self._listen(module, args, kwargs)
        if self._due and self._shadow:
            self._close_reading()
        if (step + 1) % self._every == 0 and "update_ratio" in self._wanted and self._reads:
            self._updates.remember()

    def _listen(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        places = self._places.values()
        self._open = Listening(self._model, self._wanted, self._vectors, places, fallback=self._fallback)
        if not self._shadow:
            self._open.begin(module, args, kwargs)
            return
        self._busy = True
        try:
            with unnoticed(self._plain):
                self._plain(*args, **kwargs)
        except Exception as error:  # most likely of the model's own, which will raise it again
            self._open.tallies.clear()
            self._tell_once(f"step {self._steps.number} is not read: its uncompiled pass failed with {cause(error)}")
        finally:
            self._busy = False

    def _close_reading(self) -> None:
        """End a pass that is read: what it gave becomes a reading."""
        self._due = False
        listening, self._open = self._open, None
        try:
            tallies = [] if listening is None else self._tallies(listening)
            tallies = tallies if self._gather is None else self._gather(tallies)
            if tallies:
                self._keep(self._reading(tallies))
        except NotObservable:
            raise
        except Exception as error:
            self._fail(cause(error))

    def _abandon(self) -> None:
        self._due = False
        if self._open is not None:
            self._open.close()
            self._open = None

    def _fail(self, words: str) -> None:
        """Read no more, and say why."""
        if self._reads:
            self._reads = False
            step, name = self._steps.number, type(self._plain).__name__
            self.notes.append(
                f"massieu.watch stopped reading {name} at step {step}: {words}; the training goes on, without readings"
            )
            tell(self.notes[-1])
        with contextlib.suppress(Exception):
            if self._open is not None:
                self._open.close()
        self._open = None

    def _tell_once(self, sentence: str) -> None:
        if not self._told:
            self._told = True
            tell(sentence)

    def _tallies(self, listening: Listening) -> list[Tally]:
        """What a pass gave; nothing where it failed."""
        listening.close()
        heard, tallies = listening.tap, list(listening.tallies.values())
        if listening.failure:
            self._fail(listening.failure)
            return []
        if not tallies:
            self._explain(heard)
            return []
        missing = [name for name in heard.missing if name not in heard.idle]
        if missing and self._fallback and not self.readings:
            self.notes.append(f"{heard.sentence}; not heard: {', '.join(missing)}")
            tell(self.notes[-1])
        self._fallback = bool(heard.bypassed or missing)
        for tally in tallies:
            ratio = self._ratios.get(tally.place.name.split("[")[0])
            if ratio is not None:
                tally.known["update_ratio"] = torch.tensor(ratio, dtype=torch.float64)
        return tallies

    def _explain(self, heard: Tap) -> None:
        """Say why a pass gave nothing; a model that cannot be read raises, as long as no training is lost by it."""
        step, name = self._steps.number, type(self._plain).__name__
        if heard.observed:
            self._tell_once(f"step {step} is not read: its batch is empty; this is said once")
            return
        error = NotObservable(
            f"watch heard no attention in {name} ({heard.sentence}); pass the model that"
            " holds the attention layers, and massieu.taps.tap shows what is heard"
        )
        if step == self._start and not self.readings:
            raise error
        self._fail(cause(error))

    def _keep(self, reading: Reading) -> None:
        self.readings.append(reading)
        self._delivery.put(reading)
        self._console.show(reading)

    def _say_the_end(self) -> None:
        """Say where the log is, or why there is none."""
        count = len(self.readings)
        if count and self._files:
            self._console.say(f"{count} reading{'s' * (count != 1)}; massieu watch {self._files[0]} shows the log")
        if not count and self._overlooked and self._reads and self._steps.is_waiting:
            tell(
                f"nothing was read in {self._overlooked} passes of {type(self._plain).__name__}, which were evaluation"
                " or generation; massieu.watch(model, every=1, training=False) reads every pass"
            )

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
        found = Reading(self._steps.number, places, heads, layers)
        return replace(found, flags=self._flags.update(found))


def refuse_copies(model: nn.Module) -> None:
    """Refuse ``DataParallel``, also inside the model: it runs copies in threads, which are not the model's modules."""
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        raise UserError(
            "model must run once in each process, got DataParallel, which runs copies of it in threads;"
            " start the training with torchrun, which makes it DistributedDataParallel"
        )


class _Hook:
    """A method of a watch as a hook; copies of the model, in memory or in a file, are not watched."""

    def __init__(self, owner: Watch, method: str) -> None:
        self._method: Callable[..., None] = getattr(owner, method)

    def __call__(self, *args: Any) -> None:
        # Where this runs inside a graph, the question is answered when the graph is made.
        call_eagerly(self._method, torch.compiler.is_compiling(), *args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # Takes any arguments, returns None, and is part of Python: a file with it loads without this package.
        return getattr, (contextlib.nullcontext(), "__exit__")


def _paths(log: Any) -> list[str]:
    """The files among the logs."""
    if isinstance(log, (list, tuple)) and not isinstance(log, Tool):
        return [path for each in log for path in _paths(each)]
    return [str(log)] if isinstance(log, (str, os.PathLike)) and str(log) not in TOOLS else []


def _nan(*shape: int) -> Tensor:
    return torch.full(shape, torch.nan, dtype=torch.float64)
