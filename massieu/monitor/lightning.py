"""Watch a model that Lightning trains."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from massieu.checks import MissingPackageError, UserError
from massieu.monitor.distributed import watch_distributed
from massieu.monitor.flags import RULES, Rule
from massieu.monitor.messages import tell
from massieu.monitor.sinks import Tool
from massieu.monitor.watch_session import Watch
from massieu.taps.structure import attention_modules

__all__ = ["WatchCallback"]

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


class _Events:
    """A callback that watches the model: :func:`massieu.watch` from the beginning of training to its end.

    A step is a batch, or several whose gradients are accumulated; numbers begin at ``trainer.global_step``, also where
    training continues from a checkpoint. In runs of several processes the first one writes for all. The loss that
    ``training_step`` returns is recorded.

    Args:
        every: how many steps lie between two readings.
        log: as in :func:`massieu.watch`; "lightning", alone or in a list, sends the figures to the loggers of the
            Trainer, under ``massieu/``.
        heads: as in :func:`massieu.watch`.
        quantities: as in :func:`massieu.watch`.
        rules: as in :func:`massieu.watch`.
        console: as in :func:`massieu.watch`.
        module: path in the LightningModule of what its ``training_step`` calls; where a single child has attention, it
            is found. "" is the LightningModule itself, whose ``training_step`` then has to call ``self(...)``.

    Attributes:
        watched: the watch, for its readings and flags; None before training.

    Example:
        >>> from types import SimpleNamespace
        >>> trainer = SimpleNamespace(global_step=0)
        >>> net = torch.nn.ModuleDict({"net": massieu.nn.Transformer(16, num_layers=2, num_heads=4, vocabulary=10)})
        >>> callback = _Events(every=2)
        >>> callback.on_train_start(trainer, net)
        >>> for _ in range(3):
        ...     _ = net["net"](torch.tensor([[1, 2, 3, 4]]))
        ...     trainer.global_step += 1
        ...     callback.on_train_batch_end(trainer, net)
        >>> [reading.step for reading in callback.watched.readings]
        [0, 2]
        >>> callback.on_train_end(trainer, net)
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
        module: str | None = None,
    ) -> None:
        super().__init__()
        logs = [] if log is None else list(log) if isinstance(log, (list, tuple)) else [log]
        self._logs = [each for each in logs if not _is_lightning(each)]
        self._through = len(self._logs) < len(logs)
        self._every, self._heads, self._quantities, self._rules = every, heads, quantities, rules
        self._console = console
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
        through = [_tool(trainer)] if self._through else []
        self._start = self._counted = trainer.global_step
        self.watched = watch_distributed(
            model,
            self._every,
            [*self._logs, *through],
            self._heads,
            self._quantities,
            start=self._start,
            rules=self._rules,
            console=self._console,
        )
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
            tell(
                f"a step ended and {self._path or 'the LightningModule'} was not called, so nothing is read; name the"
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
    WatchCallback = _Events


def _only_child(module: nn.Module) -> str:
    """The child that has attention."""
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


def _tool(trainer: Any) -> Tool:
    """The loggers of a Trainer, which closes them."""

    def write(step: int, numbers: dict[str, float]) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=step)

    def text(step: int, words: str) -> None:
        for logger in trainer.loggers:
            add_text = getattr(getattr(logger, "experiment", None), "add_text", None)  # that of TensorBoard has one
            if add_text is not None:
                add_text("massieu/flags", words, step)

    return Tool(write, text)


def _is_lightning(log: Any) -> bool:
    return isinstance(log, str) and log == "lightning"


def _callback() -> type:
    # Both packages may be installed, and are not made for each other: that of the Trainer is imported already.
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
    return type("WatchCallback", (_Events, base), {"__doc__": _Events.__doc__, "__module__": __name__})


def __getattr__(name: str) -> Any:
    # Made when it is asked for: Lightning takes seconds to import.
    if name == "WatchCallback":
        return _callback()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
