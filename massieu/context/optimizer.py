"""AdamW on all weights of a model as on one tensor."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["JointAdamW"]


class JointAdamW:
    """AdamW without decay, with gradients clipped to norm one, on a model whose weights are views of one tensor.

    A small transformer has seventy weights; to visit each of them takes a tenth of a step.

    Args:
        model: with weights of one dtype, which become views of one tensor.

    Example:
        >>> model = torch.nn.Linear(1, 1)
        >>> optimizer, before = JointAdamW(model), model.weight.item()
        >>> optimizer.step(model.weight.sum(), 0.25)
        >>> round(before - model.weight.item(), 4)
        0.25
    """

    def __init__(self, model: nn.Module) -> None:
        self._weights = list(model.parameters())
        self._joint = nn.Parameter(torch.cat([weight.detach().flatten() for weight in self._weights]))
        parts = self._joint.detach().split([weight.numel() for weight in self._weights])
        for weight, part in zip(self._weights, parts, strict=True):
            weight.data = part.view_as(weight)
        self._adam = torch.optim.AdamW([self._joint], betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def step(self, loss: Tensor, learning_rate: float) -> None:
        """Take one step down the gradient of a loss."""
        slopes = torch.autograd.grad(loss, self._weights, materialize_grads=True)
        self._joint.grad = torch.cat([slope.flatten() for slope in slopes])
        nn.utils.clip_grad_norm_(self._joint, 1.0)
        self._adam.param_groups[0]["lr"] = learning_rate
        self._adam.step()

    def state(self) -> dict[str, Tensor]:
        """Return the moments and the number of steps; empty before the first."""
        return dict(self._adam.state_dict()["state"].get(0, {}))

    def restore(self, state: dict[str, Tensor]) -> None:
        self._adam.load_state_dict({**self._adam.state_dict(), "state": {0: state}})
