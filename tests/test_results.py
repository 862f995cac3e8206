"""Files of commands: written, replaced, and rejected when damaged."""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("transformers")
from massieu import cli
from massieu.inspection import inspect_model, result

FAST = ["--limit", "3", "--heads-only", "--batch-size", "3"]


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def heads_document() -> str:
    return json.dumps(inspect_model(texts=["Call me Ishmael."], experiments="heads").to_dict())


def test_a_run_without_its_part_cannot_be_merged_and_says_how_it_could(tmp_path, capsys):
    assert cli.main(["inspect", "-q", "--no-partial", "--out", str(tmp_path / "report"), *FAST]) == 0
    capsys.readouterr()
    assert cli.main(["merge", str(tmp_path / "report"), str(tmp_path / "report")]) == 2
    assert re.search(
        "report holds a run without the partial result that merge .* --partial\n$", capsys.readouterr().err
    )


def test_a_large_part_is_written_when_it_is_asked_for(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(result, "PARTIAL_BYTES", 1000)
    command = ["inspect", "--out", str(tmp_path), *FAST]
    assert cli.main(command) == 0
    err = capsys.readouterr().err
    assert "partial.safetensors would exceed 32 MB and was not written; massieu merge needs it: --partial" in err
    assert not (tmp_path / "partial.safetensors").exists()
    assert cli.main([*command, "--partial"]) == 0
    assert (tmp_path / "partial.safetensors").stat().st_size > 1000
    err = capsys.readouterr().err
    assert "no part" not in err
    assert re.search(rf"^replaces the report of [-0-9]+ on embedded in {re.escape(str(tmp_path))}/$", err, re.M)


def test_figures_of_an_older_report_do_not_stay_beside_a_new_one(tmp_path):
    inspect_model(texts=["Call me Ishmael. Some years ago"]).save(tmp_path)
    before = {path.name for path in (tmp_path / "figures").iterdir()}
    inspect_model(texts=["Call me Ishmael."], experiments="heads").save(tmp_path)
    assert {path.name for path in (tmp_path / "figures").iterdir()} < before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 100_000, "must be JSON as massieu inspect writes it"),
        ('{"schema": "massieu.inspection/2"}', "and facts is missing or not as expected; inspect again"),
    ],
)
def test_no_inspection_at_all_is_one_sentence(content, message, tmp_path, capsys):
    (tmp_path / "inspection.json").write_text(content)
    assert cli.main(["compare", str(tmp_path), str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def changed(document, path, value):
    *above, last = path
    for name in above:
        document = document[name]
    if value is None:
        del document[last]
    else:
        document[last] = value


@pytest.mark.parametrize(
    ("path", "value", "odd"),
    [
        (("facts", "model"), None, "facts.model"),
        (("facts", "model", "name"), None, "facts.model.name"),
        (("facts", "text", "tokens"), "many", "facts.text.tokens"),
        (("facts", "coverage"), [], "facts.coverage"),
        (("facts", "text", "sha256"), [], "facts.text.sha256"),
        (("facts", "text", "max_length"), None, "facts.text.max_length"),
        (("facts", "model", "hidden"), "wide", "facts.model.hidden"),
        (("heads", 0, "entropy_se"), "low", "heads.entropy_se"),
        (("heads", 0, "head_class"), [], "heads.head_class"),
        (("heads", 0, "layer"), 1 << 70, "heads.layer"),
        (("heads",), None, "heads"),
        (("heads",), [], "heads"),
        (("heads", 0), 7, "heads"),
        (("heads", 0, "layer"), 1e999, "heads.layer"),
        (("heads", 0, "entropy"), 1e999, "heads.entropy"),
        (("heads", 0, "entropy"), "low", "heads.entropy"),
        (("layers",), {}, "layers"),
        (("notes",), [1], "notes"),
    ],
)
def test_an_inspection_without_one_of_its_parts_is_one_sentence(path, value, odd, heads_document, tmp_path, capsys):
    document = json.loads(heads_document)
    (tmp_path / "inspection.json").write_text(heads_document)
    assert cli.main(["compare", str(tmp_path), str(tmp_path)]) == 0
    capsys.readouterr()
    changed(document, path, value)
    (tmp_path / "inspection.json").write_text(json.dumps(document))
    assert cli.main(["compare", str(tmp_path), str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert f"and {odd} is missing or not as expected; inspect again" in err
    assert err.count("\n") == 1
