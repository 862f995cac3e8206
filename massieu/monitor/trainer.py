"""Watch a model that the ``Trainer`` of transformers trains."""

from __future__ import annotations

import functools
import gc
import math
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from massieu.checks import UserError, optional_package
from massieu.monitor.distributed import watch_joined
from massieu.monitor.log_sinks import Tracker, tensorboard_in
from massieu.monitor.reading import Reading
from massieu.monitor.watch_options import WatchOptions
from massieu.monitor.watch_session import Watch

__all__ = ["WatchCallback"]

RECORDED = ("loss", "eval_loss", "grad_norm")  # as the Trainer calls them


class _TrainerEvents:
    """Callback of the ``Trainer``: :func:`massieu.watch` from the beginning of training to its end.

    Steps are those of the Trainer, also after a checkpoint; in runs of several processes the first one writes for all.
    The losses and gradient norms that the Trainer logs are recorded.

    Args:
        trainer: with ``log="trainer"``, sends the values through ``Trainer.log``, and so to its integrations. Callbacks
            have no access to the Trainer, so use ``trainer.add_callback(WatchCallback(..., trainer=trainer))``.
        options: ``every``, ``log``, ``heads``, ``quantities``, ``rules`` and ``console`` of :func:`massieu.watch`. As a
            log, "trainer", alone or in a list, adds the values to ``state.log_history`` under ``massieu/``, which
            checkpoints keep; "tensorboard" writes to the event file of the Trainer, if it reports to TensorBoard, else
            to a new one in its ``output_dir``.

    Attributes:
        watched: the watch, with its readings and flags; None before training.

    Example:
        >>> from massieu.monitor.trainer import WatchCallback
        >>> callback = WatchCallback(every=50, log=["trainer", "run.jsonl"])
        >>> callback.watched is None
        True
    """

    def __init__(self, *, trainer: Any = None, **options: Any) -> None:
        self._options = WatchOptions.from_keywords(options, "start", "gather", "training")
        self._logs, self._logs_to_trainer = self._options.logs_without("trainer")
        if trainer is not None and not (self._logs_to_trainer and callable(getattr(trainer, "log", None))):
            raise UserError(
                f'trainer must be the Trainer that log="trainer" writes to, got {type(trainer).__name__} with'
                f" log={self._options.log!r}; leave it out to log elsewhere"
            )
        self._trainer = trainer
        self.watched: Watch | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        """Begin to watch, and close the watch of an interrupted training."""
        self.close()
        if getattr(args, "n_gpu", 1) > 1:
            raise UserError(
                f"the Trainer would run copies of the model in threads on {args.n_gpu} devices, which cannot be read;"
                " start with torchrun, or set CUDA_VISIBLE_DEVICES=0"
            )
        logs = [self._tensorboard(args) if isinstance(x, str) and x == "tensorboard" else x for x in self._logs]
        logs += [Tracker(self._writer(state))] if self._logs_to_trainer else []
        self.watched = watch_joined(model, replace(self._options, log=logs, start=state.global_step))
        self.watched.record(**dict.fromkeys(RECORDED, math.nan))  # a column for each from the first reading on
        self.watched.step()  # from here on the Trainer counts

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count a step."""
        if self.watched is not None:
            self.watched.step()
            self._flush_before_saving(control)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Record the losses and gradient norms that the Trainer logs."""
        known = {name: (logs or {}).get(name) for name in RECORDED}
        if self.watched is not None:
            self.watched.record(**{name: value for name, value in known.items() if isinstance(value, (int, float))})
            self._flush_before_saving(control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the last reading before a checkpoint; its loss was logged before."""
        self._flush_before_saving(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the last reading, before the Trainer closes its own logs."""
        if self.watched is not None:
            self.watched.flush()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop watching."""
        self.close()

    def close(self) -> None:
        """Stop watching, as after an error in the training; readings stay."""
        if self.watched is not None:
            self.watched.close()

    def _flush_before_saving(self, control: Any) -> None:
        """Write the last reading if the Trainer saves its log next, after it logged and evaluated."""
        waits = getattr(control, "should_log", False) or getattr(control, "should_evaluate", False)
        if self.watched is not None and getattr(control, "should_save", False) and not waits:
            self.watched.flush()

    def _writer(self, state: Any) -> Any:
        def write(step: int, numbers: dict[str, float]) -> None:
            if self._trainer is None:
                epoch = {} if state.epoch is None else {"epoch": state.epoch}
                state.log_history.append({**numbers, **epoch, "step": step})
                return
            # The Trainer is at the next step already.
            now, state.global_step = state.global_step, step
            try:
                self._trainer.log(numbers)
            finally:
                state.global_step = now

        return write

    def _tensorboard(self, args: Any) -> Any:
        """Return the writer of the Trainer's own callback, or a new one: two writers in one folder hide curves.

        Callbacks have no access to each other, so the lists that contain this one are searched.
        """
        others = (each for held in gc.get_referrers(self) if isinstance(held, list) for each in held)
        writer = next(filter(None, (getattr(each, "tb_writer", None) for each in others)), None)
        if writer is not None or getattr(args, "process_index", 0) != 0:
            return writer or _ignore
        return tensorboard_in(getattr(args, "logging_dir", None) or os.path.join(args.output_dir, "runs", "massieu"))


if TYPE_CHECKING:
    WatchCallback = _TrainerEvents


def _ignore(reading: Reading) -> None:
    """Write nothing: the log of a process that is not the first."""


@functools.cache
def _callback() -> type:
    transformers = optional_package("transformers", "WatchCallback", "train")
    return type(
        "WatchCallback",
        (_TrainerEvents, transformers.TrainerCallback),
        {"__doc__": _TrainerEvents.__doc__, "__module__": __name__},
    )


def __getattr__(name: str) -> Any:
    # Created on access: transformers takes seconds to import.
    if name == "WatchCallback":
        return _callback()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
