"""A corpus in shards: their union is the corpus, each document once and in order, however it is cut."""

import itertools
import json
import pickle
import re
import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from massieu.checks import UserError
from massieu.corpus import BadRecords, Corpus, Document, Shard
from massieu.corpus.lines import json_lines, paragraphs

SIGNS = st.sampled_from(["\n", "\r\n", "\n\n", " ", "\t", "\r", "a", "word", "é", "鯨", "😀", "\u2003", "\x1c", "\x85"])
TEXTS = st.lists(SIGNS, max_size=40).map("".join)
SIZES = st.integers(1, 60)


def texts(corpus, bad_records=None):
    return [document.text for shard in corpus.shards() for document in shard.read(bad_records)]


def keys(corpus):
    return [shard.key for shard in corpus.shards()]


def pieces(reader, content, size):
    """Positions and contents of the records of all shards."""
    import io

    found = []
    for start in range(0, len(content), size):
        records = reader(io.BytesIO(content), "text", start, min(start + size, len(content)))
        found += [(record.position, record.content) for record in records]
    return found


@given(TEXTS, SIZES)
@example("a\n\n" * 3 + "\n \r\n\r\nb", 1)
@example("one long document\nwith lines\n\nnext", 4)
def test_documents_between_blank_lines_are_the_same_in_splits_of_any_size(text, size):
    parts = re.split(r"\n\s*\n", text.replace("\r\n", "\n"))  # all at once, and without lines
    expected = [part.strip() for part in parts if part.strip()]
    found = pieces(paragraphs, text.encode(), size)
    read = [content.decode().replace("\r\n", "\n").strip() for _, content in found]
    assert read == expected
    assert [text.encode()[position:].startswith(content) for position, content in found] == [True] * len(found)


@given(
    st.lists(st.one_of(st.text(max_size=30), st.just({"text": "x"})), max_size=12), st.booleans(), st.booleans(), SIZES
)
def test_lines_of_json_are_the_same_in_splits_of_any_size(values, windows, ends, size):
    end = "\r\n" if windows else "\n"
    text = end.join(json.dumps(value, ensure_ascii=False) for value in values) + end * ends
    found = [json.loads(content) for _, content in pieces(json_lines, text.encode(), size)]
    assert found == values


@given(st.lists(st.sampled_from([b"\n", b"\n\n", b"a", b"\xff", b"\xe9\xaf", b" "]), max_size=30).map(b"".join), SIZES)
def test_bytes_that_are_no_text_are_split_alike(content, size):
    for reader in (paragraphs, json_lines):
        assert pieces(reader, content, size) == pieces(reader, content, len(content) + 1)


@settings(max_examples=30, deadline=None)
@given(TEXTS, SIZES)
def test_files_are_read_in_splits_of_any_size(tmp_path_factory, text, size):
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.txt").write_bytes(text.encode())
    lines = text.replace("\r", "\n").split("\n")
    (folder / "b.jsonl").write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    expected = [part.strip() for part in re.split(r"\n\s*\n", text.replace("\r\n", "\n")) if part.strip()]
    expected += [line for line in lines if line.strip()]
    assert texts(Corpus(folder, shard_bytes=size)) == expected


def test_a_split_reads_the_same_alone_again_and_in_another_process(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "number {i}"}}\n' for i in range(50)))
    shards = Corpus(path, shard_bytes=100).shards()
    whole = [document for shard in shards for document in shard.read()]
    alone = {shard: list(pickle.loads(pickle.dumps(shard)).read()) for shard in reversed(shards)}
    assert [document for shard in shards for document in alone[shard]] == whole
    assert len(shards) > 5
    assert len({shard.key for shard in shards}) == len(shards)


def test_documents_have_places(tmp_path):
    (tmp_path / "a.txt").write_text("one\nstill\n\n\ntwo")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.jsonl").write_text('"one"\n\n"three"\n"four"')
    found = [document for shard in Corpus(tmp_path, shard_bytes=12).shards() for document in shard.read()]
    assert found == [
        Document("one\nstill", "a.txt:1"),
        Document("two", "a.txt:5"),
        Document("one", "sub/b.jsonl:1"),
        Document("three", "sub/b.jsonl:3"),
        Document("four", "sub/b.jsonl:byte 15"),
    ]


def test_a_line_longer_than_many_splits_is_read_once_and_skipped_cheaply(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps("x" * 100_000) + '\n"next"')
    shards = Corpus(path, shard_bytes=1000).shards()
    found = [[len(document.text) for document in shard.read()] for shard in shards]
    assert found == [[100_000], *[[]] * (len(shards) - 2), [4]]
    with path.open("rb") as file:
        assert list(json_lines(file, "text", 1000, 2000)) == []
        assert file.tell() <= 2000


