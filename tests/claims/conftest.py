"""Claims examined once in a process, however many tests look at them, or again beside code that is wrong."""

from dataclasses import fields, replace
from functools import cache

import pytest
import torch

from massieu.checks import pip_install
from massieu.claims import Result, examine, select


@cache
def examined(key: str, seed: int) -> Result | str:
    (claim,) = select([key])
    try:
        return examine(claim, seed=seed)
    except ImportError as error:
        if pip_install("verify") not in str(error):
            raise
        return str(error)


@pytest.fixture(scope="session")
def result():
    """What came of a claim, by key and seed; skips where a package of the extra `verify` is missing."""

    def found(key: str, seed: int = 0) -> Result:
        outcome = examined(key, seed)
        return pytest.skip(outcome) if isinstance(outcome, str) else outcome

    return found


@pytest.fixture
def unmoved(monkeypatch):
    """Which claims keep their verdict when all numbers that a function returns are a factor too large."""

    def keep(owner: object, name: str, factor: float, keys: list[str]) -> list[str]:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **options: stretched(original(*args, **options), factor))
        return [claim.key for claim in select(keys) if not examine(claim).surprises]

    return keep


def stretched(found, factor):
    """Every number in a result times a factor; of a solver's, those that it was asked for."""
    if found is None or (isinstance(found, torch.Tensor) and not found.is_floating_point()):
        return found
    if isinstance(found, tuple):
        parts = [stretched(each, factor) for each in found]
        return type(found)(*parts) if hasattr(found, "_fields") else tuple(parts)
    if isinstance(found, torch.Tensor | int | float):
        return found * factor
    asked = fields(found)[0].name
    return replace(found, **{asked: getattr(found, asked) * factor})
