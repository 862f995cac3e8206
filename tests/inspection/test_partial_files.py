"""Parts and checkpoints are written whole or not, read back to the last bit, and refused where they do not belong."""

from __future__ import annotations

import json
import math
import os
import pickle
import random
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save, save_file

pytest.importorskip("transformers")
from taps.families import build

from massieu import assets
from massieu.accumulators.serialization import FIELDS, Unpackable, pack, unpack
from massieu.checks import UserError
from massieu.corpus import BadRecord, BadRecords
from massieu.corpus.shards import Shard
from massieu.inspection import inspect_model
from massieu.inspection import partial_files as files
from massieu.inspection.partial_files import (
    digest_of,
    load_checkpoint,
    load_partial,
    partial_from_bytes,
    save_checkpoint,
    save_partial,
)
from massieu.inspection.partial_result import SCHEMA, PartialResult
from massieu.inspection.reader import Reader
from massieu.inspection.tables import build_inspection
from massieu.models.loading import load

TEXTS = tuple(text[:200] for text in assets.documents()[:3])


@pytest.fixture(scope="module")
def partial() -> PartialResult:
    loaded = load(str(assets.MODEL))
    return Reader(loaded.model, loaded.tokenizer, name="embedded").read(Shard.of_texts(TEXTS))


def assert_same(first: PartialResult, second: PartialResult) -> None:
    tensors, others = {}, {}
    assert pack(first, "part", tensors) == pack(second, "part", others)
    assert tensors.keys() == others.keys()
    for name, x in tensors.items():
        assert x.dtype == others[name].dtype
        assert torch.equal(x.nan_to_num(7), others[name].nan_to_num(7)), name


def test_a_part_is_read_as_it_was_written(partial, tmp_path):
    path = save_partial(partial, tmp_path / "partial.safetensors")
    again = load_partial(path)
    assert_same(again, partial)
    assert again.identity == partial.identity
    assert_same(load_partial(tmp_path), partial)  # by its folder
    header = json.loads(safe_open(path, "pt").metadata()["massieu"])
    assert header["schema"] == SCHEMA
    assert [file.name for file in tmp_path.iterdir()] == ["partial.safetensors"]


def test_a_part_of_few_tokens_is_written_although_its_moments_share_their_rows(tmp_path):
    loaded = load(str(assets.MODEL))
    few = Reader(loaded.model, loaded.tokenizer).read(Shard.of_texts(("Call me Ishmael.", "Some years ago")))
    assert_same(load_partial(save_partial(few, tmp_path / "partial.safetensors")), few)


def test_a_part_travels_in_the_bytes_of_its_file(partial, tmp_path):
    sent = pickle.dumps(partial)
    assert_same(pickle.loads(sent), partial)
    assert len(sent) < 1.01 * save_partial(partial, tmp_path / "p").stat().st_size + 1000
    with pytest.raises(UserError, match=f"the partial result must have the schema {SCHEMA}, got massieu.part/0"):
        partial_from_bytes(save({}, metadata={"massieu": '{"schema": "massieu.part/0"}'}))
    for data in (b"", b"massieu", sent[-5000:], save({})):
        with pytest.raises(UserError, match="the partial result"):
            partial_from_bytes(data)


def test_nothing_of_a_part_is_forgotten(partial):
    seen = set()

    def look(value):
        kind = type(value)
        if kind in FIELDS:
            seen.add(kind)
            own = value._asdict() if issubclass(kind, tuple) else vars(value)
            assert {*own} == {*FIELDS[kind]}, kind
            for each in own.values():
                look(each)
        elif isinstance(value, dict):
            for each in value.values():
                look(each)
        elif isinstance(value, (list, tuple, set)):
            for each in value:
                look(each)
        else:
            assert value is None or isinstance(value, (bool, int, float, str, torch.Tensor)), kind

    look(partial)
    look(BadRecords({"not JSON": 1}, [BadRecord("a", 0, "a:1", "not JSON", "a sentence")]))
    assert seen == {*FIELDS}


def test_what_is_read_goes_on_like_what_was_written(partial, tmp_path):
    again, both = load_partial(save_partial(partial, tmp_path / "p")), PartialResult.empty(partial.identity)
    both.merge(partial)
    both.merge(partial)
    again.merge(partial)
    assert again.counts == both.counts
    assert again.heads.table().equals(both.heads.table())


def test_symmetric_and_wide_tensors_lose_nothing():
    square = torch.arange(9.0).view(3, 3)
    wide = torch.zeros(2, 3000)
    wide[1, 700:900] = 1
    for x in (square, square + square.T, wide, torch.zeros(2, 2000), torch.zeros(0), torch.tensor(3.0)):
        tensors = {}
        assert torch.equal(unpack(json.loads(json.dumps(pack(x, "x", tensors))), {**tensors}), x)
        assert tensors["x"].numel() <= x.numel()
    assert tensors.keys() == {"x"}


