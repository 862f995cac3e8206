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


def row(key, first, trials=1, *, full=False, odd=None):
    facts = {"first": first, "trials": trials, "odd": odd or {}, "seconds": 0.1 * trials}
    return {"key": key, "full": full, "digest": reliability.digest(key), **facts}


def written(log, rows):
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))


def lines(log):
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_trials_are_judged_alone_and_not_run_again(tmp_path, capsys):
    log, page = tmp_path / "log.jsonl", tmp_path / "page.md"
    arguments = ["C14", "C2", "--trials", "2", "--first", "31", "--log", str(log), "--page", str(page)]
    assert reliability.main(arguments) == 0
    assert sorted((row["key"], row["first"], row["trials"], str(row["odd"])) for row in lines(log)) == [
        ("C14", 31, 2, "{}"),
        ("C2", 31, 2, "{}"),
    ]
    assert "4 trials, 0 failed." in page.read_text()
    before = log.read_text()
    assert reliability.main(arguments) == 0
    assert log.read_text() == before
    assert "2 of 2 rows fail in at most 1 of 100 trials" in capsys.readouterr().out


def test_the_trials_of_a_verification_are_run(tmp_path, monkeypatch):
    log, run = tmp_path / "log.jsonl", []
    monkeypatch.setattr(claims, "Trial", lambda seed, full: run.append((seed, full)))
    assert len(reliability.run([("C14", range(4000, 4003))], True)) == 1
    assert run == [(4000, True), (4001, True), (4002, True)]
    monkeypatch.undo()
    assert reliability.main(["C14", "--verify", "0", "4", "--workers", "1", "--log", str(log)]) == 0
    assert [(row["first"], row["trials"]) for row in lines(log)] == [(0, 3), (4000, 3)]


def test_trials_of_an_experiment_that_changed_are_left_out_and_run_again(tmp_path):
    log = tmp_path / "log.jsonl"
    written(log, [row("C14", 5), {**row("C14", 6), "digest": "of other code"}, row("WITHDRAWN", 8)])
    assert [row["first"] for row in reliability.read(log)] == [5]
    assert reliability.main(["C14", "--trials", "3", "--first", "5", "--workers", "1", "--log", str(log)]) == 0
    assert [(row["first"], row["trials"]) for row in reliability.read(log)] == [(5, 1), (6, 2)]


def test_the_digest_is_that_of_code_without_words_and_of_the_version(monkeypatch, tmp_path):
    def digest_of(text):
        reliability.digest.cache_clear()
        (tmp_path / "experiment.py").write_text(text)
        monkeypatch.setattr(reliability.inspect, "getsourcefile", lambda run: str(tmp_path / "experiment.py"))
        return reliability.digest("C14")

    text = '@claim("C14", wording="It holds.", trials=3)\ndef run(trial):\n    """The gap."""\n    return 1\n'
    first = digest_of(text)
    assert digest_of("# a comment\n" + text.replace("It holds.", "It does.").replace("The gap.", "A gap.")) == first
    assert digest_of(text.replace("trials=3", "trials=4")) != first
    assert digest_of(text.replace("return 1", "return 2")) != first
    monkeypatch.setattr(reliability.massieu, "__version__", "another")
    assert digest_of(text) != first
    reliability.digest.cache_clear()


def test_a_claim_that_fails_too_often_is_named(tmp_path, capsys):
    log = tmp_path / "log.jsonl"
    written(log, [row("C14", 0, 60, full=True, odd={"1": "HOLDS"}), row("C14", 60, 40, full=True, odd={"61": "HOLDS"})])
    assert reliability.main(["C14", "--trials", "0", "--log", str(log)]) == 1
    assert "C14 (full): 2 of 100 trials fail: 2 HOLDS" in capsys.readouterr().out


def test_an_experiment_that_raises_fails(monkeypatch):
    monkeypatch.setattr(claims, "judge", lambda evidence: 1 / 0)
    (found,) = reliability.run([("C2", [5])], False)
    assert found["odd"] == {"5": "ZeroDivisionError"}


def test_claims_on_a_model_run_one_after_the_other_for_the_same_seeds(monkeypatch, few, tmp_path):
    parts = []

    class Pool:
        def __init__(self, *_, **__): ...
        def __enter__(self):
            return self

        def __exit__(self, *_): ...
        def submit(self, run, part, full):
            parts.append([(key, list(seeds)) for key, seeds in part])

    monkeypatch.setattr(reliability, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(reliability, "as_completed", lambda jobs: ())
    monkeypatch.setattr(claims, "select", lambda keys: select(["C1", "C22", "X3"]))
    reliability.main(["--trials", "12", "--first", "5000", "--log", str(tmp_path / "log")])
    early, late = list(range(5000, 5010)), [5010, 5011]
    assert parts == [[("C22", early), ("X3", early)], [("C22", late), ("X3", late)], [("C1", early)], [("C1", late)]]


def test_a_seed_of_a_verification_counts_when_all_its_trials_are_there(few):
    assert few["C14"].expected is few["C22"].expected is Verdict.FAILS
    rows = [row("C2", 3000, 3), row("C14", 3000, 2)]
    assert reliability.verified(rows) == {False: {}, True: {}}  # trials are missing
    rows += [row("C14", 3002), row("C22", 3000, 1)]
    assert reliability.verified(rows) == {False: {3: []}, True: {}}
    rows[0]["odd"] = {"3001": "UNDECIDED"}
    assert reliability.verified(rows)[False] == {3: ["C2"]}
    text = reliability.markdown(reliability.summary(rows), reliability.verified(rows))
    assert "`massieu verify`: every verdict as expected for 0 of 1 seeds (seed 3: C2)." in text
    assert "--full" not in text


def test_the_bound_is_the_upper_end_of_an_interval():
    row = {"key": "C2", "title": "a | b", "full": False, "trials": 100, "failed": 0, "verdicts": "", "seconds": 0.5}
    text = reliability.markdown([row], {False: {0: [], 4: []}, True: {0: []}})
    assert float(text.rpartition(" %")[0].rpartition("| ")[2]) == pytest.approx(100 * (1 - 0.05 ** (1 / 100)), rel=0.05)
    assert "a \\| b" in text
    assert "`massieu verify`: every verdict as expected for 2 of 2 seeds." in text
    assert "`massieu verify --full`: every verdict as expected for 1 of 1 seeds." in text
