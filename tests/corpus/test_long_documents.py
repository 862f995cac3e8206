"""Documents that are too long for the model, or too large for any reader, are refused early, cut, or counted."""

from __future__ import annotations

import csv
import gzip
import io
import json

import pyarrow
import pyarrow.parquet
import pytest

pytest.importorskip("transformers")
from massieu import assets, cli
from massieu.checks import UserError
from massieu.corpus import BadRecords, Corpus, lines, records
from massieu.corpus import columns as tables
from massieu.corpus.shards import text_shards
from massieu.engine import Checkpoint, Local
from massieu.inspection import inspect_model
from massieu.inspection.merging import merge_runs
from massieu.inspection.options import Options
from massieu.inspection.reader import Reader
from massieu.models.loading import load

SHORT = "Call me Ishmael."
LONG = "Some years ago, never mind how long precisely, there were whales. " * 60


@pytest.fixture(scope="module")
def loaded():
    return load(str(assets.MODEL))


def test_long_documents_are_skipped_and_counted(tmp_path):
    texts = [SHORT, LONG, "Some years ago", LONG]
    found = inspect_model(texts=texts, experiments="heads", long_documents="skip")
    without = inspect_model(texts=[texts[0], texts[2]], experiments="heads")
    assert found.heads.equals(without.heads)
    assert found.facts["text"]["documents"] == 2
    assert found.facts["text"]["long_documents"] == 2
    assert found.facts["text"]["sha256"] == without.facts["text"]["sha256"]
    assert "2 documents beyond 256 tokens were skipped." in found.notes
    one = inspect_model(texts=texts[:2], experiments="heads", long_documents="skip", max_length=64)
    assert "1 document beyond 64 tokens was skipped." in one.notes


def test_long_documents_are_cut_at_the_window(tmp_path):
    found = inspect_model(texts=[SHORT, LONG], experiments="heads", long_documents="cut")
    window = inspect_model(texts=[SHORT, LONG], experiments="heads", max_length=256)
    assert found.heads.equals(window.heads)
    assert found.facts["text"]["passages"] > found.facts["text"]["documents"] == 2
    assert found.facts["text"]["long_documents"] == 1


def test_what_is_done_with_long_documents_belongs_to_the_result(loaded):
    ways = [Options(), Options(max_length=128), Options(long_documents="skip"), Options(128, long_documents="cut")]
    assert [way.result_affecting()["long_documents"] for way in ways] == ["error", "cut", "skip", "cut"]
    error, skip = (Reader(loaded.model, loaded.tokenizer, way).identity for way in (ways[0], ways[2]))
    assert error.difference(skip) == "the option long_documents is error in one and skip in the other"
    with pytest.raises(UserError, match="long_documents"):
        Options(long_documents="drop")


def test_nothing_but_long_documents_is_one_sentence():
    with pytest.raises(UserError, match="no document is left: all 2 with text have more than 256 tokens and were"):
        inspect_model(texts=[LONG, LONG], experiments="heads", long_documents="skip")


@pytest.mark.parametrize("kind", ["texts", "corpus", "file"])
def test_a_long_document_is_refused_before_anything_is_read(kind, tmp_path, monkeypatch):
    texts = [*[SHORT] * 40, LONG]
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps(text) for text in texts))
    given = {"texts": texts, "corpus": Corpus.from_texts(texts), "file": Corpus(tmp_path / "text.jsonl")}[kind]
    monkeypatch.setattr(Reader, "read", lambda *_, **__: pytest.fail("the model has read"))
    place = {"texts": "text number 41", "corpus": "texts:document 41", "file": "text.jsonl:41"}[kind]
    with pytest.raises(UserError, match=f"{place} has [0-9]+ tokens, but the model reads at most 256; pass --long-doc"):
        inspect_model(texts=given, experiments="heads")


def test_a_run_that_met_a_long_document_goes_on_with_the_option_that_its_error_names(loaded, tmp_path):
    shards, path = list(text_shards([*[SHORT] * 6, LONG, *[SHORT] * 3], 2)), tmp_path / "checkpoint"

    def read(resume, **options):
        reader = Reader(loaded.model, loaded.tokenizer, Options(experiments="heads", **options))
        return Local().fold(reader, shards, checkpoint=Checkpoint(path, resume=resume, seconds=0))

    with pytest.raises(UserError, match="--long-documents cut .*; with that option and --resume the run goes on from"):
        read(False)
    partial = read(True, long_documents="skip")
    assert partial.counts.documents == 9
    assert partial.counts.long == 1
    assert partial.identity.options["long_documents"] == "skip"
    with pytest.raises(UserError, match="the option long_documents is skip in one and cut in the other"):
        read(True, long_documents="cut")


