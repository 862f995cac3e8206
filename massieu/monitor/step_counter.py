"""Counting of training steps, and the change of the attention weights in the last one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from massieu.monitor.messages import log_message
from massieu.taps.structure import attention_modules

__all__ = ["StepCounter", "WeightUpdates"]

PATIENCE = 1000  # training passes without a change of the weights before a message
CHANGES = 3  # changes of the weights without a training pass before a message; loading a checkpoint is one


class StepCounter:
    """Number of the training step; a step lies between two changes of the weights.

    Changes are detected by the versions of parameters in torch, and by a hook of its optimizers, some of which write
    without a new version.

    Attributes:
        number: number of the current step; one less than the first before the first pass.
    """

    def __init__(self, model: nn.Module, start: int) -> None:
        self.number = start - 1
        # Slots instead of parameters: an assigned checkpoint replaces the parameters.
        self._slots = [(own, name) for own in map(_registered, model.modules()) for name in own]
        self._version, self._passes = 0, 0
        self._is_manual, self._updated = False, True
        self._updates, self._state, self._changes, self._waits = 0, (0, 0), -1, True

    def parameters(self) -> Iterator[Tensor]:
        """Yield the current parameters; those made in inference mode have no version and are left out."""
        for registered, name in self._slots:
            parameter = registered.get(name)
            if parameter is not None and not parameter.is_inference():
                yield parameter

    @property
    def is_waiting(self) -> bool:
        """True before the first training pass, if there was no message about it."""
        return self._waits

    def update(self) -> None:
        """Count an update of the weights; from the first call on, only these calls count."""
        self._is_manual = self._updated = True
        self._updates += 1

    def advance(self) -> bool:
        """Count a training pass, and return whether it is the first of a step."""
        self._waits = False
        version = 0 if self._is_manual else sum(p._version for p in self.parameters())
        advances = self._updated or (not self._is_manual and version != self._version)
        self._version, self._updated = version, False
        self._passes = 0 if advances else self._passes + 1
        self.number += advances
        if self._passes == PATIENCE:
            log_message(
                f"the weights have not changed in {PATIENCE} training passes, so step {self.number} has not ended;"
                " call the watch's step() after each update"
            )
        return advances

    def skip(self, training: bool) -> None:
        """Count a pass outside training; log a message if weights change while there are only such passes."""
        if not self._waits:
            return
        state = (sum(p._version for p in self.parameters()), self._updates)
        self._changes += self._changes < 0 or state != self._state
        self._state = state
        if self._changes == CHANGES:
            self._waits = False
            if training:
                words = "runs without gradients; run it with gradients (checkpoint with use_reentrant=False)"
            else:
                words = "is in eval mode; call its train(), and set dropout to zero to train without it"
            log_message(f"the weights change, but nothing is read, since the model {words}")

    def follow_optimizers(self) -> RemovableHandle:
        """Register a hook on the steps of optimizers."""
        return register_optimizer_step_post_hook(_optimizer_hook(self))


def _registered(module: nn.Module) -> dict[str, nn.Parameter | None]:
    # Modules of TorchScript store theirs elsewhere, and always the same ones.
    own = module._parameters
    return own if isinstance(own, dict) else dict(module.named_parameters(recurse=False))


def _optimizer_hook(steps: StepCounter) -> Callable[..., None]:
    # The registry is global; it must not keep the model of a deleted watch alive.
    mine = weakref.ref(steps)

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        own = mine()
        if own is None or own._is_manual or (own._updated and not own._waits):
            return
        known = {id(p) for p in own.parameters()}
        if any(id(p) in known for group in optimizer.param_groups for p in group["params"]):
            own._updated = True
            own._updates += 1

    return hook


class WeightUpdates:
    r"""Relative change of the weights of each attention module in one step, :math:`|W_t - W_{t-1}|_F / |W_{t-1}|_F`.

    Example:
        >>> attention = massieu.nn.MeasureAttention(8, num_heads=2)
        >>> updates = WeightUpdates(attention)
        >>> updates.store()
        >>> with torch.no_grad():
        ...     for weight in attention.parameters():
        ...         weight *= 1.5
        >>> [round(ratio, 6) for ratio in updates.compare().values()]
        [0.5]
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: dict[str, list[Tensor]] = {}

    def store(self) -> None:
        """Copy the weights."""
        self._before = {name: [weight.clone() for weight in weights] for name, weights in self._weights()}

    def compare(self) -> dict[str, float]:
        """Return the ratios by the path of the module, and drop the copies; empty without copies."""
        before, self._before = self._before, {}
        ratios = {}
        for name, weights in self._weights():
            old = before.get(name, [])
            if old and [x.shape for x in old] == [x.shape for x in weights]:
                change = sum(float((x - y).float().square().sum()) for x, y in zip(weights, old, strict=True))
                size = sum(float(x.float().square().sum()) for x in old)
                ratios[name] = (change / size) ** 0.5 if size else float("nan")
        return ratios

    def _weights(self) -> Iterator[tuple[str, list[Tensor]]]:
        for name, module in attention_modules(self._model).items():
            yield name, [p.detach() for p in module.parameters() if p.dim() > 1 and p.is_floating_point()]
