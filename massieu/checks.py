"""Validators of arguments, and errors that describe a mistake of the user in one sentence.

A validator returns the argument or raises :class:`UserError`: what was expected, what arrived and what to do.
"""

from __future__ import annotations

import difflib
import importlib
import math
import numbers
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = [
    "MissingPackageError",
    "NotObservable",
    "UserError",
    "check_choice",
    "check_count",
    "check_floating",
    "check_number",
    "check_shape",
    "did_you_mean",
    "expanded",
    "optional_package",
    "pip_install",
    "visible",
]

PACKAGES = {"sklearn": "scikit-learn"}  # modules whose package has another name


class UserError(ValueError, TypeError):
    """Bad input, described in one sentence: what was expected, what arrived and what to do.

    The command line prints its message and exits with its code. Any other exception is a defect of this library, or of
    one below it, and is reported as such. It is a ``ValueError`` and a ``TypeError``, so that code which catches
    these, as for functions of torch, catches it.

    Example:
        >>> issubclass(UserError, ValueError) and issubclass(UserError, TypeError)
        True
    """

    exit_code = 2


class MissingPackageError(UserError, ImportError):
    """An optional package that is not installed; the message names the extra that brings it."""


class NotObservable(UserError):  # noqa: N818  # a state of the model, not a mistake
    """The attention of the model, or a part of it, cannot be observed."""

    exit_code = 3


def check_count(value: Any, name: str, *, least: int = 1, remedy: str = "correct it") -> int:
    """Return a whole number that is at least ``least``.

    Example:
        >>> check_count(3, "steps")
        3
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise UserError(f"{name} must be a whole number of at least {least}, got {value!r}; {remedy}")
    return int(value)


def check_number(
    value: Any,
    name: str,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    below: float = math.inf,
    remedy: str = "correct it",
) -> float:
    """Return a finite number that is at least ``least``, larger than ``above`` and smaller than ``below``.

    Example:
        >>> check_number(2, "beta", above=0)
        2.0
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        got = type(value).__name__
        raise UserError(f"{name} must be a Python number, got {got}; convert a tensor with .item()")
    number = float(value)
    if not (math.isfinite(number) and number >= least and above < number < below):
        bounds = [f"at least {least:g}"] * (least > -math.inf) + [f"larger than {above:g}"] * (above > -math.inf)
        bounds += [f"below {below:g}"] * (below < math.inf)
        raise UserError(f"{name} must be {' and '.join(['finite', *bounds])}, got {value}; {remedy}")
    return number


def check_choice(value: Any, name: str, allowed: Iterable[Any]) -> None:
    """Raise unless the value is one of those allowed.

    Example:
        >>> check_choice("gd", "method", ("gd", "ngd"))
    """
    known = list(allowed)
    if not any(value is each or (type(value) is type(each) and value == each) for each in known):
        near = did_you_mean(value, [each for each in known if isinstance(each, str)]) if isinstance(value, str) else ""
        raise UserError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}{near}")


def check_floating(tensor: Any, name: str, remedy: str = "convert it with .double()", *, finite: bool = False) -> None:
    """Raise unless this is a real floating-point tensor, with finite entries if ``finite``."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        got = type(tensor).__name__
        raise UserError(f"{name} must be a floating-point tensor, got {got}; convert it with torch.as_tensor")
    if tensor.is_complex():
        remedy = "attention weights are exponentials of real scores: pass the real and the imaginary part side by side"
    if not tensor.is_floating_point():
        raise UserError(f"{name} must be a floating-point tensor, got {tensor.dtype}; {remedy}")
    if finite and not bool(tensor.detach().isfinite().all()):
        raise UserError(f"{name} must be finite, got nan or infinity; remove or replace those entries")


def check_shape(tensor: Any, name: str, *axes: int | str, remedy: str = "") -> None:
    """Raise unless a tensor has these axes: sizes, or names of axes of any size; a first axis ``"..."`` is a batch.

    Example:
        >>> import torch
        >>> check_shape(torch.zeros(2, 5, 3), "keys", "...", "atoms", 3)
    """
    batch = axes[:1] == ("...",)
    sizes, shape = axes[batch:], tuple(tensor.shape)
    own = shape[len(shape) - len(sizes) :] if batch else shape
    known = len(own) == len(sizes)
    if not known or any(isinstance(size, int) and size != got for size, got in zip(sizes, own, strict=True)):
        if not remedy:
            single = batch and len(shape) == len(sizes) - 1
            remedy = f"for a single one pass {name}[None]" if single else "check its axes"
        raise UserError(f"{name} must have shape ({', '.join(map(str, axes))}), got {shape}; {remedy}")


def optional_package(module: str, what: str, extra: str) -> Any:
    """Return a module of an optional package; one sentence on how to install it if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.partition(".")[0]
        package = PACKAGES.get(name, name)
        raise MissingPackageError(f"{what} needs {package}, which is not installed; {pip_install(extra)}") from None


def visible(text: str) -> str:
    r"""Return the text with control characters escaped, for one line of a terminal.

    Example:
        >>> print(visible("clear \x1b[2J and a new\nline"))
        clear \x1b[2J and a new\nline
    """
    return "".join(sign if _is_shown(sign) else sign.encode("unicode_escape").decode() for sign in text)


def _is_shown(sign: str) -> bool:
    """Return True for printable characters and spaces of any width."""
    return sign.isprintable() or unicodedata.category(sign) == "Zs"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the nearest known word as part of a sentence; empty if none is near, or if it is that word.

    Example:
        >>> did_you_mean("entropi", ["entropy", "peak"])
        ' (did you mean entropy?)'
    """
    near = difflib.get_close_matches(word, list(known), 1)
    return f" (did you mean {near[0]}?)" if near and near[0] != word else ""


def pip_install(extra: str) -> str:
    """Return the command that installs an extra, from the clone if this library is imported from one.

    Example:
        >>> pip_install("inspect").endswith("[inspect]'")
        True
    """
    root = Path(__file__).resolve().parents[1]
    if (root / "pyproject.toml").is_file():
        return f"pip install -e '{root}[{extra}]'"
    return f"pip install 'massieu[{extra}]'"


def expanded(path: str | Path) -> Path:
    """Return the path with a leading ``~`` replaced by the home folder that it names."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{path} names the home folder of a user who does not exist; check the name after ~") from None
