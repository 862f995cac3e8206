"""Arguments that several commands share: numbers that are checked, and how a model is loaded."""

from __future__ import annotations

import argparse
import sys
from typing import Any

__all__ = ["add_engine", "add_loading", "count", "engine", "loading", "number", "positive", "seed", "whole"]


def add_loading(parser: argparse.ArgumentParser) -> None:
    """Declare how a model is loaded."""
    group = parser.add_argument_group("model")
    group.add_argument("--dtype", default="auto", help="auto (float32), float32, bfloat16, float16 or float64")
    group.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps")
    group.add_argument("--device-map", metavar="HOW", help="spread a large model by accelerate: auto, balanced")
    group.add_argument("--revision", help="branch, tag or commit of a Hugging Face id")
    group.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    group.add_argument("--offline", action="store_true", help="never ask the network")


def add_engine(parser: argparse.ArgumentParser) -> Any:
    """Declare where the work is done; returns the group of these arguments."""
    group = parser.add_argument_group("engine")
    group.add_argument("--engine", choices=("local", "dask"), default="local", help="this process, or a Dask cluster")
    group.add_argument("--address", metavar="HOST:PORT", help="of a Dask scheduler; none: a cluster on this machine")
    group.add_argument("--scheduler-file", metavar="FILE", help="what dask scheduler wrote, instead of an address")
    return group


def engine(options: argparse.Namespace, workers: int | None = None) -> Any:
    """The engine that the options name; where its dashboard is comes on stderr."""
    from massieu.engine import engine_named

    asked = {"address": options.address, "scheduler_file": options.scheduler_file, "workers": workers}
    if options.engine == "dask" and not (options.quiet or options.json):
        asked["announce"] = lambda sentence: print(sentence, file=sys.stderr, flush=True)
    return engine_named(options.engine, **asked)


def loading(options: argparse.Namespace) -> dict[str, Any]:
    """What :func:`add_loading` declared, as arguments of the functions that load a model."""
    names = ("dtype", "device", "device_map", "revision", "trust_remote_code", "offline")
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
