"""Claims examined once in a process for all tests, and examined again beside code that is wrong."""

from functools import cache

import pytest

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
    """Result of a claim, by key and seed; skips where a package of the extra `verify` is missing."""

    def found(key: str, seed: int = 0) -> Result:
        outcome = examined(key, seed)
        return pytest.skip(outcome) if isinstance(outcome, str) else outcome

    return found


@pytest.fixture
def verdict_of():
    """Verdict of a claim that is examined anew."""
    return lambda key: examine(*select([key])).verdict
