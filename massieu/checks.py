"""Errors that are told in one sentence, and the words that such sentences share."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable
from pathlib import Path

__all__ = ["MissingPackageError", "NotObservable", "UserError", "did_you_mean", "expanded", "pip_install", "visible"]


class UserError(ValueError, TypeError):
    """Bad input, told in one sentence: what was expected, what arrived and what to do.

    The command line prints its message and exits with code 2. Any other exception is a defect of this library, or of
    one below it, and is reported as such. It is a ``ValueError`` and a ``TypeError``, so that code which catches
    these, as for functions of torch, catches it.

    Example:
        >>> issubclass(UserError, ValueError) and issubclass(UserError, TypeError)
        True
    """


class MissingPackageError(UserError, ImportError):
    """An optional package that is not installed; the message names the extra that brings it."""


class NotObservable(RuntimeError):  # noqa: N818  # a state of the model, not a mistake
    """The attention of the model, or a part of it, cannot be seen; the command line exits with code 3."""


def visible(text: str) -> str:
    r"""Return the text with everything that is neither printable nor a space as an escape, for one line of a terminal.

    Example:
        >>> print(visible("clear \x1b[2J and a new\nline"))
        clear \x1b[2J and a new\nline
    """
    return "".join(sign if _is_shown(sign) else sign.encode("unicode_escape").decode() for sign in text)


def _is_shown(sign: str) -> bool:
    """Whether a terminal shows a character as it is: a space of another width is one, as before a percent sign."""
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
    """Return the command that installs an extra: from the clone that this library is imported from, if it is one.

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
