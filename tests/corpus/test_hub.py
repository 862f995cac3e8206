"""Documents of a dataset by name, from a package that stands for the real one."""

import itertools
import types

import pytest

from massieu.corpus import BadRecords, Corpus
from massieu.corpus.hub import read_dataset


@pytest.fixture
def hub(monkeypatch):
    """A hub with one endless dataset; the list says what was asked for."""
    asked = []

    def load_dataset(name, config, *, split, streaming):
        asked.append((name, config, split, streaming))
        if name != "whales":
            raise OSError("no such\ndataset")
        return ({"text": f"whale {i}" if i % 2 else None} for i in itertools.count())

    monkeypatch.setitem(__import__("sys").modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    return asked


def test_documents_come_one_by_one(hub):
    assert list(itertools.islice(read_dataset("whales"), 4)) == [None, "whale 1", None, "whale 3"]
    next(read_dataset("whales:white:test"))
    assert hub == [("whales", None, "train", True), ("whales", "white", "test", True)]


def test_what_a_hub_does_not_have_is_one_sentence(hub):
    with pytest.raises(ValueError, match="whales has no column body; name the one that holds the text with --column"):
        next(read_dataset("whales", column="body"))
    with pytest.raises(ValueError, match=r"the dataset sharks cannot be read \(no such dataset\)"):
        next(read_dataset("sharks"))


def test_rows_of_a_dataset_without_a_string_are_counted_or_refused(hub):
    bad_records = BadRecords()
    rows = itertools.islice(read_dataset("whales"), 20)
    found = [document for shard in Corpus.from_texts(rows, "whales").shards() for document in shard.read(bad_records)]
    assert [document.text for document in found] == [f"whale {i}" for i in range(1, 20, 2)]
    assert (bad_records.counts, bad_records.first[0].place) == ({"not a string": 10}, "whales:document 1")
    with pytest.raises(ValueError, match="whales must hold strings, and document 1 is none; check it"):
        list(Corpus.from_texts([None], "whales", strict=True).shards()[0].read())
