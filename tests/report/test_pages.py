import io
import json
import re

import pandas
import pytest
from report.sample import inspection
from rich.console import Console

from massieu.checks import UserError
from massieu.inspection.predictions import predictions
from massieu.report import compare, render
from massieu.report.number_format import fixed, small_number
from massieu.report.terminal import show_inspection


def embedded(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


def test_a_page_of_twelve_layers_and_heads_is_light():
    assert len(render(inspection(12, 12)).encode()) < 260_000


@pytest.mark.parametrize("page", [render(inspection(2, 2)), compare([inspection(2, 2), inspection(2, 2, seed=1)])])
def test_nothing_on_the_page_comes_from_elsewhere(page):
    without_words = page.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(
        r"""(?:src|href|action)\s*=\s*["']?(?!#|data:)[^"'>\s]*\w""",
        re.sub(r"<script.*?</script>", "", without_words, flags=re.S),
    )
    assert not re.search(r"@import|url\((?!#)", without_words)
    assert "default-src 'none'" in page


@pytest.mark.parametrize("page", [render, lambda run: compare([run, run])])
def test_whatever_a_model_is_called_stays_text(page):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    run = inspection(2, 2, name=evil)
    run["facts"]["text"]["source"] = run["facts"]["model"]["type"] = run["facts"]["coverage"]["sentence"] = evil
    run["notes"] = [evil]
    run["findings"] = [{"title": evil, "sentence": evil, "quantity": "entropy", "where": []}]
    for quantity in run["quantities"].values():
        quantity |= {"title": evil, "formula": evil, "explanation": evil, "unit": evil}
    for row in (*run["heads"], *run["layers"]):
        row["name"] = evil
    text = page(run)
    assert "<script>alert" not in text
    assert "<img" not in text
    assert evil in embedded(text)["runs"][0]["heads"]["name"]


def test_numbers_that_are_none_become_null():
    run = inspection(2, 2)
    run["heads"][0]["entropy"] = float("nan")
    run["heads"][1]["entropy"] = float("inf")
    assert embedded(render(run))["runs"][0]["heads"]["entropy"][:2] == [None, None]


def test_findings_notes_and_provenance_are_written_out():
    run = inspection(2, 2)
    run["findings"] = [
        {"title": "Sharp", "sentence": "Two of them.", "quantity": "entropy", "where": [["encoder", 0, 1]]}
    ]
    page = render(run)
    for words in (
        "Two of them.",
        *run["notes"],
        run["facts"]["text"]["sha256"],
        "observed 2 of 2 attention modules",
        "2.13.0",
    ):
        assert words in page


def test_the_terminal_and_the_page_call_the_effective_tokens_alike():
    run = inspection(3, 2)
    console = Console(width=200, record=True, file=io.StringIO())
    show_inspection(run, console)
    headings = console.export_text().splitlines()[2]
    assert run["quantities"]["effective_atoms"]["title"].lower() in headings
    assert "atoms" not in headings


def test_predictions_are_a_table_on_the_page_and_in_the_terminal():
    run = inspection(3, 2)
    found = predictions(pandas.DataFrame(run["heads"]), pandas.DataFrame(run["layers"]), run["facts"])
    run["predictions"] = [vars(each) for each in found]
    console = Console(width=160, record=True, file=io.StringIO())
    show_inspection(run, console)
    page, terminal = render(run), console.export_text()
    assert {each.verdict for each in found} > {"fails"}
    for each in found:
        assert f">{each.statement}</a>" in page
        assert f"<td>{each.verdict}</td>" in page
        assert each.sentence in page
        assert each.statement in terminal
        assert each.sentence in terminal
    assert 'id="predictions"' not in render(inspection(3, 2))  # a document of an earlier version


def test_a_missing_module_is_shown_as_a_warning():
    run = inspection(2, 2)
    assert 'class="warn"' not in render(run)
    run["facts"]["coverage"] |= {
        "observed": 1,
        "sentence": "observed 1 of 2 attention modules",
        "missing": ["encoder.layer.1"],
    }
    assert 'class="warn"' in render(run)
    assert "Not observed: encoder.layer.1." in render(run)


def test_an_inspection_without_layers_or_experiments_is_shown():
    run = inspection(2, 2) | {"layers": [], "experiments": [], "findings": [], "notes": []}
    run["facts"]["versions"] = {}
    assert "Nothing in the tables stands out." in render(run)
    assert compare([run, run])


def test_runs_of_one_name_are_numbered():
    names = [run["name"] for run in embedded(compare([inspection(1, 1, name="a"), inspection(1, 1, name="a")]))["runs"]]
    assert names == ["a (1)", "a (2)"]


def test_different_texts_are_said_aloud():
    first, second = inspection(1, 1), inspection(1, 1)
    assert "read different texts" not in compare([first, second])
    second["facts"]["text"]["sha256"] = "0"
    assert "read different texts" in compare([first, second])


@pytest.mark.parametrize("document", [{}, {"schema": "massieu.inspection/9"}, [], None])
def test_a_document_of_another_schema_is_refused(document):
    with pytest.raises(UserError, match="schema"):
        render(document)


def test_one_inspection_cannot_be_compared():
    with pytest.raises(UserError):
        compare([inspection(1, 1)])


def test_numbers_are_set_as_in_print():
    assert [fixed(-0.001), fixed(-1.5), fixed(None), fixed(float("nan"))] == ["0.00", "−1.50", "–", "–"]
    assert [small_number(0.25), small_number(0.0004), small_number(0.0)] == ["0.25", "0.0004", "0.00"]
