"""The next word, drawn from logits."""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

from massieu import statistics
from massieu.nn.checks import check_count

__all__ = ["check_sampling", "draw"]


def draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """One word per row of ``(batch, vocabulary)``: the most likely at temperature zero, else a random one.

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
    """One sentence unless the options make sense."""
    check_count(max_new_tokens, "max_new_tokens", "it is the number of words to add", least=0)
    if not isinstance(temperature, Real) or not math.isfinite(temperature) or temperature < 0:
        raise ValueError(
            f"temperature must be a finite number from zero up, got {temperature!r}; 0 takes the most likely word"
        )
    if top_k is not None:
        check_count(top_k, "top_k", "pass None for all words")
