"""Draws of the next word from logits."""

from __future__ import annotations

import torch
from torch import Tensor

from massieu import statistics
from massieu.checks import check_count, check_number

__all__ = ["check_sampling", "draw"]


def draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Draw one word per row of ``(batch, vocabulary)``; at temperature zero the most likely.

    Example:
        >>> draw(torch.tensor([[0.0, 9.0, 1.0]]), temperature=0.0, top_k=None, generator=None)
        tensor([1])
    """
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return torch.multinomial(statistics.probabilities(logits), 1, generator=generator).squeeze(-1)


def check_sampling(max_new_tokens: int, temperature: float, top_k: int | None) -> None:
    """Raise unless the options are in their ranges."""
    check_count(max_new_tokens, "max_new_tokens", least=0)
    check_number(temperature, "temperature", least=0, remedy="0 takes the most likely word")
    if top_k is not None:
        check_count(top_k, "top_k", remedy="pass None for all words")
