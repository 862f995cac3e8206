"""Parts merge in any tree and any order, with empty ones among them, and say what reading all at once says."""

from __future__ import annotations

import functools
import gzip
import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")
from massieu import assets
from massieu.accumulators.serialization import pack
from massieu.checks import UserError
from massieu.corpus import Corpus
from massieu.corpus.shards import Shard, group_shards, text_shards
from massieu.inspection.heads import LayerOfHeads
from massieu.inspection.options import Options
from massieu.inspection.partial_files import partial_from_bytes, partial_to_bytes
from massieu.inspection.partial_result import SCHEMA, PartialResult, merge_partials
from massieu.inspection.reader import Reader, read_shard
from massieu.inspection.run import inspect_model
from massieu.inspection.tables import build_inspection
from massieu.models.loading import load

TEXTS = tuple(text[:300] for text in assets.documents()[:10])
ALL = range(len(TEXTS))
FEW = settings(max_examples=25, deadline=None)


@functools.cache
def loaded():
    return load(str(assets.MODEL), dtype="float64")


@functools.cache
def reader() -> Reader:
    return Reader(loaded().model, loaded().tokenizer, name="embedded")


@functools.cache
def pieces(size: int = 1) -> list[PartialResult]:
    return [reader().read(shard) for shard in text_shards(TEXTS, size)]


def figures(partial: PartialResult) -> dict[str, float]:
    """Everything that the tables say about the heads, and about one layer with all that it takes."""
    table = partial.heads.table().select_dtypes("number")
    found = {f"{name} {row}": value for name in table for row, value in enumerate(table[name])}
    layers = partial.layers_by_passage or partial.layers
    return found | layers.statistics[("decoder", 2)].finish()


def assert_same(first: PartialResult, second: PartialResult) -> None:
    one, other = figures(first), figures(second)
    assert list(one) == list(other)
    a, b = (torch.tensor(list(values.values()), dtype=torch.float64) for values in (one, other))
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, equal_nan=True)


def exact(partial: PartialResult) -> tuple[str, dict[str, torch.Tensor]]:
    """What is counted and not added up: it has no rounding."""
    tensors = {}
    packed = pack(partial, "part", tensors)
    packed["PartialResult"]["layers"] = None  # spreads of fits are sums
    counted = (".shares.counts", ".count", ".count_squared", ".largest", ".smallest", ".hashes", ".input_ids")
    return json.dumps(packed), {name: x for name, x in tensors.items() if name.endswith(counted)}


def assert_counts_are_equal(first: PartialResult, second: PartialResult) -> None:
    (text, tensors), (other, others) = exact(first), exact(second)
    assert text == other
    assert tensors.keys() == others.keys()
    assert all(torch.equal(x, others[name]) for name, x in tensors.items())


@st.composite
def trees(draw, leaves=ALL):
    """The leaves in some order, in some tree of merges, with empty parts here and there."""
    trees = list(draw(st.permutations(leaves)))
    for _ in range(draw(st.integers(0, 3))):
        trees.insert(draw(st.integers(0, len(trees))), None)
    while len(trees) > 1:
        at = draw(st.integers(0, len(trees) - 2))
        width = draw(st.integers(2, 4))
        trees[at : at + width] = [trees[at : at + width]]
    return trees[0]


def merged(tree, partials: list[PartialResult] | None = None) -> PartialResult:
    if tree is None:
        return PartialResult.empty((partials or pieces())[0].identity)
    if isinstance(tree, list):
        return merge_partials([merged(each, partials) for each in tree])
    return (partials or pieces())[tree]


