"""Watch a model that Lightning trains."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from massieu.checks import MissingPackageError, UserError
from massieu.monitor.distributed import watch_joined
from massieu.monitor.log_sinks import Tracker
from massieu.monitor.messages import log_message
from massieu.monitor.watch_options import WatchOptions
from massieu.monitor.watch_session import Watch
from massieu.taps.structure import attention_modules

__all__ = ["WatchCallback"]

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


class _LightningEvents:
    """Callback of Lightning: :func:`massieu.watch` from the beginning of training to its end.

    A step is a batch, or several whose gradients are accumulated; numbers begin at ``trainer.global_step``, also
    after a checkpoint. In runs of several processes the first one writes for all. The loss that
    ``training_step`` returns is recorded.

    Args:
        module: path in the LightningModule of the module that its ``training_step`` calls; by default its only child
            with attention. "" is the LightningModule itself, whose ``training_step`` then has to call ``self(...)``.
        options: ``every``, ``log``, ``heads``, ``quantities``, ``rules`` and ``console`` of :func:`massieu.watch`. As a
            log, "lightning", alone or in a list, sends the values to the loggers of the Trainer, under ``massieu/``.

    Attributes:
        watched: the watch, with its readings and flags; None before training.

    Example:
        >>> from types import SimpleNamespace
        >>> trainer = SimpleNamespace(global_step=0)
        >>> net = torch.nn.ModuleDict({"net": massieu.nn.Transformer(16, num_layers=2, num_heads=4, vocabulary=10)})
        >>> callback = _LightningEvents(every=2)
        >>> callback.on_train_start(trainer, net)
        >>> for _ in range(3):
        ...     _ = net["net"](torch.tensor([[1, 2, 3, 4]]))
        ...     trainer.global_step += 1
        ...     callback.on_train_batch_end(trainer, net)
        >>> [reading.step for reading in callback.watched.readings]
        [0, 2]
        >>> callback.on_train_end(trainer, net)
    """

    def __init__(self, *, module: str | None = None, **options: Any) -> None:
        super().__init__()
        self._options = WatchOptions.from_keywords(options, "start", "gather", "training")
        self._logs, self._logs_to_lightning = self._options.logs_without("lightning")
        self._module, self._path, self._start, self._counted, self._warned = module, "", 0, 0, False
        self.watched: Watch | None = None

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Begin to watch."""
        self._close()
        self._path = _only_child(pl_module) if self._module is None else self._module
        wrapped = getattr(getattr(trainer, "strategy", None), "model", pl_module) is not pl_module
        if self._path == "" and wrapped:
            raise UserError(
                'module must be a part of the LightningModule in runs of several processes, got "", where Lightning'
                " calls training_step through the module itself; name the part that training_step calls"
            )
        model = _part(pl_module, self._path)
        logs = [*self._logs, *([_tracker(trainer)] if self._logs_to_lightning else [])]
        self._start = self._counted = trainer.global_step
        self.watched = watch_joined(model, replace(self._options, log=logs, start=self._start))
        self.watched.step()  # from here on Lightning counts

    def on_train_batch_end(self, trainer: Any, pl_module: nn.Module, outputs: Any = None, *_: Any) -> None:
        """Record the loss, and count a step if the weights were updated."""
        if self.watched is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self.watched.record(loss=loss)
        if trainer.global_step == self._counted:
            return
        if self.watched.number < self._start and not self._warned:
            self._warned = True
            log_message(
                f"a step ended without a call of {self._path or 'the LightningModule'}, so nothing is read; name the"
                ' part that training_step calls, as WatchCallback(module="model")'
            )
        self._counted = trainer.global_step
        self.watched.step()

    def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Stop watching."""
        self._close()

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        """Stop watching a training that failed."""
        self._close()

    def _close(self) -> None:
        if self.watched is not None:
            self.watched.close()


if TYPE_CHECKING:
    WatchCallback = _LightningEvents


def _only_child(module: nn.Module) -> str:
    """Return the name of the only child with attention."""
    names = list(dict.fromkeys(path.split(".")[0] for path in attention_modules(module)))
    if len(names) == 1 and names[0] in dict(module.named_children()):
        return names[0]
    raise UserError(
        f"one child of {type(module).__name__} must have attention, got {', '.join(names) or 'none'}; name the part"
        ' that training_step calls, as WatchCallback(module="model"), or module="" if it calls self(...)'
    )


def _part(module: nn.Module, path: str) -> nn.Module:
    try:
        return module.get_submodule(path)
    except AttributeError:
        children = ", ".join(name for name, _ in module.named_children())
        raise UserError(
            f"module must be a part of {type(module).__name__}, got {path!r}; its children are {children}"
        ) from None


def _tracker(trainer: Any) -> Tracker:
    """Return the loggers of a Trainer, which closes them, as one tracker."""

    def write(step: int, numbers: dict[str, float]) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=step)

    def text(step: int, words: str) -> None:
        for logger in trainer.loggers:
            add_text = getattr(getattr(logger, "experiment", None), "add_text", None)  # TensorBoard has one
            if add_text is not None:
                add_text("massieu/flags", words, step)

    return Tracker(write, text)


def _callback() -> type:
    # Both packages may be installed, and do not fit each other: that of the Trainer is imported already.
    for package in sorted(PACKAGES, key=lambda name: name not in sys.modules):
        try:
            return _made(importlib.import_module(package).Callback)
        except ImportError:
            continue
    raise MissingPackageError(
        "WatchCallback needs lightning, which is not installed; pip install lightning, or use massieu.watch around your"
        " own loop"
    )


@functools.cache
def _made(base: type) -> type:
    return type(
        "WatchCallback", (_LightningEvents, base), {"__doc__": _LightningEvents.__doc__, "__module__": __name__}
    )


def __getattr__(name: str) -> Any:
    # Created on access: Lightning takes seconds to import.
    if name == "WatchCallback":
        return _callback()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
