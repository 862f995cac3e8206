"""Which step of training a forward pass belongs to, and how much the last one changed the weights of attention."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from massieu.taps.structure import attention_modules

__all__ = ["Steps", "Updates"]

PATIENCE = 1000  # training passes without a change of the weights, before somebody is told


class Steps:
    """Counts steps: what happens between two changes of the weights.

    Changes are seen by the versions that torch keeps of parameters, and by a hook of its optimizers, some of which
    write where no version tells.

    Attributes:
        number: of the step that training is in; one less than the first before the first pass.
    """

    def __init__(self, model: nn.Module, start: int) -> None:
        self.number = start - 1
        # Parameters that were made in inference mode have no version.
        self._parameters = [p for p in model.parameters() if not p.is_inference()]
        self._version, self._passes = 0, 0
        self._by_hand, self._updated = False, True

    def update(self) -> None:
        """Say that the weights were updated; from then on nothing else counts."""
        self._by_hand = self._updated = True

    def advance(self) -> bool:
        """Count a training pass; whether it is the first one of a step."""
        version = 0 if self._by_hand else sum(p._version for p in self._parameters)
        advances = self._updated or (not self._by_hand and version != self._version)
        self._version, self._updated = version, False
        self._passes = 0 if advances else self._passes + 1
        self.number += advances
        if self._passes == PATIENCE:
            warnings.warn(
                f"the weights have not changed in {PATIENCE} training passes, so step {self.number} has not ended;"
                " call the watch's step() behind each update",
                stacklevel=2,
            )
        return advances

    def follow_optimizers(self) -> RemovableHandle:
        """Register the hook that sees steps of optimizers."""
        return register_optimizer_step_post_hook(_optimizer_hook(self))


def _optimizer_hook(steps: Steps) -> Callable[..., None]:
    # The registry is global and must not keep a model alive whose watch was forgotten.
    mine, known = weakref.ref(steps), {id(p) for p in steps._parameters}

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        own = mine()
        if own is not None and not own._by_hand and not own._updated:
            own._updated = any(id(p) in known for group in optimizer.param_groups for p in group["params"])

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
