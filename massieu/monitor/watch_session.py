"""Watch a model while it trains: one line around any training loop."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from massieu.checks import NotObservable, UserError, optional_package
from massieu.kernels.graphs import call_eagerly
from massieu.monitor.console import Console
from massieu.monitor.delivery import Delivery
from massieu.monitor.display import reading_table, state_words
from massieu.monitor.flags import RULES, Rule
from massieu.monitor.messages import error_summary, log_message
from massieu.monitor.observation import Observation
from massieu.monitor.pass_reader import PassReader
from massieu.monitor.reading import Flag, Reading
from massieu.monitor.step_counter import StepCounter
from massieu.monitor.sums import PlaceSums
from massieu.monitor.watch_options import Gather, WatchOptions
from massieu.taps import Tap
from massieu.taps.passes import recomputes

if TYPE_CHECKING:
    import pandas

__all__ = ["Watch", "check_model", "watch"]

COMPILED = "the model is compiled: each reading runs a forward pass of its own, uncompiled"
_WATCHED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


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
    r"""Read the thermodynamics of a model's attention at regular steps while it trains.

    At steps 0, ``every``, 2 ``every`` and so on, the forward pass is observed and becomes a :class:`Reading`: entropy,
    log Z, scores and sinks of every head, the size of its weights, the similarity of tokens, and flags. In other steps
    one hook compares two numbers. Weights, gradients and random numbers are those of an unwatched run, to the last bit.

    A step lies between two changes of the weights, so that accumulated gradients count as one step and evaluation as
    none. Changes are detected when an optimizer of torch makes them, or when parameters are written in place; in other
    loops, or to count yourself, call :meth:`Watch.step` after each update. Of several passes in one step the first is
    read. A pass in eval mode or without gradients counts as evaluation: call the model's ``train()`` before the loop.
    If weights change and nothing was ever read, a message on the logger ``massieu.watch`` says so. With
    ``training=False`` every pass is a step and can be read, also the pass of each token in ``generate``.

    An error in a reading does not end the training: it is logged once, and the watch stops reading.

    A compiled model is read in a separate pass that runs uncompiled, before the compiled one: a reading then costs one
    more forward pass. Random numbers, buffers, and tensors, numbers and generators that modules hold as attributes are
    restored; other side effects of a pass, such as lists that it appends to, happen twice at a reading. Pass the result
    of ``torch.compile``.

    Args:
        model: any module with attention that :func:`massieu.taps.tap` can observe.
        every: number of steps between two readings.
        log: destination for readings at the end of their step: a callable, a path (``.jsonl``, ``.csv``), a name
            ("tensorboard", "wandb", "trackio"), or a list of these; :attr:`Watch.readings` keeps them anyway.
            Trackers get a short set of series unless you name quantities or set ``heads``.
        heads: whether :attr:`Watch.history` and logs of single numbers have a series for each head, too.
        quantities: "all", or some names of :data:`massieu.monitor.WATCHED`, such as ``("log_normalizer", "entropy")``.
        start: number of the first step, for a continued run.
        rules: rules of the flags; of the default rules, those for quantities that are not computed are left out.
        gather: called with the sums of each reading before they become values, to merge those of several processes.
        console: whether the main process prints a line to stderr when a flag is first raised, once for each head, and
            the path of the log at the end.
        training: whether only training passes count. False reads evaluation and generation, too: every forward pass is
            a step. Of the default rules only "not finite" is then used: the others are made for training.

    Returns:
        A handle that is also a context manager; leaving it always removes every hook.

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
    return Watch(model, WatchOptions(every, log, heads, quantities, start, rules, gather, console, training))


