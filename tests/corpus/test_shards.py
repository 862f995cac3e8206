"""Shards of texts in memory, and small shards of a corpus read together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from massieu.corpus import BadRecords, Corpus
from massieu.corpus.shards import Shard, group_shards, text_shards


@given(st.lists(st.text(max_size=3), max_size=20), st.integers(1, 7))
def test_pieces_of_texts_are_the_texts(texts, size):
    shards = list(text_shards(iter(texts), size))
    assert [document.text for shard in shards for document in shard.read()] == texts
    places = [document.place for shard in shards for document in shard.read()]
    assert places == [f"text number {number + 1}" for number in range(len(texts))]
    assert len({shard.key for shard in shards}) == len(shards)


def test_the_name_of_a_piece_depends_on_its_texts_and_its_place():
    assert Shard.of_texts(("a",), 3).key == Shard.of_texts(("a",), 3).key
    assert len({Shard.of_texts(("a",), 3).key, Shard.of_texts(("a",), 4).key, Shard.of_texts(("b",), 3).key}) == 3


def test_what_is_no_text_is_refused():
    with pytest.raises(TypeError, match="texts must be strings, got int at number 2; pass a list of strings"):
        list(text_shards(["a", "b", 3], 2))


def test_small_files_are_read_together_and_large_ones_alone(tmp_path):
    for number in range(30):
        (tmp_path / f"{number:02}.txt").write_text(f"document {number}")
    (tmp_path / "30.jsonl").write_text('"large"\n' * 200 + "oops\n")
    corpus = Corpus([tmp_path], shard_bytes=1000)
    groups = group_shards(corpus.shards(), 200)
    assert 2 < len(groups) < 10 < len(corpus.shards())
    assert [shard for group in groups for shard in group.shards] == list(corpus.shards())
    bad_records = BadRecords()
    together = [document for group in groups for document in group.read(bad_records)]
    assert together == [document for shard in corpus.shards() for document in shard.read()]
    assert bad_records.total == 1
    assert len({group.key for group in groups}) == len(groups)
    assert [group.key for group in group_shards(corpus.shards(), 200)] == [group.key for group in groups]
    assert group_shards([]) == []
