"""Initial weights of transformers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["initialize"]


def initialize(model: nn.Module, sums: int, keep: Sequence[nn.Module], generator: torch.Generator | None) -> None:
    """Draw matrices with standard deviation 0.02 and set biases to zero, but leave the modules in ``keep`` alone.

    Maps whose output is added to a residual connection are divided by the square root of the number of such sums, so
    that the hidden states do not grow with depth.

    Source:
        Radford et al. 2019, section 2.3.
    """
    kept = {module for whole in keep for module in whole.modules()}
    for name, module in model.named_modules():
        if module in kept or not isinstance(module, (nn.Linear, nn.Embedding)):
            continue
        added = name.endswith(("out_proj", "feed_forward.down"))
        nn.init.normal_(module.weight, std=0.02 * (sums**-0.5 if added else 1.0), generator=generator)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
