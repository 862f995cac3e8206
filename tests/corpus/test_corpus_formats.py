"""What files hold, by their extensions, and what is wrong with some records of them."""

import bz2
import dataclasses
import gzip
import json
import lzma

import pyarrow
import pytest
from pyarrow import parquet

from massieu.corpus import BadRecord, BadRecords, Corpus
from massieu.corpus.columns import ROWS_AT_ONCE

DOCUMENTS = [f'Document {i}:\nthe whale, {"鯨" * (i % 3)} is "white"' for i in range(700)]


def read(path, column="text", **options):
    bad_records = BadRecords()
    found = [document for shard in Corpus(path, column, **options).shards() for document in shard.read(bad_records)]
    return [document.text for document in found], bad_records


def reasons(bad_records):
    return [(bad.place, bad.reason) for bad in bad_records.first]


def zstandard(content):
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


PACKERS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard}


def table(delimiter=","):
    quoted = [text.replace('"', '""') for text in DOCUMENTS]
    return "\r\n".join([f"id{delimiter}text", *(f'{i}{delimiter}"{text}"' for i, text in enumerate(quoted))]).encode()


PLAIN = {
    ".txt": "\n\n".join(DOCUMENTS).encode(),
    ".jsonl": "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in DOCUMENTS).encode(),
    ".csv": table(),
    ".tsv": table("\t"),
}


@pytest.mark.parametrize("end", PLAIN)
@pytest.mark.parametrize("compression", ["", *PACKERS])
def test_a_corpus_is_the_same_in_every_format_and_compression(end, compression, tmp_path):
    path = tmp_path / f"a{end}{compression}"
    path.write_bytes(PACKERS.get(compression, bytes)(PLAIN[end]))
    assert read(path) == (DOCUMENTS, BadRecords())
    assert read(path, shard_bytes=1000) == (DOCUMENTS, BadRecords())


@pytest.mark.parametrize("compression", [".gz", ".bz2", ".xz", ".zst"])
def test_compressed_files_may_be_put_one_after_the_other(compression, tmp_path):
    path = tmp_path / f"a.jsonl{compression}"
    path.write_bytes(PACKERS[compression](b'"one"\n') + PACKERS[compression](b'"two"\n'))
    assert read(path)[0] == ["one", "two"]