def test_runs_merge_unless_long_documents_were_cut_in_one_and_skipped_in_another(tmp_path):
    def run(name, texts, **options):
        inspect_model(texts=texts, experiments="heads", **options).save(tmp_path / name, figures=False)
        return tmp_path / name

    none, window = run("none", [SHORT]), run("window", ["Loomings."], max_length=256)
    skipped, cut = (run(how, [f"{how} {LONG}", f"{how} one."], long_documents=how) for how in ("skip", "cut"))
    for runs in ([none, window, skipped], [skipped, window, none]):
        merged = merge_runs(runs)
        assert merged.facts["text"]["documents"] == 3
        assert merged.facts["text"]["long_documents"] == 1
        assert "1 document beyond 256 tokens was skipped." in merged.notes
    assert merge_runs([none, cut]).facts["text"]["long_documents"] == 1
    with pytest.raises(UserError, match="the option long_documents is skip in one and cut in the other"):
        merge_runs([none, skipped, cut])


def test_the_command_skips_long_documents(tmp_path, capsys):
    (tmp_path / "text.txt").write_text(f"{SHORT}\n\n{LONG}")
    command = ["inspect", "--json", "--heads-only", "--text", str(tmp_path / "text.txt")]
    assert cli.main([*command, "--long-documents", "skip"]) == 0
    assert json.loads(capsys.readouterr().out)["facts"]["text"]["long_documents"] == 1
    assert cli.main(command) == 2
    assert "pass --long-documents cut" in capsys.readouterr().err


@pytest.fixture
def small(monkeypatch):
    """Records of at most 1,000 bytes."""
    for module in (records, lines, tables):
        monkeypatch.setattr(module, "LARGEST", 1000)
    return 1000


def documents(path, **options) -> tuple[list[str], BadRecords]:
    bad_records = BadRecords()
    shards = Corpus(path, **options).shards()
    return [document.text for shard in shards for document in shard.read(bad_records)], bad_records


def test_records_that_are_too_large_are_counted_and_their_neighbors_are_read(small, tmp_path):
    large, fits = "x" * 5 * small, "y" * (small - 10)
    written = {
        "a.txt": f"before\n\n{large}\n\nafter\n\n{fits}",
        "b.txt": "before\n\n" + "x\n" * small + "\nafter\n\n" + fits,
        "c.jsonl": "\n".join(json.dumps(text) for text in ("before", large, "after", fits)),
    }
    for name, text in written.items():
        (tmp_path / name).write_text(text)
        for shard_bytes in (97, 1024, None):
            texts, bad_records = documents(tmp_path / name, shard_bytes=shard_bytes)
            assert texts == ["before", "after", fits], (name, shard_bytes)
            assert bad_records.counts == {"larger than 8 MB": 1}
    table = pyarrow.table({"text": ["before", large, "after", fits]})
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
    assert documents(tmp_path / "d.parquet")[0] == ["before", "after", fits]
    with pytest.raises(
        UserError, match="must hold records of at most 8 MB, and line 3 is larger; cut it into documents"
    ):
        documents(tmp_path / "a.txt", strict=True)


def test_a_row_of_csv_that_is_too_large_ends_its_table(small, tmp_path):
    for field in ("x" * 5 * small, "x\n" * small):
        text = io.StringIO()
        csv.writer(text).writerows([["text"], ["before"], [field], ["after"]])
        (tmp_path / "a.csv").write_text(text.getvalue())
        texts, bad_records = documents(tmp_path / "a.csv")
        assert texts == ["before"]
        assert bad_records.counts == {tables.HUGE: 1}
        assert bad_records.first[0].place == "a.csv:3"


def test_a_bomb_of_one_line_is_one_sentence(tmp_path, capsys):
    with gzip.open(tmp_path / "bomb.txt.gz", "wb", compresslevel=9) as file:
        for _ in range(40):
            file.write(b"a" * (1 << 20))
    assert cli.main(["inspect", "--heads-only", "--text", str(tmp_path / "bomb.txt.gz")]) == 2
    assert "must hold records of at most 8 MB, and line 1 is larger; cut it into documents" in capsys.readouterr().err


def test_a_text_in_memory_that_is_too_large_is_one_sentence():
    with pytest.raises(UserError, match="text number 2 has 8,388,609 characters, and a document may have 8,388,608"):
        inspect_model(texts=[SHORT, "a" * (records.LARGEST + 1)], experiments="heads")
