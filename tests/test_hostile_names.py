"""Names inside foreign files are commands neither of the terminal nor of a spreadsheet."""

import csv
import json

import pytest
import torch

pytest.importorskip("transformers")
from massieu import cli
from massieu.checks import visible
from massieu.monitor import Flag, Place, Reading, open_sink

CLEAR = "\x1b[2J"
FORMULA = "=cmd|' /C calc'!A0"


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    """Return the document of an inspection."""
    folder = tmp_path_factory.mktemp("inspected")
    assert cli.main(["inspect", "-q", "--heads-only", "--limit", "2", "--out", str(folder)]) == 0
    return json.loads((folder / "inspection.json").read_text())


@pytest.fixture
def foreign(document, tmp_path):
    """A function that writes an inspection of a model with the given name."""

    def write(folder, name, **facts):
        (tmp_path / folder).mkdir()
        model = {**document["facts"]["model"], "name": name}
        changed = {**document, "facts": {**document["facts"], **facts, "model": model}}
        (tmp_path / folder / "inspection.json").write_text(json.dumps(changed))
        return str(tmp_path / folder)

    return write


def test_no_name_is_a_command_of_the_terminal_or_markup(foreign, capsys):
    runs = [foreign("a", f"[bold]{CLEAR}"), foreign("b", f"[/]\r{CLEAR}")]
    assert cli.main(["compare", *runs]) == 0
    out, err = capsys.readouterr()
    assert CLEAR not in out + err
    assert "\r" not in out + err
    assert "[bold]" in out
    assert "[/]" in out


def test_a_name_is_no_formula_of_a_spreadsheet(foreign, tmp_path, capsys):
    runs = [foreign("a", FORMULA), foreign("b", "@SUM(1)")]
    assert cli.main(["compare", *runs, "--out", str(tmp_path / "both")]) == 0
    for name in ("means", "heads"):
        with open(tmp_path / "both" / f"comparison_{name}.csv", newline="") as file:
            header = next(csv.reader(file))
        assert f"'{FORMULA}" in header
        assert "'@SUM(1)" in header
        assert not [cell for cell in header if cell.startswith(("=", "@"))]


def test_what_is_replaced_is_said_without_control_characters(foreign, tmp_path, capsys):
    runs = [foreign("a", f"one {CLEAR}"), foreign("b", "two")]
    for _ in range(2):
        assert cli.main(["compare", *runs, "--out", str(tmp_path / "both")]) == 0
    out, err = capsys.readouterr()
    assert "replaces the comparison of" in err
    assert CLEAR not in out + err


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_a_log_is_shown_without_control_characters(suffix, tmp_path, capsys):
    path = tmp_path / f"run.{suffix}"
    sink = open_sink(path)
    places = tuple(Place(f"{stack}{CLEAR}", 0, f"attn{CLEAR}", 2) for stack in ("encoder", "decoder"))
    flag = Flag(f"growth{CLEAR}", places[0].stack, 0, 1, 120.0, 100.0, f"scores saturate{CLEAR}", f"source{CLEAR}")
    for step in range(2):
        sink(Reading(step, places, {"entropy": torch.ones(2, 2, dtype=torch.float64)}, flags=(flag,)))
    sink.close()
    assert cli.main(["watch", str(path), "--once"]) == 0
    out, err = capsys.readouterr()
    assert "growth" in out
    assert CLEAR not in out + err


def test_spaces_of_another_width_are_shown_as_spaces(capsys):
    assert visible("30\u202f% of\u3000all\u00a0heads") == "30\u202f% of\u3000all\u00a0heads"
    assert visible("\u202e\u200b\u2028") == r"\u202e\u200b\u2028"
    assert cli.main(["inspect", "--heads-only", "--limit", "2"]) == 0
    out, _ = capsys.readouterr()
    assert "\u202f%" in out
    assert "\\u" not in out