@pytest.mark.parametrize("compression", [".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("how", ["cut", "nonsense"])
def test_a_damaged_file_is_read_as_far_as_it_goes(compression, how, tmp_path):
    path = tmp_path / f"a.jsonl{compression}"
    packed = PACKERS[compression](PLAIN[".jsonl"])
    path.write_bytes(packed[: -len(packed) // 4] if how == "cut" else b"nonsense, and no compression at all" * 9)
    found, bad_records = read(path)
    assert found == DOCUMENTS[: len(found)]
    assert reasons(bad_records) == [(f"a.jsonl{compression}:its end", "damaged")]
    with pytest.raises(
        ValueError, match=f"a.jsonl{compression} must be a whole file, and its end is damaged .*; copy it"
    ):
        read(path, strict=True)


def test_parquet_is_split_between_row_groups(tmp_path):
    path = tmp_path / "a.parquet"
    columns = {"id": list(range(700)), "text": DOCUMENTS}
    parquet.write_table(pyarrow.table(columns), path, row_group_size=100)
    corpus = Corpus(path, shard_bytes=5000)
    documents = [list(shard.read()) for shard in corpus.shards()]
    assert 1 < len(documents) <= 7
    assert [document.text for own in documents for document in own] == DOCUMENTS
    assert [document.place for own in documents for document in own] == [f"a.parquet:row {i}" for i in range(700)]
    assert len(Corpus(path).shards()) == 1
    assert len(Corpus(path, "none", shard_bytes=1).shards()) == 1


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary<values=string, indices=int32>"])
def test_strings_of_parquet_come_in_several_types(kind, tmp_path):
    column = pyarrow.array(["a", "b", None, " "])
    column = column.dictionary_encode() if "dictionary" in kind else column.cast(kind)
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    found, bad_records = read(tmp_path / "a.parquet")
    assert found == ["a", "b"]
    assert reasons(bad_records) == [("a.parquet:row 2", "not a string")]


def test_a_string_of_parquet_that_is_not_utf8_is_counted(tmp_path):
    rows = [b"good"] * (ROWS_AT_ONCE + 1) + [b"bad \xff", "é".encode()]
    column = pyarrow.array(rows, pyarrow.binary()).view("string")
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    found, bad_records = read(tmp_path / "a.parquet")
    assert found == ["good"] * (ROWS_AT_ONCE + 1) + ["é"]
    assert reasons(bad_records) == [(f"a.parquet:row {ROWS_AT_ONCE + 1}", "not UTF-8")]


def test_damaged_parquet_is_counted(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 is not enough")
    assert read(path)[1].counts == {"damaged": 1}
    parquet.write_table(pyarrow.table({"text": DOCUMENTS}), path, compression="gzip", use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[200:300] = b"?" * 100
    path.write_bytes(content)
    assert read(path) == ([], BadRecords({"damaged": 700}, read(path)[1].first))


@pytest.mark.parametrize("place", [0, 1, 30])
def test_a_damaged_footer_of_parquet_is_counted_and_other_files_are_read(place, tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": DOCUMENTS}), path)
    (tmp_path / "b.txt").write_text("one")
    content = bytearray(path.read_bytes())
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little") + place
    content[footer : footer + 5] = b"\xff" * 5
    path.write_bytes(content)
    found, bad_records = read(tmp_path)
    assert (found, bad_records.counts) == (["one"], {"damaged": 1})
    with pytest.raises(ValueError, match="a.parquet must be a whole Parquet file, and its end is damaged .*; copy it"):
        read(path, strict=True)


BAD = {
    "a.jsonl": (
        b'"one"\n{\n\n{"body": "b"}\n{"text": 7}\n\xff\n"\\ud800"\n' + b"[" * 5000 + b'\n{"text": "last"}\n " "',
        ["one", "last"],
        [
            (2, "not JSON"),
            (4, "without the field"),
            (5, "not a string"),
            (6, "not UTF-8"),
            (7, "not UTF-8"),
            (8, "not JSON"),
        ],
    ),
    "b.csv": (
        b'\xef\xbb\xbftext,id\none,1\ntwo\n\n"th,\nree",3\n\xff,4\nfive,5,5\nlast,6\n',
        ["one", "th,\nree", "last"],
        [(3, "another number of fields"), (7, "not UTF-8"), (8, "another number of fields")],
    ),
    "c.txt": (b"\xef\xbb\xbfone\n\ntwo\n\xff\n\nlast", ["one", "last"], [(3, "not UTF-8")]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_records_are_counted_placed_and_skipped(name, tmp_path):
    content, expected, bad = BAD[name]
    (tmp_path / name).write_bytes(content)
    found, bad_records = read(tmp_path / name)
    assert found == expected
    assert reasons(bad_records) == [(f"{name}:{line}", reason) for line, reason in bad]
    assert bad_records.total == len(bad)
    whole = BadRecords()
    for size in (7, 100):
        found, whole = read(tmp_path / name, shard_bytes=size)
        assert (found, whole.counts) == (expected, bad_records.counts)


@pytest.mark.parametrize(("end", "tab"), [("csv", ","), ("tsv", "\t")])
def test_a_quote_that_is_not_closed_is_counted_and_placed(end, tab, tmp_path):
    rows = [f"{i}{tab}whale {i}" for i in range(100)]
    path = tmp_path / f"a.{end}"

    def table(**changed):
        lines = [changed.get(f"row{i}", row) for i, row in enumerate(rows)]
        path.write_text("\n".join([f"id{tab}text", *lines]) + "\n")
        return read(path)

    found, bad_records = table(row50=f'50{tab}"oops')
    assert found == [f"whale {i}" for i in range(50)]
    assert reasons(bad_records) == [(f"a.{end}:52", "quote never closed, with all rows after it")]
    with pytest.raises(
        ValueError, match=rf"a.{end} must have rows as CSV .* line 52 is none \(unexpected end .*; close"
    ):
        read(path, strict=True)
    # Where another quote comes, what is after its line is read.
    found, bad_records = table(row50=f'50{tab}"oops', row60=f'60{tab}"whale"')
    assert found == [f"whale {i}" for i in [*range(50), *range(61, 100)]]
    assert reasons(bad_records) == [(f"a.{end}:52", "not CSV")]
    assert table(row50=f'50{tab}"white" whale')[1].counts == {"not CSV": 1}
    path.write_text(f'id{tab}"text\n1{tab}a\n')
    assert reasons(read(path)[1]) == [(f"a.{end}:1", "quote never closed, with all rows after it")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'"a"\n{', "a.jsonl must hold one JSON value a line, and line 2 is none; check it"),
        (
            "a.jsonl",
            b'{"body": "a"}',
            'a.jsonl must hold strings or objects with a field "text", and line 1 does not; name the field with --column',
        ),
        ("a.jsonl", b'["text"]', 'a.jsonl must hold strings or objects with a field "text", and line 1 does not; name'),
        (
            "a.txt",
            b"\xff\xfe\x00\x80",
            "a.txt must be a text file in UTF-8, and line 1 is not; convert it, or pass another",
        ),
        ("a.csv", b"text,id\nb\n", "a.csv must have 2 fields in every row, and line 2 has 1; put commas into quotes"),
        (
            "a.csv",
            b"id,body\n1,b\n",
            'a.csv must have a column "text", and line 1 has id, body; name one with --column',
        ),
        ("a.parquet", b"PAR", "a.parquet must be a whole Parquet file, and its end is damaged (.*); copy it again"),
    ],
)
def test_a_strict_reader_stops_at_the_first_with_one_sentence(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read(tmp_path / name, strict=True)
    assert "\n" not in str(caught.value)
    found, bad_records = read(tmp_path / name)
    if not found:  # if nothing can be read, the same sentence says why
        with pytest.raises(ValueError, match=message):
            Corpus(tmp_path / name).check(0, bad_records)


def test_a_line_that_nobody_has_counted_is_named_by_its_first_byte(tmp_path):
    (tmp_path / "a.jsonl").write_text('"one"\n' * 20 + "{")
    with pytest.raises(
        ValueError, match="a.jsonl must hold one JSON value a line, and the line at byte 120 is none; check it"
    ):
        read(tmp_path / "a.jsonl", strict=True, shard_bytes=50)
    assert reasons(read(tmp_path / "a.jsonl", shard_bytes=50)[1]) == [("a.jsonl:byte 120", "not JSON")]


def test_a_column_that_no_table_has_is_one_sentence(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"body": DOCUMENTS, "id": range(700)}), path)
    found, bad_records = read(path, sample=1e-9)
    assert (found, bad_records.counts) == ([], {"no such column": 700})
    with pytest.raises(ValueError, match='a.parquet must have a column "text", and row 0 has body, id; name one with'):
        Corpus(path).check(0, bad_records)
    with pytest.raises(
        ValueError, match='must hold strings in the column "id", and row 0 is of type int64; name another'
    ):
        read(path, "id", strict=True)
    assert read(path, "id")[1].counts == {"not a string": 700}


def test_a_field_of_csv_may_be_long(tmp_path):
    (tmp_path / "a.csv").write_text("text\n" + "x" * 200_000)
    assert [len(text) for text in read(tmp_path / "a.csv")[0]] == [200_000]


def test_an_empty_table_holds_nothing(tmp_path):
    (tmp_path / "a.csv").write_text("")
    parquet.write_table(pyarrow.table({"text": pyarrow.array([], "string")}), tmp_path / "b.parquet")
    parquet.write_table(pyarrow.table({"id": pyarrow.array([], "string")}), tmp_path / "c.parquet")
    (tmp_path / "d.txt").write_text("")
    assert read(tmp_path) == ([], BadRecords())


def test_bad_records_merge_in_any_order_and_go_through_json():
    many = [BadRecord("a", i, f"a:{i}", "not JSON" if i % 2 else "not UTF-8", f"sentence {i}") for i in range(30)]
    one, other = BadRecords(), BadRecords()
    for bad in many[::3]:
        one.add(bad)
    for bad in reversed(many):
        if bad not in many[::3]:
            other.add(bad, 2)
    left, right = BadRecords(), BadRecords()
    for merged, order in ((left, (one, other, BadRecords())), (right, (BadRecords(), other, one))):
        for each in order:
            merged.merge(each)
    assert left.to_dict() == right.to_dict()
    assert left.total == 10 + 2 * 20
    assert left.first == many[:10]
    assert json.loads(json.dumps(left.to_dict()))["first"][0] == dataclasses.asdict(many[0])
    assert BadRecords().notes() == []
    assert left.notes() == [
        "50 records of the text could not be read and did not count (25 not JSON, 25 not UTF-8);"
        " the first: a:0 (not UTF-8), a:1 (not JSON), a:2 (not UTF-8)."
    ]
