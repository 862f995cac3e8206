"""Watch a model that the ``Trainer`` of transformers trains."""

from __future__ import annotations

import functools
import gc
import math
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from massieu.checks import MissingPackageError, UserError, pip_install
from massieu.monitor.distributed import watch_distributed
from massieu.monitor.flags import RULES, Rule
from massieu.monitor.reading import Reading
from massieu.monitor.sinks import Tool, tensorboard_in
from massieu.monitor.watch_session import Watch

__all__ = ["WatchCallback"]

RECORDED = ("loss", "eval_loss", "grad_norm")  # as the Trainer calls them


class _Events:
    """A callback that watches the model: :func:`massieu.watch` from the beginning of training to its end.

    Steps are those of the Trainer, also where it continues from a checkpoint; in runs of several processes the first
    one writes for all. The losses and gradient norms that the Trainer logs are recorded, as often as it logs them.

    Args:
        every: how many steps lie between two readings.
        log: as in :func:`massieu.watch`; "trainer", alone or in a list, adds the figures to ``state.log_history`` under
            ``massieu/``, which checkpoints keep. "tensorboard" writes to the event file of the Trainer, if it reports
            to TensorBoard, else to a new one in its ``output_dir``.
        heads: as in :func:`massieu.watch`.
        quantities: as in :func:`massieu.watch`.
        rules: as in :func:`massieu.watch`.
        console: as in :func:`massieu.watch`.
        trainer: with ``log="trainer"``, sends the figures through ``Trainer.log``, and so to what it reports to.
            Callbacks are not shown the Trainer, so ``trainer.add_callback(WatchCallback(..., trainer=trainer))``.

    Attributes:
        watched: the watch, for its readings and flags; None before training.

    Example:
        >>> from massieu.monitor.trainer import WatchCallback
        >>> callback = WatchCallback(every=50, log=["trainer", "run.jsonl"])
        >>> callback.watched is None
        True
    """

    def __init__(
        self,
        every: int = 100,
        log: Any = None,
        heads: bool = False,
        quantities: Iterable[str] | Literal["all"] = "all",
        *,
        rules: Sequence[Rule] = RULES,
        console: bool = True,
        trainer: Any = None,
    ) -> None:
        logs = [] if log is None else list(log) if isinstance(log, (list, tuple)) else [log]
        self._logs = [each for each in logs if not _is_named(each, "trainer")]
        self._through = len(self._logs) < len(logs)
        if trainer is not None and not (self._through and callable(getattr(trainer, "log", None))):
            raise UserError(
                f'trainer must be the Trainer that log="trainer" writes to, got {type(trainer).__name__} with'
                f" log={log!r}; leave it out to log elsewhere"
            )
        self._every, self._heads, self._quantities, self._rules = every, heads, quantities, rules
        self._trainer, self._console = trainer, console
        self.watched: Watch | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        """Begin to watch; a training that was interrupted left its watch behind."""
        self.close()
        if getattr(args, "n_gpu", 1) > 1:
            raise UserError(
                f"the Trainer would run copies of the model in threads on {args.n_gpu} devices, which cannot be read;"
                " start with torchrun, or show it one device by CUDA_VISIBLE_DEVICES=0"
            )
        through = [Tool(self._writer(state))] if self._through else []
        self.watched = watch_distributed(
            model,
            self._every,
            [*(self._tensorboard(args) if _is_named(log, "tensorboard") else log for log in self._logs), *through],
            self._heads,
            self._quantities,
            start=state.global_step,
            rules=self._rules,
            console=self._console,
        )
        self.watched.record(**dict.fromkeys(RECORDED, math.nan))  # a column for each from the first reading on
        self.watched.step()  # from here on the Trainer counts

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count a step."""
        if self.watched is not None:
            self.watched.step()
            self._flush_before_saving(control)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Record what the Trainer logs about the loss."""
        known = {name: (logs or {}).get(name) for name in RECORDED}
        if self.watched is not None:
            self.watched.record(**{name: value for name, value in known.items() if isinstance(value, (int, float))})
            self._flush_before_saving(control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the last reading where a checkpoint follows; its loss was logged before."""
        self._flush_before_saving(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the last reading, before the Trainer closes its own logs."""
        if self.watched is not None:
            self.watched.flush()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop watching."""
        self.close()

    def close(self) -> None:
        """Stop watching, where an error ended the training; readings stay."""
        if self.watched is not None:
            self.watched.close()

    def _flush_before_saving(self, control: Any) -> None:
        """Write the last reading if the Trainer saves its log next; it logs and evaluates before that."""
        waits = getattr(control, "should_log", False) or getattr(control, "should_evaluate", False)
        if self.watched is not None and getattr(control, "should_save", False) and not waits:
            self.watched.flush()

    def _writer(self, state: Any) -> Any:
        def write(step: int, numbers: dict[str, float]) -> None:
            if self._trainer is None:
                epoch = {} if state.epoch is None else {"epoch": state.epoch}
                state.log_history.append({**numbers, **epoch, "step": step})
                return
            # The Trainer has gone on to the next step by now.
            now, state.global_step = state.global_step, step
            try:
                self._trainer.log(numbers)
            finally:
                state.global_step = now

        return write

    def _tensorboard(self, args: Any) -> Any:
        """The writer of the Trainer's own callback, or a new one in its folder: two writers of one folder hide curves.

        Callbacks are not shown each other, so it is looked for in the lists that hold this one.
        """
        others = (each for held in gc.get_referrers(self) if isinstance(held, list) for each in held)
        writer = next(filter(None, (getattr(each, "tb_writer", None) for each in others)), None)
        if writer is not None or getattr(args, "process_index", 0) != 0:
            return writer or _ignore
        return tensorboard_in(getattr(args, "logging_dir", None) or os.path.join(args.output_dir, "runs", "massieu"))


if TYPE_CHECKING:
    WatchCallback = _Events


def _is_named(log: Any, name: str) -> bool:
    return isinstance(log, str) and log == name


def _ignore(reading: Reading) -> None:
    """The log of a process that is not the first."""


@functools.cache
def _callback() -> type:
    try:
        from transformers import TrainerCallback
    except ImportError:
        raise MissingPackageError(
            f"WatchCallback needs transformers, which is not installed; {pip_install('train')}, or use massieu.watch"
            " around your own loop"
        ) from None
    return type("WatchCallback", (_Events, TrainerCallback), {"__doc__": _Events.__doc__, "__module__": __name__})


def __getattr__(name: str) -> Any:
    # Made when it is asked for: transformers takes seconds to import.
    if name == "WatchCallback":
        return _callback()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
