"""Arguments shared by several commands: types that check paths and numbers, loading of a model, engines."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from typing import Any

from massieu.checks import UserError, expanded, visible

__all__ = [
    "add_engine",
    "add_loading",
    "add_results",
    "count",
    "engine",
    "loading",
    "number",
    "path",
    "positive",
    "seed",
    "whole",
]

LARGEST = 10**12  # of any count; larger numbers overflow integers of torch
WHOLE = re.compile("-?[0-9]{1,400}")


def add_loading(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that load a model."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--dtype", default="auto", help="float32, bfloat16, float16 or float64 (default: auto, which is float32)"
    )
    group.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps (default: cpu)")
    group.add_argument(
        "--device-map", metavar="MAP", help="spread a large model over devices: auto, balanced (default: no)"
    )
    group.add_argument("--revision", help="branch, tag or commit of a Hugging Face id (default: main)")
    group.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    group.add_argument("--offline", action="store_true", help="do not use the network")


def add_engine(parser: argparse.ArgumentParser) -> Any:
    """Declare the arguments of the engine; return their group."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--engine", choices=("local", "dask"), default="local", help="this process, or a Dask cluster (default: local)"
    )
    group.add_argument("--address", metavar="HOST:PORT", help="Dask scheduler (default: a cluster on this machine)")
    group.add_argument(
        "--scheduler-file",
        type=path,
        metavar="FILE",
        help="file written by dask scheduler, instead of an address (default: a cluster on this machine)",
    )
    return group


def add_results(parser: Any, files: str, quiet: str = "no progress and no table") -> None:
    """Declare the folder of the results, and ``--quiet``."""
    parser.add_argument("--out", type=path, metavar="DIR", help=f"write {files} there (default: nowhere)")
    parser.add_argument("-q", "--quiet", action="store_true", help=quiet)


def engine(options: argparse.Namespace, workers: int | None = None) -> Any:
    """Return the engine of the options; it prints the address of its dashboard to stderr."""
    from massieu.engine import engine_named

    arguments = {"address": options.address, "scheduler_file": options.scheduler_file, "workers": workers}
    if options.engine == "dask" and not (options.quiet or options.json):
        arguments["announce"] = lambda sentence: print(visible(sentence), file=sys.stderr, flush=True)
    return engine_named(options.engine, **arguments)


def loading(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of :func:`add_loading` as arguments of the functions that load a model."""
    names = ("dtype", "device", "device_map", "revision", "trust_remote_code", "offline")
    return {name: getattr(options, name) for name in names}


def path(text: str) -> str:
    """A path, or the name of a model."""
    if not text.strip():
        raise argparse.ArgumentTypeError("expected a path or a name, got an empty text; is a variable unset?")
    if "\0" in text:
        raise argparse.ArgumentTypeError(f"expected a path or a name, got {text} with a NUL character; remove it")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"expected a path or a name in UTF-8, got {text}; rename it") from None
    return _at_home(text) if text.startswith("~") else text


def _at_home(text: str) -> str:
    """Expand a leading ``~``, as in ``--out=~/report``, which shells do not expand."""
    try:
        return text if os.path.lexists(text) else str(expanded(text))
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(text: str) -> int:
    """A positive whole number."""
    return _whole(text, "a positive whole number", 1)


def count(text: str) -> int:
    """A whole number of at least zero."""
    return _whole(text, "a whole number of at least 0", 0)


def whole(text: str) -> int:
    """A whole number, checked further by the library."""
    return _whole(text, "a whole number", -LARGEST)


def seed(text: str) -> int:
    """A seed that all generators accept."""
    return _whole(text, f"a whole number from 0 to {2**32 - 1}", 0, 2**32 - 1)


def number(text: str) -> float:
    """A finite number, checked further by the library."""
    try:
        found = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text or 'an empty text'}") from None
    if not math.isfinite(found):
        raise argparse.ArgumentTypeError(f"expected a finite number, got {text}")
    return found


def _whole(text: str, expected: str, least: int, most: int = LARGEST) -> int:
    found = int(text) if WHOLE.fullmatch(text) else None
    if found is None or found < least:
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text or 'an empty text'}")
    if found > most:
        raise argparse.ArgumentTypeError(f"expected {expected} of at most {most}, got {text}")
    return found
