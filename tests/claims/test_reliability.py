"""Failure rates of claims: a log that is continued, a table, and an exit code."""

import json

import pytest

from benchmarks import reliability


def test_trials_are_judged_alone_and_not_run_again(tmp_path, capsys):
    log, page = tmp_path / "log.jsonl", tmp_path / "page.md"
    arguments = ["C14", "C2", "--trials", "2", "--first", "31", "--log", str(log), "--page", str(page)]
    assert reliability.main(arguments) == 0
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert sorted((row["key"], row["seed"], row["verdict"]) for row in rows) == [
        ("C14", 31, "FAILS"),
        ("C14", 32, "FAILS"),
        ("C2", 31, "HOLDS"),
        ("C2", 32, "HOLDS"),
    ]
    assert not any(row["failed"] for row in rows)
    assert "4 trials, 0 failed." in page.read_text()
    before = log.read_text()
    assert reliability.main(arguments) == 0
    assert log.read_text() == before
    assert "2 of 2 rows fail in at most 1 of 100 trials" in capsys.readouterr().out


def test_a_claim_that_fails_too_often_is_named(tmp_path, capsys):
    log = tmp_path / "log.jsonl"
    row = {"key": "C14", "full": True, "verdict": "HOLDS", "seconds": 0.1}
    log.write_text("".join(json.dumps({**row, "seed": seed, "failed": seed < 2}) + "\n" for seed in range(100)))
    assert reliability.main(["C14", "--trials", "0", "--log", str(log)]) == 1
    assert "C14 (full): 2 of 100 trials fail: 2 HOLDS" in capsys.readouterr().out


def test_an_experiment_that_raises_fails(monkeypatch):
    from massieu import claims

    monkeypatch.setattr(claims, "judge", lambda evidence: 1 / 0)
    (row,) = reliability.run("C2", [5], False, 60.0)
    assert (row["verdict"], row["failed"]) == ("ZeroDivisionError", True)


def test_the_bound_is_the_upper_end_of_an_interval():
    row = {"key": "C2", "title": "a | b", "full": False, "trials": 100, "failed": 0, "verdicts": "", "seconds": 0.5}
    text = reliability.markdown([row])
    assert float(text.rpartition(" %")[0].rpartition("| ")[2]) == pytest.approx(100 * (1 - 0.05 ** (1 / 100)), rel=0.05)
    assert "a \\| b" in text
