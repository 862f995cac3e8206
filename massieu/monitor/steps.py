"""Which step of training a forward pass belongs to, and how much the last one changed the weights of attention."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from massieu.monitor.messages import tell
from massieu.taps.structure import attention_modules

__all__ = ["Steps", "Updates"]

PATIENCE = 1000  # training passes without a change of the weights, before somebody is told
CHANGES = 3  # of the weights before the first training pass, before somebody is told; loading a checkpoint is one


class Steps:
    """Counts steps: what happens between two changes of the weights.

    Changes are seen by the versions that torch keeps of parameters, and by a hook of its optimizers, some of which
    write where no version tells.

    Attributes:
        number: of the step that training is in; one less than the first before the first pass.
    """

    def __init__(self, model: nn.Module, start: int) -> None:
        self.number = start - 1
        # Where parameters are registered: a checkpoint that is assigned puts others there.
        self._slots = [(own, name) for own in map(_registered, model.modules()) for name in own]
        self._version, self._passes = 0, 0
        self._by_hand, self._updated = False, True
        self._updates, self._state, self._changes, self._waits = 0, (0, 0), -1, True

    def parameters(self) -> Iterator[Tensor]:
        """Those that the model has now; what was made in inference mode has no version and does not count."""
        for registered, name in self._slots:
            parameter = registered.get(name)
            if parameter is not None and not parameter.is_inference():
                yield parameter

    @property
    def is_waiting(self) -> bool:
        """Whether no training pass came so far, and nothing was said about it."""
        return self._waits

    def update(self) -> None:
        """Say that the weights were updated; from then on nothing else counts."""
        self._by_hand = self._updated = True
        self._updates += 1

    def advance(self) -> bool:
        """Count a training pass; whether it is the first one of a step."""
        self._waits = False
        version = 0 if self._by_hand else sum(p._version for p in self.parameters())
        advances = self._updated or (not self._by_hand and version != self._version)
        self._version, self._updated = version, False
        self._passes = 0 if advances else self._passes + 1
        self.number += advances
        if self._passes == PATIENCE:
            tell(
                f"the weights have not changed in {PATIENCE} training passes, so step {self.number} has not ended;"
                " call the watch's step() behind each update"
            )
        return advances

    def overlook(self, training: bool) -> None:
        """Count a pass that is none of training, and say so if weights change while there are no others."""
        if not self._waits:
            return
        state = (sum(p._version for p in self.parameters()), self._updates)
        self._changes += self._changes < 0 or state != self._state
        self._state = state
        if self._changes == CHANGES:
            self._waits = False
            if training:
                words = "runs without gradients; let it run with them (checkpoint with use_reentrant=False)"
            else:
                words = "is in eval mode; call its train(), and set the rates of dropout to zero to train without it"
            tell(f"the weights change, but nothing is read, since the model {words}")

    def follow_optimizers(self) -> RemovableHandle:
        """Register the hook that sees steps of optimizers."""
        return register_optimizer_step_post_hook(_optimizer_hook(self))


def _registered(module: nn.Module) -> dict[str, nn.Parameter | None]:
    # Modules of TorchScript keep theirs elsewhere, and always the same ones.
    own = module._parameters
    return own if isinstance(own, dict) else dict(module.named_parameters(recurse=False))


def _optimizer_hook(steps: Steps) -> Callable[..., None]:
    # The registry is global and must not keep a model alive whose watch was forgotten.
    mine = weakref.ref(steps)

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        own = mine()
        if own is None or own._by_hand or (own._updated and not own._waits):
            return
        known = {id(p) for p in own.parameters()}
        if any(id(p) in known for group in optimizer.param_groups for p in group["params"]):
            own._updated = True
            own._updates += 1

    return hook


class Updates:
    r"""How much one step changes the weights of each attention module, :math:`|W_t - W_{t-1}|_F / |W_{t-1}|_F`.

    Example:
        >>> attention = massieu.nn.MeasureAttention(8, num_heads=2)
        >>> updates = Updates(attention)
        >>> updates.remember()
        >>> with torch.no_grad():
        ...     for weight in attention.parameters():
        ...         weight *= 1.5
        >>> [round(ratio, 6) for ratio in updates.compare().values()]
        [0.5]
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: dict[str, list[Tensor]] = {}

    def remember(self) -> None:
        """Copy the weights."""
        self._before = {name: [weight.clone() for weight in weights] for name, weights in self._weights()}

    def compare(self) -> dict[str, float]:
        """The ratios by the path of the module, and forget the copies; nothing where there are none."""
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
