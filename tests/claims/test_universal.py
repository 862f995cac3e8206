"""The claims about universal approximation: their verdicts, controls that count, and code whose break they notice."""

import importlib
from dataclasses import replace

import pytest
import torch

pytest.importorskip("scipy")
pytest.importorskip("pandas")
from massieu.claims import examine, select
from massieu.patterns import full

KEYS = [f"U{number}" for number in range(21, 37)]


def test_what_the_notes_measured_comes_out(result):
    figures = {key: result(key, 0).evidence.table for key in KEYS}
    assert figures["U21"]["largest, n = 3, d = 2, T = 3"] == 112_120_064
    assert figures["U26"]["numbers of a rank-one hardmax head, 9 tokens, T = 3"] == 45
    assert figures["U26"]["contexts"] == 405
    assert figures["U27"]["decimal logarithm of the least gap"] < -100
    assert figures["U28"]["machine epsilons at the proof's scale"] == 0
    assert figures["U28"]["machine epsilons with codes that were searched"] > 1e10
    assert figures["U30"]["weights that are not zero"] < figures["U30"]["parameters of the corollary"]
    assert figures["U30"]["parameters of the corollary"] < figures["U30"]["parameters as stored"]
    assert (
        figures["U36"]["the same in a dilated window"]
        == 0
        < figures["U36"]["change of the first output by its neighbor"]
    )
    assert figures["U35"]["layers, 8 cells, T = 2"] == 8 + 1 + 9 + 56 + 1
    assert figures["U33"]["largest error in strips of 0.0001 cells"] > 1


def broken_stack(original):
    def stack(*given, **options):
        found = original(*given, **options)
        return replace(found, identifiers=found.identifiers // 1000)

    return stack


def broken_codes(original):
    """A search that returns two codes that are the same."""

    def search(*given, **options):
        found = original(*given, **options)
        codes = found.codes.clone()
        codes[1] = codes[2]
        return replace(found, codes=codes)

    return search


def broken_table(original):
    def look_up(dim, keys, values):
        return original(dim, keys + 3 * keys.diff().min() * torch.arange(len(keys)), values)

    return look_up


@pytest.mark.parametrize(
    ("place", "wrong", "keys"),
    [
        ("massieu.claims.universal.contextual_maps.shift_stack", broken_stack, ["U21", "U22", "U23"]),
        (
            "massieu.claims.universal.contextual_maps.boltz",
            lambda original: lambda scores: 1.001 * original(scores),
            ["U24"],
        ),
        (
            "massieu.claims.universal.contextual_maps._exact_boltz",
            lambda original: lambda *given: 0 * original(*given),
            ["U25", "U27"],
        ),
        (
            "massieu.claims.universal.contextual_maps._hardmax",
            lambda original: lambda scores: (10 * scores).softmax(-1),
            ["U26"],
        ),
        ("massieu.claims.universal.contextual_maps.contextual_map", broken_codes, ["U28"]),
        ("massieu.universal.construction.contextual_map", broken_codes, ["U29", "U32"]),
        (
            "massieu.universal.memorization.interpolant",
            lambda original: lambda a, b, c, d: original(a, b, c, d.flip(0)),
            ["U30"],
        ),
        (
            "massieu.claims.universal.contextual_maps.attended",
            lambda original: lambda *given: original(*given) ** 2,
            ["U31"],
        ),
        ("massieu.universal.memorization.table", broken_table, ["U34"]),
        ("massieu.universal.sparse_construction.table", broken_table, ["U36"]),
        ("massieu.claims.universal.approximation.star_ring", lambda original: full, ["U36"]),
        ("massieu.universal.narrow_construction.shift_stack", broken_stack, ["U35"]),
        ("massieu.universal.narrow_construction._clear", lambda original: lambda *given: torch.nn.Identity(), ["U35"]),
        ("massieu.universal.construction.table", broken_table, ["U29", "U33"]),
    ],
)
def test_code_that_is_wrong_changes_verdicts(place, wrong, keys, monkeypatch):
    module, name = place.rsplit(".", 1)
    target = importlib.import_module(module)
    monkeypatch.setattr(target, name, wrong(getattr(target, name)))
    assert [claim.key for claim in select(keys) if not examine(claim).surprises] == []
