"""Claims run side by side; one that raises is undecided, and the others go on."""

import json
import os
import re

import pytest

from massieu import claims, cli
from massieu.claims import Evidence, Gap, Trial, Verdict, publication, runner
from massieu.claims.claim import Curve

GOOD = Evidence(printed=Gap(1e-12, 1e-9), control=Gap(1.0, 1e-9), curve=Curve([1, 2], {"<b>": [1.0, 2.0]}, log_x=True))


def made(run, key="T1", expected=Verdict.HOLDS, **more):
    words = ("a book", "page 1", "It holds", "It <holds>.", "It is at most one.", "a sum term by term", "a_1 < b", "")
    return claims.Claim(key, *words, expected, run, **more)


def broken(trial: Trial) -> Evidence:
    raise ZeroDivisionError("by\nnothing")


def test_an_experiment_that_raises_is_undecided_with_its_reason_and_the_run_goes_on():
    found = claims.verify([made(broken), made(lambda trial: GOOD, "T2")], workers=1)
    assert [each.verdict for each in found] == [Verdict.UNDECIDED, Verdict.HOLDS]
    assert found[0].reason == "ZeroDivisionError: by nothing"
    assert found[0].surprises
    assert not found[1].surprises
    assert found[0].to_dict()["printed"] is None
    json.dumps(found[0].to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("evidence", "words"),
    [
        (Evidence(printed=GOOD.printed, control=Gap(1e-10, 1e-9)), "the control did not break: 0.1 of what is allowed"),
        (Evidence(printed=Gap(float("nan"), 1.0), control=GOOD.control), "not a finite number: printed"),
        (
            Evidence(printed=GOOD.control, instead=Gap(2.0, 1.0), control=GOOD.control),
            "what is true instead did not come out: 2 of what is allowed",
        ),
    ],
)
def test_doubt_has_a_reason(evidence, words):
    found = claims.examine(made(lambda trial: evidence))
    assert found.verdict is Verdict.UNDECIDED
    assert words in found.reason


def test_results_print_a_line_each_and_are_a_table_in_a_notebook():
    def broken(trial):
        raise ArithmeticError("<no> number")

    found = claims.verify([made(lambda trial: GOOD), made(broken, "T2")], workers=1)
    assert isinstance(found, list)
    lines = repr(found).splitlines()
    assert len(lines) == 2
    for line, result in zip(lines, found, strict=True):
        assert line == repr(result) == str(result)
        assert line.startswith(f"{result.claim.key}: {result.verdict}")
        assert result.claim.wording in line
    assert "<no> number" in lines[1]
    shown = found._repr_html_()
    assert shown.count("<tr") == 3
    assert "&lt;no&gt; number" in shown
    assert "<no>" not in shown
    for result in found:
        assert result.claim.key in shown
        assert str(result.verdict) in shown


def test_every_trial_has_a_seed_of_its_own():
    seeds = []

    def note(trial):
        seeds.append(trial.seed)
        return GOOD

    claims.examine(made(note), seed=2)
    claims.examine(made(note, trials=1), seed=0)
    assert seeds == [2000, 2001, 2002, 0]


def test_a_model_of_the_user_is_measured_and_not_judged():
    claim = made(lambda trial: GOOD, expected=Verdict.FAILS, on_model=True)
    assert claims.examine(claim).surprises
    assert not claims.examine(claim, model="some/model").surprises


def test_processes_give_what_one_process_gives():
    chosen = claims.select(["C4", "C14"])
    observed = []
    several = claims.verify(chosen, workers=2, progress=lambda *what: observed.append(what))
    one = claims.verify(chosen, workers=1)
    assert [each.evidence.gaps for each in several] == [each.evidence.gaps for each in one]
    assert observed == [("verifying", 1, 2), ("verifying", 2, 2)]


def deadly(keys, options):
    """Examine claims in a worker whose process ends while it runs C4."""
    if "C4" in keys:
        os._exit(9)
    return runner._examine_keys(keys, options)


def test_a_process_that_ends_loses_its_own_claim_only(monkeypatch):
    monkeypatch.setattr(runner, "_examine_keys", deadly)
    found = claims.verify(claims.select(["C2", "C4", "C14", "C16"]), workers=2)
    assert [each.verdict for each in found] == ["HOLDS", "UNDECIDED", "FAILS", "HOLDS_CORRECTED"]
    assert found[1].reason == "the process that ran it ended; was memory short?"
    assert found[1].surprises