class Watch:
    """Handle of a watched model, as :func:`watch` returns it.

    Attributes:
        readings: all readings so far.
        notes: sentences about the observation of the model.
    """

    def __init__(self, model: nn.Module, options: WatchOptions) -> None:
        check_model(model)
        self.readings: list[Reading] = []
        self.notes: list[str] = []
        self._model, self._options = model, options
        self._reader = PassReader(model, options.wanted)
        plain = self._reader.plain
        self._name = type(plain).__name__
        if plain in _WATCHED:
            raise UserError(f"this {self._name} is watched already; close the first watch, or give it several logs")
        self._flags = options.new_flags()
        if self._flags.left_out:
            names = ", ".join(f"{rule.name} ({rule.quantity})" for rule in self._flags.left_out)
            self.notes.append(f"not flagged, since the quantity is not computed: {names}")
        self._delivery = Delivery(options.new_sink())
        self._console = Console(options.console)
        if self._reader.runs_apart:
            self.notes.append(COMPILED)
        self._steps = StepCounter(plain, options.start)
        self._skipped, self._due = 0, False
        self._reads, self._warned, self._closed = True, False, False
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
        """Stop watching: remove every hook and close every log."""
        self._abandon()
        self._stack.close()
        self._delivery.close()
        if not self._closed:
            self._closed = True
            self._report()

    def step(self) -> None:
        """Count an update of the weights; from the first call on, only these calls count."""
        self._steps.update()

    def record(self, **values: Any) -> None:
        """Record numbers of your own, such as the loss, for logs, views and :attr:`history`.

        A reading gets the latest number of each name between the reading before and the end of its own step. The value
        of a tensor is read at the end of the step.

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
        parts = [self._name, *state_words(self.readings, self.flags)]
        if not self.readings and self._skipped:
            parts.append(f"{self._skipped} passes of evaluation or generation not read")
        parts += [] if self._reads else ["stopped"]
        parts += ["closed"] if self._closed else []
        files = self._options.files
        parts += [f"log {', '.join(files)}"] if files else []
        return f"Watch({', '.join(parts)})"

    def _repr_html_(self) -> str:
        self._delivery.fill()
        return reading_table(repr(self), self.readings[-1] if self.readings else None, self.flags)

    @property
    def number(self) -> int:
        """Number of the current step; one less than ``start`` before the first pass."""
        return self._steps.number

    @property
    def flags(self) -> tuple[Flag, ...]:
        """Currently raised flags."""
        return self._flags.active

    @property
    def history(self) -> pandas.DataFrame:
        """Table with a row for each reading, by its step; columns as in :meth:`Reading.series`."""
        pandas = optional_package("pandas", "Watch.history", "inspect")
        self._delivery.fill()
        rows = [reading.series(self._options.heads) for reading in self.readings]
        return pandas.DataFrame(rows, index=pandas.Index([reading.step for reading in self.readings], name="step"))

    def _begin(self, in_graph: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run before each forward pass of the model."""
        if self._reader.is_running or recomputes() or not self._takes_part:
            return
        if module is not self._model:
            self._log_once(
                f"a copy of {type(module).__name__} ran, which is not read: massieu.watch reads the model it was given"
            )
            return
        self._abandon()  # a pass that did not end
        try:
            if self._begins_step(module):
                self._begin_step(in_graph, module, args, kwargs)
        except Exception as error:
            self._fail(error_summary(error))

    def _end(self, in_graph: bool, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        """Run after each forward pass of the model."""
        if self._due and module is self._model and not self._reader.is_running and not recomputes():
            self._finish_reading()

    @property
    def _takes_part(self) -> bool:
        """True if steps are counted: a process that stopped reading still exchanges sums with the others."""
        return self._reads or self._options.gather is not None

    def _begins_step(self, module: nn.Module) -> bool:
        """Count a pass, and return whether a step begins with it."""
        if not self._options.training:
            self._steps.update()
        elif not (module.training and torch.is_grad_enabled()):
            self._skipped += 1
            self._steps.skip(module.training)
            return False
        return self._steps.advance()

    def _begin_step(self, in_graph: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._delivery.flush()
        step, every = self._steps.number, self._options.every
        self._due = step % every == 0
        if self._due and self._reads:
            if in_graph and not self._reader.runs_apart:
                self._reader.runs_apart = True
                self.notes.append(COMPILED)
            failure = self._reader.begin(module, args, kwargs)
            if failure:
                self._log_once(f"step {step} is not read: its uncompiled pass failed with {failure}")
        if self._due and self._reader.runs_apart:
            self._finish_reading()
        if (step + 1) % every == 0 and self._reads:
            self._reader.store_weights()

    def _finish_reading(self) -> None:
        """Remove the hooks of an observed pass, and make its sums a reading."""
        self._due = False
        try:
            observation = self._reader.end()
            sums = [] if observation is None else self._checked_sums(observation)
            sums = sums if self._options.gather is None else self._options.gather(sums)
            if sums:
                self._keep(self._reader.reading(self._steps.number, sums))
        except NotObservable:
            raise
        except Exception as error:
            self._fail(error_summary(error))

    def _abandon(self) -> None:
        self._due = False
        self._reader.end()

    def _fail(self, reason: str) -> None:
        """Stop reading, and log the reason."""
        if self._reads:
            self._reads = False
            self.notes.append(
                f"massieu.watch stopped reading {self._name} at step {self._steps.number}: {reason}; the training goes"
                " on, without readings"
            )
            log_message(self.notes[-1])
        with contextlib.suppress(Exception):
            self._reader.end()

    def _log_once(self, sentence: str) -> None:
        if not self._warned:
            self._warned = True
            log_message(sentence)

    def _checked_sums(self, observation: Observation) -> list[PlaceSums]:
        """Return the sums of a pass, or none with a message about the reason."""
        tap = observation.tap
        if observation.failure:
            self._fail(observation.failure)
            return []
        if not observation.sums:
            self._explain(tap)
            return []
        missing = [name for name in tap.missing if name not in tap.idle]
        if missing and self._reader.fallback and not self.readings:
            self.notes.append(f"{tap.sentence}; not observed: {', '.join(missing)}")
            log_message(self.notes[-1])
        self._reader.fallback = bool(tap.bypassed or missing)
        return self._reader.sums(observation)

    def _explain(self, tap: Tap) -> None:
        """Log why a pass has no sums; raise at the first one, where no training is lost."""
        step = self._steps.number
        if tap.observed:
            self._log_once(f"step {step} is not read: its batch is empty; later empty batches are not reported")
            return
        error = NotObservable(
            f"watch observed no attention in {self._name} ({tap.sentence}); pass the model that holds the attention"
            " layers, and massieu.taps.tap shows which modules are observed"
        )
        if step == self._options.start and not self.readings:
            raise error
        self._fail(error_summary(error))

    def _keep(self, reading: Reading) -> None:
        reading = replace(reading, flags=self._flags.update(reading))
        self.readings.append(reading)
        self._delivery.put(reading)
        self._console.show(reading)

    def _report(self) -> None:
        """Print the path of the log, or log why there are no readings."""
        count, files = len(self.readings), self._options.files
        if count and files:
            self._console.print(f"{count} reading{'s' * (count != 1)}; massieu watch {files[0]} shows the log")
        if not count and self._skipped and self._reads and self._steps.is_waiting:
            log_message(
                f"nothing was read in {self._skipped} passes of {self._name}, which were evaluation or generation;"
                " massieu.watch(model, every=1, training=False) reads every pass"
            )


def check_model(model: nn.Module) -> None:
    """Refuse other objects, and ``DataParallel``, also inside the model: it runs copies of modules in threads."""
    if not isinstance(model, nn.Module):
        raise UserError(f"model must be a torch module, got {type(model).__name__}; pass the model that you train")
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        raise UserError(
            "model must run once in each process, got DataParallel, which runs copies of it in threads;"
            " start the training with torchrun, which makes it DistributedDataParallel"
        )


class _Hook:
    """Method of a watch as a hook; copies of the model, in memory or in a file, are not watched."""

    def __init__(self, owner: Watch, method: str) -> None:
        self._method: Callable[..., None] = getattr(owner, method)

    def __call__(self, *args: Any) -> None:
        # Evaluated when a graph is compiled, if this runs inside one.
        call_eagerly(self._method, torch.compiler.is_compiling(), *args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # A callable of Python with any arguments that returns None: a file with it loads without this package.
        return getattr, (contextlib.nullcontext(), "__exit__")
