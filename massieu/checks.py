"""Errors that are the caller's to repair."""

from __future__ import annotations

__all__ = ["MissingPackageError", "UserError"]


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
