"""Calls that compiled models make in plain Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["call_eagerly"]

Result = TypeVar("Result")


def call_eagerly(function: Callable[..., Result], *arguments: Any, **options: Any) -> Result:
    """Call a function that ``torch.compile`` must not look into: it breaks the graph there and calls it as it is."""
    # Decorating with torch.compiler.disable would load the compiler, a second of import, for everyone.
    if torch.compiler.is_compiling():
        return torch.compiler.disable(function)(*arguments, **options)  # type: ignore[no-any-return]
    return function(*arguments, **options)
