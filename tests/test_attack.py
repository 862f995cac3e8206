"""A small share of every attack."""

import importlib
import types

import pytest

import attack

CASES = {"kernels": 60, "parts": 10, "flips": 4, "folders": 6, "texts": 8, "kills": 2, "invocations": 8}


@pytest.mark.parametrize("name", attack.NAMES)
def test_nothing_breaks_in_a_few_cases(name):
    module = importlib.import_module(f"attack.{name}")
    outcomes = list(module.attack(7, CASES[name]))
    assert len(outcomes) == CASES[name] < module.COUNT
    assert [outcome for outcome in outcomes if outcome is not None] == []


def module_of(outcomes):
    """Return a fake module with these outcomes."""
    module = types.ModuleType("attack.kernels")
    module.COUNT, module.attack = 4, lambda seed, count: iter(outcomes)
    return module


@pytest.mark.parametrize(
    ("outcomes", "code", "said"),
    [
        ([None] * 4, 0, "4 cases, 0 broken"),
        ([None, "case 1 of seed 0 gave nan", None, None], 1, "case 1 of seed 0 gave nan"),
        ([None] * 3, 1, "expected 4 cases, ran 3"),
    ],
)
def test_a_case_that_breaks_or_is_missing_fails_the_run(outcomes, code, said, monkeypatch, capsys):
    monkeypatch.setitem(importlib.sys.modules, "attack.kernels", module_of(outcomes))
    assert attack.main(["kernels"]) == code
    assert said in capsys.readouterr().out
