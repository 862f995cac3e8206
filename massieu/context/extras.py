"""Packages beyond torch and numpy, imported when something that needs them is called."""

from __future__ import annotations

import importlib
from typing import Any

from massieu.checks import MissingPackageError, pip_install

__all__ = ["imported"]

PACKAGES = {"sklearn": "scikit-learn"}


def imported(module: str, what: str) -> Any:
    """The module, or one sentence on how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.partition(".")[0]
        package = PACKAGES.get(name, name)
        raise MissingPackageError(f"{what} needs {package}, which is not installed; {pip_install('verify')}") from None
