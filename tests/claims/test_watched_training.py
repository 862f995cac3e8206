"""Claims about models in training: runs that change their verdicts, and lengths of runs that do not."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("tokenizers")
from massieu.claims import Verdict, examine, select
from massieu.claims.margin import watched_training


@pytest.fixture
def altered(monkeypatch):
    """Put another run in the place of the watched one: its readings in another order, or none but the first."""

    def alter(order):
        watched, own = watched_training.watched, watched_training.watched("stable", 0, 120)
        steps = [reading.step for reading in own.readings]
        readings = [replace(own.readings[at], step=step) for at, step in zip(order, steps, strict=True)]
        altered = replace(own, readings=tuple(readings))
        monkeypatch.setattr(
            watched_training, "watched", lambda kind, *rest: altered if kind == "stable" else watched(kind, *rest)
        )

    return alter


def test_the_verdicts_do_not_depend_on_the_length_of_a_run(monkeypatch):
    watched, own = watched_training.watched, watched_training.watched("stable", 3, 240)
    for readings in (7, 9, 11, 13):
        short = replace(own, readings=own.readings[:readings])
        monkeypatch.setattr(
            watched_training,
            "watched",
            lambda kind, *rest, run=short: run if kind == "stable" else watched(kind, *rest),
        )
        for claim in select(["S4", "S5", "S6"]):
            assert examine(replace(claim, trials=1)).verdict is claim.expected, (claim.key, readings)


def test_a_run_read_backwards_gives_other_verdicts(altered):
    altered(range(6, -1, -1))
    assert examine(*select(["S5"])).verdict is Verdict.UNDECIDED
    assert examine(*select(["S6"])).verdict is Verdict.UNDECIDED


def test_attention_that_stays_as_it_was_neither_gets_diffuse_nor_grows(altered):
    altered([0] * 7)
    assert examine(*select(["S5"])).verdict is Verdict.FAILS
    assert examine(*select(["S6"])).verdict is Verdict.UNDECIDED


def test_maps_that_got_sparser_at_once_would_not_be_called_diffuse_first(altered):
    altered([1, 2, 3, 4, 5, 6, 6])
    found = examine(*select(["S5"]))
    assert found.evidence.printed.share > 1
    assert found.verdict is Verdict.FAILS


def test_maps_that_were_sparse_would_not_be_called_diffuse(monkeypatch):
    own = watched_training.heads_of

    def sharp(run, quantity):
        found = own(run, quantity)
        if quantity == "effective_atoms":
            found[-1] = 2.0
        return found

    monkeypatch.setattr(watched_training, "heads_of", sharp)
    found = examine(*select(["S4"]))
    assert found.evidence.printed.within
    assert found.verdict is Verdict.UNDECIDED
    assert "what is true instead did not come out" in found.reason


def test_the_rows_of_the_runs_see_a_known_number_of_tokens():
    (reading, *_) = watched_training.watched("stable", 0, 120).readings
    seen = torch.arange(1, 65).double()
    assert seen.mean() == watched_training.ATOMS
    uniform = (reading.heads["entropy"] / seen.log().mean()).mean()
    assert 0.98 < float(uniform) <= 1
