"""Failure rates of claims: a log that is continued, a table, and an exit code."""

import json

import pytest

from benchmarks import reliability
from massieu import claims
from massieu.claims import Verdict, select


@pytest.fixture
def few(monkeypatch):
    """Only three claims: two of theory and one on a model."""
    some = select(["C2", "C14", "C22"])
    monkeypatch.setattr(claims, "all_claims", lambda: some)
    reliability.digest.cache_clear()
    yield {claim.key: claim for claim in some}
    reliability.digest.cache_clear()


def trial(key, seed, *, full=False, verdict="FAILS", failed=False, gaps=None):
    facts = {"verdict": verdict, "failed": failed, "gaps": gaps, "seconds": 0.1}
    return {"key": key, "seed": seed, "full": full, **facts, "digest": reliability.digest(key)}


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


def test_the_trials_of_a_verification_are_run(tmp_path):
    log = tmp_path / "log.jsonl"
    assert reliability.main(["C14", "--verify", "0", "4", "--workers", "1", "--log", str(log)]) == 0
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["seed"] for row in rows] == [0, 1, 2, 4000, 4001, 4002]
    (claim,) = select(["C14"])
    found = claims.examine(claim, seed=4).evidence.gaps["printed"]
    assert max(row["gaps"]["printed"] for row in rows[3:]) == list(found)


def test_trials_of_an_experiment_that_changed_are_left_out_and_run_again(tmp_path):
    log = tmp_path / "log.jsonl"
    rows = [trial("C14", 5), {**trial("C14", 6), "digest": "of other code"}, trial("C14", 7)]
    del rows[2]["digest"]
    log.write_text("".join(json.dumps(row) + "\n" for row in [*rows, trial("WITHDRAWN", 8)]))
    assert [row["seed"] for row in reliability.read(log)] == [5]
    assert reliability.main(["C14", "--trials", "3", "--first", "5", "--workers", "1", "--log", str(log)]) == 0
    assert [row["seed"] for row in reliability.read(log)] == [5, 6, 7]


def test_the_digest_is_that_of_module_and_version(monkeypatch):
    reliability.digest.cache_clear()
    first, same, other = (reliability.digest(key) for key in ("C20", "C38", "C14"))
    assert first == same != other
    reliability.digest.cache_clear()
    monkeypatch.setattr(reliability.massieu, "__version__", "another")
    assert reliability.digest("C20") != first
    reliability.digest.cache_clear()


def test_a_claim_that_fails_too_often_is_named(tmp_path, capsys):
    log = tmp_path / "log.jsonl"
    rows = [trial("C14", seed, full=True, verdict="HOLDS", failed=seed < 2) for seed in range(100)]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert reliability.main(["C14", "--trials", "0", "--log", str(log)]) == 1
    assert "C14 (full): 2 of 100 trials fail: 2 HOLDS" in capsys.readouterr().out


def test_an_experiment_that_raises_fails(monkeypatch):
    monkeypatch.setattr(claims, "judge", lambda evidence: 1 / 0)
    (row,) = reliability.run([("C2", 5)], False, 60.0)
    assert (row["verdict"], row["failed"], row["gaps"]) == ("ZeroDivisionError", True, None)


def test_claims_on_a_model_run_one_after_the_other_for_each_seed(monkeypatch, few, tmp_path):
    parts = []

    class Pool:
        def __init__(self, *_, **__): ...
        def __enter__(self):
            return self

        def __exit__(self, *_): ...
        def submit(self, run, part, full, budget):
            parts.append((part, budget))

    monkeypatch.setattr(reliability, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(reliability, "as_completed", lambda jobs: ())
    monkeypatch.setattr(claims, "select", lambda keys: select(["C1", "C22", "X3"]))
    reliability.main(["--trials", "12", "--first", "5000", "--budget", "24", "--log", str(tmp_path / "log")])
    assert [[key for key, _ in part] for part, _ in parts[:12]] == [["C22", "X3"]] * 12
    assert [{seed for _, seed in part} for part, _ in parts[:12]] == [{seed} for seed in range(5000, 5012)]
    assert [len(part) for part, _ in parts[12:]] == [10, 2]
    assert [budget for _, budget in parts[11:]] == pytest.approx([4, 20, 4])


def test_a_seed_of_a_verification_counts_by_the_worst_of_its_trials(few):
    assert few["C2"].expected is Verdict.HOLDS
    assert few["C14"].expected is few["C22"].expected is Verdict.FAILS
    good = {"printed": [0.0, 1.0], "control": [2.0, 1.0]}
    bad = {"printed": [2.0, 1.0], "instead": [0.0, 1.0], "control": [2.0, 1.0]}
    rows = [trial("C2", 3000 + number, gaps=good) for number in range(3)]
    rows += [trial("C14", 3000 + number, gaps=bad) for number in range(3)]
    assert reliability.verified(rows) == {False: {}, True: {}}  # a claim is missing
    rows.append(trial("C22", 3000, gaps=bad))
    assert reliability.verified(rows) == {False: {3: []}, True: {}}
    rows[4]["gaps"] = {**bad, "printed": [0.5, 1.0]}  # one trial holds, the worst does not
    assert reliability.verified(rows)[False] == {3: []}
    rows[1]["gaps"] = {**good, "control": [0.5, 1.0]}
    rows[6]["gaps"] = None
    assert reliability.verified(rows)[False] == {3: ["C2", "C22"]}
    text = reliability.markdown(reliability.summary(rows), reliability.verified(rows))
    assert "`massieu verify`: every verdict as expected for 0 of 1 seeds (seed 3: C2, C22)." in text
    assert "--full" not in text


def test_the_bound_is_the_upper_end_of_an_interval():
    row = {"key": "C2", "title": "a | b", "full": False, "trials": 100, "failed": 0, "verdicts": "", "seconds": 0.5}
    text = reliability.markdown([row], {False: {0: [], 4: []}, True: {0: []}})
    assert float(text.rpartition(" %")[0].rpartition("| ")[2]) == pytest.approx(100 * (1 - 0.05 ** (1 / 100)), rel=0.05)
    assert "a \\| b" in text
    assert "`massieu verify`: every verdict as expected for 2 of 2 seeds." in text
    assert "`massieu verify --full`: every verdict as expected for 1 of 1 seeds." in text
