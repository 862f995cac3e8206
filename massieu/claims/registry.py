"""Registry of all claims by key."""

from __future__ import annotations

import fnmatch
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable
from typing import Any

from massieu.checks import UserError, did_you_mean
from massieu.claims.claim import Claim, Evidence, Trial, Verdict

__all__ = ["all_claims", "claim", "select"]

_CLAIMS: dict[str, Claim] = {}


def claim(
    key: str, *, correction: str = "", expected: Verdict = Verdict.HOLDS, **fields: Any
) -> Callable[[Callable[[Trial], Evidence]], Callable[[Trial], Evidence]]:
    """Register an experiment with the fields of its :class:`Claim`; one on a model runs in a single trial."""
    trials = 1 if fields.get("on_model") else 3

    def register(run: Callable[[Trial], Evidence]) -> Callable[[Trial], Evidence]:
        if key in _CLAIMS:
            raise UserError(f"the claim {key} is registered twice")
        _CLAIMS[key] = Claim(
            key, run=run, **{"trials": trials, "correction": correction, "expected": expected, **fields}
        )
        return run

    return register


def all_claims() -> list[Claim]:
    """Return every claim, ordered by key."""
    package = importlib.import_module("massieu.claims")
    for module in pkgutil.walk_packages(package.__path__, "massieu.claims."):
        importlib.import_module(module.name)
    return sorted(_CLAIMS.values(), key=lambda each: _order(each.key))


def select(patterns: Iterable[str]) -> list[Claim]:
    """Return claims by key or glob, such as "C1*"; all if there is no pattern.

    Example:
        >>> [claim.key for claim in select(["C14", "c3[67]"])]
        ['C14', 'C36', 'C37']
    """
    claims = all_claims()
    chosen: set[str] = set()
    patterns = list(patterns)
    for pattern in patterns:
        found = {each.key for each in claims if fnmatch.fnmatchcase(each.key.lower(), pattern.lower())}
        if not found:
            near = did_you_mean(pattern.upper(), [each.key for each in claims])
            raise UserError(
                f"no claim is called {pattern}{near}; `massieu verify --list` shows all {len(claims)},"
                " and a glob such as C1* chooses several"
            )
        chosen |= found
    return [each for each in claims if each.key in chosen] if patterns else claims


def _order(key: str) -> tuple[str, int, str]:
    found = re.fullmatch(r"([A-Za-z]*)(\d*)(.*)", key)
    assert found is not None
    return found[1], int(found[2] or 0), found[3]