@FEW
@given(trees())
def test_any_tree_and_any_order_with_empty_parts_give_the_same(tree):
    expected, found = merge_partials(pieces()), merged(tree)
    assert_same(found, expected)
    assert_counts_are_equal(found, expected)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of all kinds, with equal documents, blank ones and one that cannot be read."""
    folder = tmp_path_factory.mktemp("corpus")
    words = [f"whale {number % 5} is white" for number in range(12)]
    (folder / "a.txt").write_text("\n\n".join(words[:5]) + "\n\n\n")
    (folder / "b.jsonl").write_text("".join(f'"{word}"\n' for word in [*words[5:9], " "]) + "oops\n")
    (folder / "c.csv").write_text("text\n" + "\n".join(words[9:11]))
    (folder / "d.txt.gz").write_bytes(gzip.compress(words[11].encode()))
    return folder


@functools.cache
def heads_reader() -> Reader:
    return Reader(loaded().model, loaded().tokenizer, Options(experiments="heads"), name="embedded")


@FEW
@given(st.data())
def test_any_cut_of_a_corpus_merged_by_any_tree_counts_each_document_once(folder, data):
    size, together = data.draw(st.integers(3, 120)), data.draw(st.integers(1, 200))
    cut = group_shards(Corpus(folder, shard_bytes=size).shards(), together)
    partials = [heads_reader().read(piece) for piece in cut]
    found = merged(data.draw(trees(range(len(partials)))), partials)
    whole = heads_reader().read(Shard.of_texts(tuple(f"whale {number % 5} is white" for number in range(12))))
    assert found.counts == whole.counts
    assert found.counts.documents == 12
    assert found.bad_records.counts == {"not JSON": 1}
    # The control: a piece that is read twice, or not at all, is seen.
    some = next(number for number, partial in enumerate(partials) if partial.counts.documents)
    for odd in (
        [*partials, partials[some]],
        partials[:some] + partials[some + 1 :] or [PartialResult.empty(found.identity)],
    ):
        assert merge_partials(odd).counts.digest != whole.counts.digest


def test_the_parts_of_pieces_are_the_part_of_the_whole():
    whole = reader().read(Shard.of_texts(TEXTS))
    for size in (1, 4):
        assert_same(merge_partials(pieces(size)), whole)
    # The control: a part that is missing is seen.
    with pytest.raises(AssertionError):
        assert_same(merge_partials(pieces()[1:]), whole)


def test_merging_leaves_parts_as_they_are_and_reading_again_changes_nothing():
    before = [pack(partial, "part", {}) for partial in pieces()]
    tensors: list[dict[str, torch.Tensor]] = [{} for _ in pieces()]
    for partial, own in zip(pieces(), tensors, strict=True):
        pack(partial, "part", own)
    first = merge_partials(pieces())
    first.merge(pieces()[0])
    assert [pack(partial, "part", {}) for partial in pieces()] == before
    for partial, own in zip(pieces(), tensors, strict=True):
        now = {}
        pack(partial, "part", now)
        assert all(torch.equal(x.nan_to_num(7), own[name].nan_to_num(7)) for name, x in now.items())
    again, once = {}, {}
    pack(read_shard(loaded().model, loaded().tokenizer, Shard.of_texts(TEXTS[:1])), "part", again)
    pack(pieces()[0], "part", once)
    assert all(torch.equal(x.nan_to_num(7), once[name].nan_to_num(7)) for name, x in again.items())


def test_tables_of_merged_parts_are_those_of_an_inspection():
    found = build_inspection(merge_partials(reversed(pieces(3))), loaded().model)
    expected = inspect_model(loaded().model, TEXTS, tokenizer=loaded().tokenizer)
    for name in ("heads", "layers", "experiments"):
        one, other = getattr(found, name), getattr(expected, name)
        assert one.columns.tolist() == other.columns.tolist()
        numbers = one.select_dtypes("number").columns
        a, b = (torch.tensor(table[numbers].to_numpy(dtype=float, na_value=torch.nan)) for table in (one, other))
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert found.notes == expected.notes
    assert {**found.facts["text"]} == {**expected.facts["text"]}
    assert found.facts["coverage"] == expected.facts["coverage"]


def test_few_documents_have_errors_by_passage_until_there_are_enough():
    options = Options(max_length=32, experiments="heads")
    short = Reader(loaded().model, loaded().tokenizer, options)
    partials = [short.read(shard) for shard in text_shards(TEXTS, 4)]  # 4, 4 and 2 documents
    few = merge_partials([partials[0], PartialResult.empty(short.identity), partials[2]])
    assert few.by_passage
    assert few.heads.layers[("decoder", 0)].by_passage.documents == few.counts.passages > few.counts.documents == 6
    whole = inspect_model(loaded().model, TEXTS[:4] + TEXTS[8:], tokenizer=loaded().tokenizer, **vars(options))
    assert whole.facts["text"]["unit"] == "passage"
    found = build_inspection(few, loaded().model).heads.entropy_se
    torch.testing.assert_close(torch.tensor(found), torch.tensor(whole.heads.entropy_se), rtol=1e-6, atol=0)
    enough = merge_partials(partials[:2])
    assert not enough.by_passage
    assert enough.layers_by_passage is None
    assert build_inspection(enough, loaded().model).facts["text"]["unit"] == "document"


def test_a_text_that_is_known_to_be_long_needs_nothing_by_passage():
    sure = Reader(loaded().model, loaded().tokenizer, name="embedded")
    sure.has_enough_documents = True
    partial = sure.read(Shard.of_texts(TEXTS[:2]))
    assert not partial.by_passage
    assert not merge_partials([pieces()[5], partial]).by_passage
    assert_same(merge_partials([partial, *pieces()[2:]]), merge_partials(pieces()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "0" * 64}, r"the model differs: embedded \(\w{12}\) and embedded \(000000000000\)"),
        ({"tokenizer": "1" * 64}, r"the tokenizer differs: embedded \(\w{12}\) and embedded \(111111111111\)"),
        ({"schema": "massieu.part/0"}, f"the schema is {SCHEMA} in one and massieu.part/0 in the other"),
        ({"options": {"rows": 7}}, "the option experiments is default in one and None in the other"),
    ],
)
def test_parts_that_differ_are_refused(change, message):
    other = replace(pieces()[0], identity=replace(reader().identity, **change))
    with pytest.raises(ValueError, match=f"one model with the same options, but {message}; merge those") as caught:
        merge_partials([pieces()[1], other])
    assert "\n" not in str(caught.value)


def test_parts_of_other_numbers_of_heads_are_refused():
    one, other = pieces()[:2]
    other = partial_from_bytes(partial_to_bytes(other))
    layer = other.heads.layers["decoder", 0]
    other.heads.layers["decoder", 0] = LayerOfHeads.of(layer.name, 1, layer.by_passage is not None)
    with pytest.raises(UserError, match="must have the same heads, got 4 and 1 in layer 0 of the decoder"):
        merge_partials([one, other])


def test_parts_may_come_from_folders_of_other_names_and_batches_of_other_sizes():
    other = Reader(loaded().model, loaded().tokenizer, Options(batch_size=3, padding="left"), name="elsewhere")
    assert merge_partials([pieces()[0], other.read(Shard.of_texts(TEXTS[1:2]))]).counts.documents == 2


def test_nothing_cannot_be_merged():
    with pytest.raises(ValueError, match="merge_partials needs at least one"):
        merge_partials([])


def test_a_part_is_finished_by_its_own_model_only():
    with pytest.raises(ValueError, match=r"must be the one that has read the text, embedded .* its weights differ"):
        build_inspection(pieces()[0], load(str(assets.MODEL)).model)


def test_texts_come_one_by_one_and_no_further_than_needed():
    asked = []

    def documents():
        for number in range(30):
            asked.append(number)
            yield TEXTS[number % 10][:40]

    splits = text_shards(documents(), 10)
    reader().read(next(splits))
    assert len(asked) == 10
    found = inspect_model(loaded().model, documents(), tokenizer=loaded().tokenizer, experiments="heads")
    listed = inspect_model(loaded().model, list(documents()), tokenizer=loaded().tokenizer, experiments="heads")
    assert found.heads.equals(listed.heads)
    with pytest.raises(TypeError, match="texts must be strings, or a Corpus, got int; pass a list of strings"):
        inspect_model(loaded().model, 3, tokenizer=loaded().tokenizer)
    for nothing in (iter(()), iter(["", " "])):
        with pytest.raises(ValueError, match="texts must hold at least one document with some text"):
            inspect_model(loaded().model, nothing, tokenizer=loaded().tokenizer)
    with pytest.raises(TypeError, match="texts must be strings, got int at number 1"):
        inspect_model(loaded().model, iter(["a", 3]), tokenizer=loaded().tokenizer)


def test_another_engine_may_read_in_another_order():
    class Backwards:
        def fold(self, reader, shards, *, progress=None, **_):
            return merge_partials([reader.read(shard, progress=progress) for shard in reversed(list(shards))])

    seen = []
    texts = [text[:15] for text in TEXTS] * 60  # more than one piece
    options = {"tokenizer": loaded().tokenizer, "experiments": "heads", "batch_size": 64}
    one = inspect_model(loaded().model, texts, **options, progress=lambda *place: seen.append(place))
    other = inspect_model(loaded().model, texts, **options, engine=Backwards())
    numbers = one.heads.select_dtypes("number").columns
    a, b = (torch.tensor(found.heads[numbers].to_numpy(dtype=float)) for found in (one, other))
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, equal_nan=True)
    assert one.facts["text"] == other.facts["text"]
    done = [place for place in seen if place[0] == "reading"]
    assert done == sorted(done)
    assert done[-1] == ("reading", 600, 600)
    assert [place for place in seen if place[0] == "tokens"][-1] == ("tokens", one.facts["text"]["tokens"], 0)


def test_the_digest_of_a_text_does_not_depend_on_its_order():
    one, other = (merge_partials(partials).counts.sha256 for partials in (pieces(), pieces(4)[::-1]))
    assert one == other
    assert one != merge_partials([*pieces(), pieces()[0]]).counts.sha256


def test_what_cannot_be_read_is_carried_by_the_part(tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text("".join(f"{json.dumps(text)}\n" for text in TEXTS[:3]) + "oops\n")
    found = inspect_model(
        loaded().model, Corpus([path], shard_bytes=400), tokenizer=loaded().tokenizer, experiments="heads"
    )
    assert found.facts["text"]["documents"] == 3
    assert found.facts["text"]["source"] == "some.jsonl"
    assert found.facts["text"]["bad_records"]["total"] == 1
    assert any("1 record of the text could not be read" in note for note in found.notes)