def test_writing_that_fails_leaves_the_old_file(partial, tmp_path, monkeypatch):
    path = save_partial(partial, tmp_path / "partial.safetensors")
    before = path.read_bytes()

    def fail(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(path, PartialResult.empty(partial.identity), {1}, "corpus")
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["partial.safetensors"]


@pytest.mark.parametrize("done", [set(), {0}, {0, 1, 2, 5, 7, 8}, set(range(10_000)) - {77}])
def test_a_checkpoint_says_which_splits_are_done(partial, tmp_path, done):
    path = save_checkpoint(tmp_path / "checkpoint", partial, done, "c" * 64)
    again, found = load_checkpoint(path, partial.identity, "c" * 64)
    assert found == done
    assert_same(again, partial)


def test_a_checkpoint_of_another_run_is_refused(partial, tmp_path):
    path = save_checkpoint(tmp_path / "checkpoint", partial, {0}, "c" * 64)
    for change, message in (
        ({"model": "0" * 64}, "was made by another run: the model differs: embedded"),
        (
            {"options": {**partial.identity.options, "rows": 7}},
            "the option rows is 32 in one and 7 in the other; resume",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            load_checkpoint(path, replace(partial.identity, **change), "c" * 64)
    with pytest.raises(ValueError, match="was made for another text .cccccccccccc, and this one is dddddddddddd.;"):
        load_checkpoint(path, partial.identity, "d" * 64)
    finished = save_partial(partial, tmp_path / "partial.safetensors")
    with pytest.raises(ValueError, match="must be the checkpoint of a run, and it is a finished partial result"):
        load_checkpoint(finished, partial.identity, "c" * 64)


def test_what_is_no_part_is_refused_in_one_sentence(partial, tmp_path):
    path = tmp_path / "partial.safetensors"
    with pytest.raises(
        ValueError, match="must be a partial result that massieu inspect --out wrote, and it cannot be read"
    ):
        load_partial(tmp_path)
    path.write_bytes(save_partial(partial, tmp_path / "other").read_bytes()[:5000])
    with pytest.raises(ValueError, match="partial.safetensors is damaged"):
        load_partial(path)
    for header, message in (
        (None, f"must have the schema {SCHEMA}, got None of another version; inspect again"),
        ("no json", f"must have the schema {SCHEMA}, got None"),
        ("[" * 100_000, f"must have the schema {SCHEMA}, got None"),
        ('{"schema": "massieu.part/0"}', f"must have the schema {SCHEMA}, got massieu.part/0"),
        ("{}", "is damaged .'partial' is missing"),
        ('{"partial": {"PartialResult": {}}}', "is damaged"),
        ('{"partial": {"system": []}}', "is damaged .'system' is missing"),
        ('{"partial": 7, "finite": true}', "is damaged .it holds no partial result"),
        ("[]", f"must have the schema {SCHEMA}, got None"),
        ('{"partial": {"PartialResult": [1]}}', "is damaged"),
        ('{"partial": {"tensor": []}}', "is damaged"),
        ('{"partial": {"tensor": ["x", "symmetric", 5]}}', "is damaged"),
        ('{"partial": {"tensor": ["x", "padded", 1000000000000, 0]}}', "is damaged"),
        ('{"partial": {"tensor": ["x"]}, "finite": true}', "is damaged .it holds no partial result"),
    ):
        text = header and header.replace("{", f'{{"schema": "{SCHEMA}", ', 1).replace(", }", "}")
        text = header if header is None or "schema" in header else text
        tensors = {"x": torch.ones(1)}
        save_file(tensors, path, metadata=text and {"massieu": text, "digest": digest_of(text, tensors)})
        with pytest.raises(UserError, match=message) as caught:
            load_partial(path)
        assert "\n" not in str(caught.value)


def flipped(data: bytes, bit: int) -> bytes:
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


def test_no_flipped_bit_of_a_part_or_a_checkpoint_is_believed(partial, tmp_path):
    draw = random.Random(0)
    whole = save_partial(partial, tmp_path / "p").read_bytes()
    checkpoint = save_checkpoint(tmp_path / "c", partial, {0, 2}, "c" * 64).read_bytes()
    length = int.from_bytes(whole[:8], "little")
    bits = [draw.randrange(8 * (8 + length)) for _ in range(15)]  # of the header, which is small
    bits += [draw.randrange(8 * len(whole)) for _ in range(15)]
    for bit in bits:
        with pytest.raises(UserError) as caught:
            partial_from_bytes(flipped(whole, bit))
        assert "\n" not in str(caught.value)
        (tmp_path / "f").write_bytes(flipped(whole, bit))
        with pytest.raises(UserError):
            load_partial(tmp_path / "f")
        (tmp_path / "f").write_bytes(flipped(checkpoint, bit))
        with pytest.raises(UserError):
            load_checkpoint(tmp_path / "f", partial.identity, "c" * 64)


def written_anew(path, partial, change) -> None:
    """Write a part with another content and the digest of that content, as a writer with a defect would."""
    tensors = {}
    header = {"schema": SCHEMA, "partial": pack(partial, "partial", tensors), "finite": True}
    tensors = {name: x.clone() for name, x in tensors.items()}
    change(header["partial"]["PartialResult"], tensors)
    text = json.dumps(header)
    save_file(tensors, path, metadata={"massieu": text, "digest": digest_of(text, tensors)})


def entry(name: str, value: float):
    def change(packed, tensors):
        tensors[next(own for own in tensors if own.endswith(name))].view(-1)[0] = value

    return change


def tensor(name: str, changed):
    def change(packed, tensors):
        own = next(own for own in tensors if own.endswith(name))
        tensors[own] = changed(tensors[own]).contiguous()

    return change


def row(*path: str):
    def change(packed, tensors):
        for name in path:
            packed = packed[name]
        packed["dict"][0][0]["tuple"][1] = 0.5

    return change


def size(name: str):
    def change(packed, tensors):
        found = next(own for own in _sizes(packed) if own[0].endswith(name) and own[1:2] == ["padded"])
        found[3] = True

    return change


def _sizes(packed):
    """The entries of all tensors: their names and how they are kept."""
    for key, own in packed.items() if isinstance(packed, dict) else enumerate(packed):
        if key == "tensor":
            yield own
        elif isinstance(own, (dict, list)):
            yield from _sizes(own)


def option(packed, tensors):
    packed["identity"]["Identity"]["options"]["dict"][0][0] = 0.5


def count(name: str, value):
    def change(packed, tensors):
        packed["counts"]["DocumentCounts"][name] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (entry(".means.count", -1.0), "means.count has negative entries"),
        (entry("ratios.expansion.counts", -1.0), "expansion.counts has negative entries"),
        (entry(".means.sum", math.nan), "means.sum is not finite"),
        (entry(".clouds.before._scatter", math.inf), "scatter is not finite"),
        (entry("extremes.largest", math.nan), "largest is not a number"),
        (entry("sample.hashes", -5), "hashes has negative entries"),
        (tensor(".means.sum", lambda x: x.float()), "has the dtype torch.float32, not torch.float64"),
        (tensor(".means.sum", lambda x: x[:, :1]), "has the shape"),
        (tensor(".shift", lambda x: x[0]), "shift has the shape"),
        (tensor("clouds.before.mean", lambda x: x[1:]), "is damaged"),
        (tensor("inputs.input_ids", lambda x: -x), "input_ids is odd"),
        (tensor("inputs.input_ids", lambda x: x[None]), "input_ids is not as expected"),
        (tensor("inputs.input_ids", lambda x: torch.cat([x, x])), "input_ids is not as expected"),
        (tensor("inputs.input_ids", lambda x: x[:, 1:]), "is not as expected"),
        (tensor("inputs.attention_mask", lambda x: x + 1), "attention_mask is not as expected"),
        (size("ratios.expansion.counts"), "the size of a tensor"),
        (option, "identity.options is not as expected"),
        (tensor("content.decoder", lambda x: x[:0]), "content is not as expected"),
        (row("heads", "HeadStatistics", "layers"), "heads has a row that is not as expected"),
        (row("layers", "LayerSums", "statistics"), "layers has a row that is not as expected"),
        (count("documents", -1), "counts.documents is -1"),
        (count("documents", 1.5), "documents is not as expected"),
        (count("documents", True), "documents is not as expected"),
        (count("counted", 10**9), "counted exceeds the tokens"),
        (count("blank", 10**9), "blank exceeds the documents"),
        (count("sketch", {"list": [5, 4, 3]}), "sketch is not as expected"),
        (count("digest", 1 << 256), "digest is not as expected"),
        (lambda packed, tensors: tensors.update(more=torch.ones(1)), "more belongs to nothing"),
        (lambda packed, tensors: tensors.pop(min(tensors)), "is missing"),
        (lambda packed, tensors: packed.update(sources={"set": ["\ud800"]}), "sources.0 is no text"),
        (lambda packed, tensors: packed.update(versions={"set": [7]}), "versions.0 is not as expected"),
        (lambda packed, tensors: packed.update(layers=None), "layers is not as expected"),
        (lambda packed, tensors: packed.update(more=1), "a field of PartialResult"),
    ],
)
def test_a_part_that_no_reading_makes_is_refused_whatever_its_digest(partial, change, message, tmp_path):
    written_anew(tmp_path / "p", partial, lambda packed, tensors: None)
    assert_same(load_partial(tmp_path / "p"), partial)
    written_anew(tmp_path / "p", partial, change)
    with pytest.raises(UserError, match=message) as caught:
        load_partial(tmp_path / "p")
    assert "\n" not in str(caught.value)


def test_a_passage_with_tokens_that_the_model_does_not_have_is_refused_in_one_sentence(partial, tmp_path):
    model = load(str(assets.MODEL)).model
    written_anew(tmp_path / "p", partial, entry("inputs.input_ids", 1 << 40))
    with pytest.raises(
        UserError, match="must read the passages .* cannot .*; the partial result is damaged, inspect again"
    ):
        build_inspection(load_partial(tmp_path / "p"), model)


def test_sums_that_are_not_finite_are_read_again_if_they_were_written_so(partial, tmp_path):
    odd = load_partial(save_partial(partial, tmp_path / "p"))
    next(iter(odd.layers.statistics.values())).clouds["before"].mean[0] = math.nan
    assert_same(load_partial(save_partial(odd, tmp_path / "p")), odd)


def test_splits_that_a_corpus_does_not_have_cannot_be_done(partial, tmp_path):
    path = save_checkpoint(tmp_path / "c", partial, {0, 5}, "c" * 64)
    assert load_checkpoint(path, partial.identity, "c" * 64, 6)[1] == {0, 5}
    with pytest.raises(UserError, match="is damaged .checkpoint.done is not as expected"):
        load_checkpoint(path, partial.identity, "c" * 64, 5)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("counts",), {"list": []}, r"is damaged \(counts is not as expected\)"),
        (("counts",), None, r"is damaged \(counts is not as expected\)"),
        (("counts", "DocumentCounts", "documents"), "many", r"is damaged \(counts.documents is not as expected\)"),
        (("counts", "DocumentCounts"), [1], "is damaged"),
        (("layers",), {"BadRecords": {"counts": {"dict": []}, "first": {"list": []}}}, r"is damaged \(layers is not"),
        (("identity", "Identity", "options"), 7, r"is damaged \(options is not as expected\)"),
        (("sources",), {"list": []}, r"is damaged \(sources is not as expected\)"),
    ],
)
def test_a_part_of_other_kinds_is_refused_in_one_sentence(partial, path, value, message, tmp_path):
    tensors = {}
    packed = pack(partial, "partial", tensors)
    inside = packed["PartialResult"]
    for name in path[:-1]:
        inside = inside[name]
    inside[path[-1]] = value
    text = json.dumps({"schema": SCHEMA, "finite": True, "partial": packed})
    metadata = {"massieu": text, "digest": digest_of(text, tensors)}
    save_file(tensors, tmp_path / "partial.safetensors", metadata=metadata)
    with pytest.raises(ValueError, match=message) as caught:
        load_partial(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_checkpoint_of_an_unfinished_run_is_no_part(partial, tmp_path):
    path = save_checkpoint(tmp_path / "checkpoint.safetensors", partial, {0}, "c" * 64)
    with pytest.raises(
        ValueError, match="must be the partial result of a finished run, and it is the checkpoint .* --resume"
    ):
        load_partial(path)


@pytest.mark.skipif(os.name == "nt", reason="no such modes")
def test_a_part_may_be_read_by_those_who_may_read_other_files(partial, tmp_path):
    (tmp_path / "other").write_text("")
    for path in (save_partial(partial, tmp_path / "p"), save_checkpoint(tmp_path / "c", partial, {0}, "c" * 64)):
        assert path.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_arguments_that_no_file_can_hold_leave_the_tables_without_a_part(tmp_path):
    with pytest.raises(Unpackable, match="a part can hold tensors and plain values, got object in x.odd; leave it out"):
        pack({"odd": object()}, "x", {})
    model, inputs = build("gpt2")
    found = inspect_model(model, inputs=[inputs])
    found.save(tmp_path, figures=False)
    assert load_partial(tmp_path).identity.options["reads"] == "tensors"
    found.partial.passages.kept[0].inputs["odd"] = object()
    found.save(tmp_path, figures=False)
    assert not (tmp_path / "partial.safetensors").exists()
    assert (tmp_path / "report.html").exists()