def test_claims_that_are_not_registered_run_in_this_process():
    chosen = [made(lambda trial: GOOD), made(broken, "T2"), made(lambda trial: GOOD, "C14")]
    found = claims.verify(chosen, workers=2)
    assert [each.verdict for each in found] == [Verdict.HOLDS, Verdict.UNDECIDED, Verdict.HOLDS]


def test_a_gap_that_is_not_finite_has_its_page(tmp_path):
    nothing = Evidence(printed=Gap(float("inf"), 1.0), control=Gap(float("nan"), float("nan")))
    page = publication.save([claims.examine(made(lambda trial: nothing))], tmp_path / "out", {})
    assert "not finite" in page.read_text()


def test_claims_are_chosen_by_key_or_glob():
    assert [each.key for each in claims.select(["c14", "C4"])] == ["C4", "C14"]
    assert claims.select([]) == claims.all_claims()
    with pytest.raises(ValueError, match=r"no claim is called Z9; `massieu verify --list` shows all \d+, and a glob"):
        claims.select(["C4", "Z9"])


def test_a_key_is_registered_once():
    words = dict.fromkeys(("source", "place", "title", "wording", "reading", "reference"), "")
    with pytest.raises(ValueError, match="the claim C14 is registered twice"):
        claims.claim("C14", **words, expected=Verdict.HOLDS)(broken)


def test_the_page_escapes_and_shows_everything(tmp_path):
    found = claims.verify([made(lambda trial: GOOD), made(broken, "T2")], workers=1)
    page = publication.save(found, tmp_path / "out", {"seed": 0}).read_text()
    assert "It &lt;holds&gt;." in page
    assert "<b>" not in page.split("<style>")[0] + page.split("</style>")[-1].replace("<body>", "")
    assert "ZeroDivisionError: by nothing" in page
    assert "raise ZeroDivisionError" in page  # the code
    assert "tests/claims/test_runner.py" in page
    assert not re.search(r"(src|href)=[\"']?https?:", page)
    assert len(json.loads((tmp_path / "out" / "claims.json").read_text())["claims"]) == 2
    assert (
        "| T1 | It <holds>. `a_1 < b` | It is at most one. Compared with a sum term by term. | a book, page 1 | holds | 0.001 |"
        in (tmp_path / "out" / "claims.md").read_text()
    )


def test_the_command_prints_verdicts_and_writes_the_page(tmp_path, capsys):
    assert cli.main(["verify", "C14", "--workers", "1", "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "1 of 1 verdicts as expected" in out
    assert f"page: {tmp_path / 'out' / 'claims.html'}" in out
    assert cli.main(["verify", "C14", "--workers", "1", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["claims"]
    assert {"key", "source", "verdict", "expected", "printed", "control", "corrected", "seconds"} <= set(row)
    assert (row["key"], row["verdict"], row["expected"]) == ("C14", "FAILS", "FAILS")
    assert cli.main(["verify", "--list", "--json"]) == 0
    words = {"source", "place", "title", "wording", "reading", "reference"}
    assert {"key", "expected", *words} == set(json.loads(capsys.readouterr().out)["claims"][0])
    assert cli.main(["verify", "--list", "C14"]) == 0
    assert "false as printed" in capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 160])
def test_the_terminal_shows_what_each_claim_says(width, monkeypatch, capsys):
    from massieu import claims

    chosen = claims.select(["C14", "C15"])
    monkeypatch.setenv("COLUMNS", str(width))
    assert cli.main(["verify", *(claim.key for claim in chosen), "--workers", "1"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= width
    for claim in chosen:
        line = next(line for line in out.splitlines() if line.startswith(f"{claim.key} "))
        assert " ".join(claim.title.split()[:3]) in line
    assert "false as printed, as expected" in " ".join(out.split())
    assert ("control" in out.splitlines()[0]) == (width == 160)
    assert "in units of what is allowed" in " ".join(out.split())


def test_a_verdict_that_is_not_expected_makes_exit_code_one(monkeypatch, capsys):
    monkeypatch.setattr(runner, "judge", lambda evidence: Verdict.HOLDS)
    assert cli.main(["verify", "C14", "--workers", "1", "-q"]) == 1
    assert "massieu: C14 holds, expected: false as printed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Z9"], "no claim is called Z9"),
        (["C14", "--out", "{file}/out"], "cannot be written to"),
        (["X1", "--model", "no/such-model"], "no reachable Hugging Face model called no/such-model"),
    ],
)
def test_bad_input_is_one_sentence(arguments, message, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    given = [argument.format(file=tmp_path / "file") for argument in arguments]
    assert cli.main(["verify", *given]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert (out, err.count("\n")) == ("", 1)