def test_a_document_longer_than_many_splits_is_skipped_cheaply(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("a line\n" * 10_000)
    with path.open("rb") as file:
        assert list(paragraphs(file, "", 1000, 2000)) == []
        assert file.tell() < 2020


def test_memory_does_not_grow_with_the_file(tmp_path):
    def peak(documents):
        paths = [tmp_path / f"{documents}{end}" for end in (".txt", ".jsonl", ".csv")]
        lines = ["a document of some words, " * 10] * documents
        paths[0].write_text("\n\n".join(lines))
        paths[1].write_text("\n".join(map(json.dumps, lines)))
        paths[2].write_text("text\n" + "\n".join(f'"{line}"' for line in lines))
        corpus = Corpus(paths)
        tracemalloc.start()
        assert sum(1 for shard in corpus.shards() for _ in shard.read()) == 3 * documents
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(100)  # whatever is loaded the first time
    # Some bytes for the shards, and for threads that other tests have left; the text has fifteen million more.
    assert peak(20_000) < 1.1 * peak(2_000) + 1_000_000


def test_the_limit_counts_from_the_beginning_of_the_corpus(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_text("".join(f'"{name}{i}"\n' for i in range(9)))
    whole = texts(Corpus(tmp_path))
    for limit, size in itertools.product((1, 8, 9, 10, 27, 99), (5, 1000)):
        corpus = Corpus(tmp_path, limit=limit, shard_bytes=size)
        assert texts(corpus) == whole[:limit]
        assert texts(corpus) == whole[:limit]
    assert len(Corpus(tmp_path, limit=9).shards()) == 1


def test_the_sample_depends_on_seed_and_place_alone(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'"{i}"\n' for i in range(4000)))
    found = texts(Corpus(path, sample=0.1, seed=3))
    assert 320 < len(found) < 480  # 4 standard deviations around 400
    assert texts(Corpus(path, sample=0.1, seed=3, shard_bytes=50)) == found
    assert texts(Corpus(path, sample=0.1, seed=4)) != found
    assert {*found} < {*texts(Corpus(path, sample=0.2, seed=3))}
    assert texts(Corpus(path, sample=1.0)) == texts(Corpus(path))
    assert texts(Corpus(path, sample=0.1, seed=3, limit=7)) == found[:7]
    (tmp_path / "moved").mkdir()
    path.rename(tmp_path / "moved" / "a.jsonl")
    assert texts(Corpus(tmp_path / "moved", sample=0.1, seed=3)) == found


def test_texts_in_memory_are_a_corpus_too():
    given = ["one", "", "three", "four"]
    corpus = Corpus.from_texts(iter(given), "list", shard_bytes=4)
    shards = corpus.shards()
    assert len(shards) == 2
    assert [tuple(document) for shard in shards for document in shard.read()] == [
        (text, f"list:document {i + 1}") for i, text in enumerate(given)
    ]
    assert texts(Corpus.from_texts(given, limit=2)) == ["one", ""]
    assert 0 < len(texts(Corpus.from_texts(["x"] * 100, sample=0.5))) < 100
    with pytest.raises(TypeError, match="texts must be a list of strings, got a single string; pass"):
        Corpus.from_texts("one")
    with pytest.raises(TypeError, match="texts must be strings, got int at number 1; pass a list of strings"):
        Corpus.from_texts(["a", 3]).shards()


def test_texts_that_are_not_in_the_sample_are_not_held():
    every = [f"document {i}" for i in range(2000)]
    whole = Corpus.from_texts(every, "list")
    sampled = Corpus.from_texts(iter(every), "list", sample=0.01, shard_bytes=100)
    assert sum(len(shard.texts) for shard in sampled.shards()) < 60
    found = [document for shard in sampled.shards() for document in shard.read()]
    places = {document.place: document.text for shard in whole.shards() for document in shard.read()}
    assert found == [Document(places[document.place], document.place) for document in found]
    assert found == [
        document
        for shard in Corpus.from_texts(every, "list", sample=0.01, shard_bytes=10**6).shards()
        for document in shard.read()
    ]
    assert texts(Corpus.from_texts(every, "list", sample=0.01, limit=3)) == [document.text for document in found[:3]]


def test_keys_name_what_is_read_and_not_where(tmp_path):
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("one\n\ntwo")
    first = keys(Corpus(tmp_path / "here"))
    assert first == keys(Corpus(tmp_path / "there"))
    others = [{"column": "body"}, {"limit": 1}, {"sample": 0.5}, {"strict": True}, {"shard_bytes": 2}]
    assert first not in [keys(Corpus(tmp_path / "here", **other)) for other in others]
    (tmp_path / "there" / "a.txt").write_text("one\n\ntwo\n\nthree")
    seen = [first]
    assert first != keys(Corpus(tmp_path / "there"))
    for content in ("one", "one and more"):
        (tmp_path / "here" / "b.csv").write_text(content)
        assert keys(Corpus(tmp_path / "here")) not in seen
        seen.append(keys(Corpus(tmp_path / "here")))
    assert keys(Corpus.from_texts(["a", "b"])) != keys(Corpus.from_texts(["ab"]))


@pytest.mark.parametrize(
    ("name", "value"),
    [("limit", 0), ("sample", 0.0), ("sample", 20), ("sample", float("nan")), ("shard_bytes", 0)],
)
def test_impossible_limits_samples_and_sizes_are_refused(name, value):
    with pytest.raises(UserError, match=name):
        Corpus.from_texts(["a"], **{name: value})


def test_nothing_at_all_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="a corpus needs at least one path, got none; pass files or folders"):
        Corpus([])
    (tmp_path / "a.txt").write_text(" \n\n\t\n")
    corpus = Corpus(tmp_path / "a.txt")
    assert texts(corpus) == []
    with pytest.raises(ValueError, match="^a.txt must hold some text, and it is empty; pass a file with at least one"):
        corpus.check(0, BadRecords())
    with pytest.raises(ValueError, match="the sample must hold some text, and it is empty; raise 0.01 or the seed"):
        Corpus(tmp_path / "a.txt", sample=0.01).check(0, BadRecords())
    corpus.check(1, BadRecords())


def test_a_split_is_small():
    assert len(pickle.dumps(Shard("/data/corpus/part-0001.jsonl", "part-0001.jsonl", "jsonl", 1 << 30, 1 << 31))) < 400
