"""Calls that compiled models run in plain Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["call_eagerly"]

Result = TypeVar("Result")


def call_eagerly(function: Callable[..., Result], *arguments: Any, **options: Any) -> Result:
    """Call a function with a graph break under ``torch.compile``."""
    # As a decorator torch.compiler.disable would load the compiler on import, which takes a second.
    if torch.compiler.is_compiling():
        return torch.compiler.disable(function)(*arguments, **options)  # type: ignore[no-any-return]
    return function(*arguments, **options)
