"""The claims about sparse patterns: their verdicts, controls that count, and code whose break they notice."""

from dataclasses import replace

import pytest

from massieu.claims import examine, select
from massieu.claims.universal import pattern_theorems, patterns
from massieu.patterns import Schedule, dilated, ring, star, window

KEYS = [f"U{number}" for number in range(1, 9)]


def test_what_the_notes_say_comes_out(result):
    figures = {key: result(key, 0).evidence.table for key in KEYS}
    assert figures["U1"]["of which the fixed pattern"] == 1
    assert figures["U2"]["exponent, strided"] == pytest.approx(1.5, abs=0.02)
    assert figures["U3"]["layers to full reach of the star"] == 2
    assert (figures["U4"]["layers, strided"], figures["U4"]["layers, fixed"]) == (3, 2)
    assert figures["U6"] == {"softmax meets the condition": 1, "the first of a list meets it": 0}
    assert figures["U7"]["of four patterns no theorem covers alone"] == 3
    assert figures["U8"]["theorem for the ring applies"] == 1


CHECK, MODEL = patterns.check_universality, pattern_theorems.Transformer


def apart(*args, **options):
    """A schedule in which tokens of different remainder never meet."""
    return Schedule((dilated(1, 2), dilated(2, 2)))


@pytest.mark.parametrize(
    ("module", "name", "wrong", "keys"),
    [
        (patterns, "strided", apart, ["U1", "U4"]),
        (patterns, "fixed", apart, ["U1", "U4"]),
        (patterns, "star_ring", star, ["U1", "U2", "U3"]),
        (patterns, "check_universality", lambda *args: replace(CHECK(*args), hub=None), ["U3"]),
        (patterns, "Schedule", lambda given: given[1], ["U7"]),
        (pattern_theorems, "by_table", lambda points, *rest: 0 * points[:, 0], ["U5"]),
        (pattern_theorems, "star_ring", lambda: window(1), ["U6"]),
        (
            pattern_theorems,
            "Transformer",
            lambda *args, **options: MODEL(*args, **{**options, "positions": None}),
            ["U8"],
        ),
    ],
)
def test_code_that_is_wrong_changes_a_verdict(module, name, wrong, keys, monkeypatch):
    monkeypatch.setattr(module, name, wrong)
    assert [claim.key for claim in select(keys) if not examine(claim).surprises] == []


def test_the_longest_path_is_that_of_small_graphs():
    assert patterns.longest_path(ring().mask(6).numpy()) == 6
    assert patterns.longest_path(patterns.star().mask(6).numpy()) == 3
    assert patterns.longest_path(patterns.dilated(1, 2).mask(6).numpy()) == 3
