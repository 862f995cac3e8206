"""Watch a model that the ``Trainer`` of transformers trains."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from massieu.checks import MissingPackageError, UserError
from massieu.monitor.distributed import watch_distributed
from massieu.monitor.flags import RULES, Rule
from massieu.monitor.sinks import Scalars
from massieu.monitor.watching import Watch

__all__ = ["WatchCallback"]


class _Events:
    """A callback that watches the model: :func:`massieu.watch` from the beginning of training to its end.

    Steps are those of the Trainer, also where it continues from a checkpoint; in runs of several processes the first
    one writes for all.

    Args:
        every: how many steps lie between two readings.
        log: as in :func:`massieu.watch`; "trainer", alone or in a list, adds the figures to ``state.log_history`` under
            ``massieu/``, which checkpoints keep.
        heads: as in :func:`massieu.watch`.
        quantities: as in :func:`massieu.watch`.
        rules: as in :func:`massieu.watch`.
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
        trainer: Any = None,
    ) -> None:
        logs = [] if log is None else list(log) if isinstance(log, (list, tuple)) else [log]
        self._logs = [each for each in logs if not _is_trainer(each)]
        self._through = len(self._logs) < len(logs)
        if trainer is not None and not (self._through and callable(getattr(trainer, "log", None))):
            raise UserError(
                f'trainer must be the Trainer that log="trainer" writes to, got {type(trainer).__name__} with'
                f" log={log!r}; leave it out to log elsewhere"
            )
        self._every, self._heads, self._quantities, self._rules = every, heads, quantities, rules
        self._trainer = trainer
        self.watched: Watch | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        """Begin to watch; a training that was interrupted left its watch behind."""
        self.close()
        if getattr(args, "n_gpu", 1) > 1:
            raise RuntimeError(
                f"the Trainer would run copies of the model in threads on {args.n_gpu} devices, which cannot be heard;"
                " start with torchrun, or show it one device by CUDA_VISIBLE_DEVICES=0"
            )
        through = [Scalars((self._writer(state), _nothing), per_head=self._heads)] if self._through else []
        self.watched = watch_distributed(
            model,
            self._every,
            [*self._logs, *through],
            self._heads,
            self._quantities,
            start=state.global_step,
            rules=self._rules,
        )
        self.watched.step()  # from here on the Trainer counts

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count a step."""
        if self.watched is not None:
            self.watched.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop watching."""
        self.close()

    def close(self) -> None:
        """Stop watching, where an error ended the training; readings stay."""
        if self.watched is not None:
            self.watched.close()

    def _writer(self, state: Any) -> Any:
        def write(step: int, numbers: dict[str, float]) -> None:
            named = {f"massieu/{name}": value for name, value in numbers.items()}
            if self._trainer is not None:
                self._trainer.log(named)
            else:
                epoch = {} if state.epoch is None else {"epoch": state.epoch}
                state.log_history.append({**named, **epoch, "step": step})

        return write


if TYPE_CHECKING:
    WatchCallback = _Events


def _is_trainer(log: Any) -> bool:
    return isinstance(log, str) and log == "trainer"


def _nothing() -> None:
    """The Trainer closes its own log."""


@functools.cache
def _callback() -> type:
    try:
        from transformers import TrainerCallback
    except ImportError:
        raise MissingPackageError(
            "WatchCallback needs transformers, which is not installed; pip install transformers accelerate, or use"
            " massieu.watch around your own loop"
        ) from None
    return type("WatchCallback", (_Events, TrainerCallback), {"__doc__": _Events.__doc__, "__module__": __name__})


def __getattr__(name: str) -> Any:
    # Made when it is asked for: transformers takes seconds to import.
    if name == "WatchCallback":
        return _callback()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
