"""Claims examined once in a process, however many tests look at them."""

from functools import cache

import pytest

from massieu.claims import Result, examine, select


@cache
def examined(key: str, seed: int) -> Result | str:
    (claim,) = select([key])
    try:
        return examine(claim, seed=seed)
    except ImportError as error:
        if "pip install 'massieu[verify]'" not in str(error):
            raise
        return str(error)


@pytest.fixture(scope="session")
def result():
    """What came of a claim, by key and seed; skips where a package of the extra `verify` is missing."""

    def found(key: str, seed: int = 0) -> Result:
        outcome = examined(key, seed)
        return pytest.skip(outcome) if isinstance(outcome, str) else outcome

    return found
