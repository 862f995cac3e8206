"""Arguments that several commands share: numbers that are checked, and how a model is loaded."""

from __future__ import annotations

import argparse
from typing import Any

__all__ = ["add_loading", "count", "loading", "number", "positive", "seed", "whole"]


def add_loading(parser: argparse.ArgumentParser) -> None:
    """Declare how a model is loaded."""
    group = parser.add_argument_group("model")
    group.add_argument("--dtype", default="auto", help="auto (float32), float32, bfloat16, float16 or float64")
    group.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps")
    group.add_argument("--revision", help="branch, tag or commit of a Hugging Face id")
    group.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    group.add_argument("--offline", action="store_true", help="never ask the network")


def loading(options: argparse.Namespace) -> dict[str, Any]:
    """What :func:`add_loading` declared, as arguments of the functions that load a model."""
    names = ("dtype", "device", "revision", "trust_remote_code", "offline")
    return {name: getattr(options, name) for name in names}


def positive(text: str) -> int:
    """A positive whole number."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text}")
    return number


def whole(text: str) -> int:
    """A whole number; what it may be is checked where it is used."""
    if not text.removeprefix("-").isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text}")
    return int(text)


def number(text: str) -> float:
    """Any number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text}") from None


def count(text: str) -> int:
    """A whole number of at least zero."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 0, got {text}")
    return int(text)


def seed(text: str) -> int:
    """A seed that every generator takes."""
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"expected a whole number below {2**32}, got {text}")
    return int(text)
