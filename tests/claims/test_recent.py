"""The claims about later results: code whose break they notice."""

import importlib

import pytest

from massieu.claims import examine, select


def halved(original):
    return lambda *given, **options: 0.5 * original(*given, **options)


def deeper(original):
    """Statistics of rows with scores twice as large."""
    return lambda natural, *rest, **options: original(2 * natural, *rest, **options)


def shifted(original):
    """Attention with something left of the queries in its outputs."""

    def attend(query, *rest, **options):
        found = original(query, *rest, **options)
        return found._replace(output=found.output + 1e-3 * query)

    return attend


def without_a_start(original):
    """A task in which the start token looks like any other."""

    def sequences(*given):
        inputs, targets = original(*given)
        inputs[..., 0] = 0
        return inputs, targets

    return sequences


BREAKS = [
    ("massieu.claims.recent.collapse.row_statistics", deeper, ["R2"]),
    ("massieu.claims.recent.collapse.entropy_floor", halved, ["R2"]),
    ("massieu.claims.recent.collapse.attend", shifted, ["R3"]),
    (
        "massieu.claims.recent.collapse._cubic_bound",
        lambda original: lambda *given: (0 * original(*given)[0], original(*given)[1]),
        ["R3"],
    ),
    ("massieu.claims.recent.sinks._sequences", without_a_start, ["R12"]),
]


@pytest.mark.parametrize(("place", "wrong", "keys"), BREAKS)
def test_code_that_is_wrong_changes_verdicts(place, wrong, keys, monkeypatch):
    module, name = place.rsplit(".", 1)
    target = importlib.import_module(module)
    monkeypatch.setattr(target, name, wrong(getattr(target, name)))
    assert [claim.key for claim in select(keys) if not examine(claim).surprises] == []
