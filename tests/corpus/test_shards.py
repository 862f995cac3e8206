"""Pieces of a text: texts in memory, and small splits of a corpus read together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from massieu.corpus import Corpus, Faults
from massieu.inspection.splits import TextSplit, grouped, text_splits


@given(st.lists(st.text(max_size=3), max_size=20), st.integers(1, 7))
def test_pieces_of_texts_are_the_texts(texts, size):
    pieces = list(text_splits(iter(texts), size))
    assert [document.text for piece in pieces for document in piece.read()] == texts
    places = [document.place for piece in pieces for document in piece.read()]
    assert places == [f"text number {number + 1}" for number in range(len(texts))]
    assert len({piece.key for piece in pieces}) == len(pieces)


def test_the_name_of_a_piece_depends_on_its_texts_and_its_place():
    assert TextSplit(("a",), 3).key == TextSplit(("a",), 3).key
    assert len({TextSplit(("a",), 3).key, TextSplit(("a",), 4).key, TextSplit(("b",), 3).key}) == 3


def test_what_is_no_text_is_refused():
    with pytest.raises(TypeError, match="texts must be strings, got int at number 2; pass a list of strings"):
        list(text_splits(["a", "b", 3], 2))


def test_small_files_are_read_together_and_large_ones_alone(tmp_path):
    for number in range(30):
        (tmp_path / f"{number:02}.txt").write_text(f"document {number}")
    (tmp_path / "30.jsonl").write_text('"large"\n' * 200 + "oops\n")
    corpus = Corpus([tmp_path], split_bytes=1000)
    groups = grouped(corpus.splits(), 200)
    assert 2 < len(groups) < 10 < len(corpus.splits())
    assert [split for group in groups for split in group.splits] == list(corpus.splits())
    faults = Faults()
    together = [document for group in groups for document in group.read(faults)]
    assert together == [document for split in corpus.splits() for document in split.read()]
    assert faults.total == 1
    assert len({group.key for group in groups}) == len(groups)
    assert [group.key for group in grouped(corpus.splits(), 200)] == [group.key for group in groups]
    assert grouped([]) == []
