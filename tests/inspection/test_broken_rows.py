"""Rows whose scores are not finite are told from rows that see no key, counted by head and left out of every value."""

from __future__ import annotations

import copy
import json
from collections import Counter

import pytest
import torch

pytest.importorskip("transformers")
from attention_calls import call_of
from taps.families import build

from massieu import assets
from massieu.checks import NotObservable
from massieu.cli import main
from massieu.corpus.passages import given_batches
from massieu.corpus.shards import text_shards
from massieu.inspection import inspect_model
from massieu.inspection.heads import HeadStatistics
from massieu.inspection.partial_files import partial_from_bytes, partial_to_bytes
from massieu.inspection.partial_result import merge_partials
from massieu.inspection.reader import ANY_TEXT, Reader
from massieu.inspection.tables import build_inspection
from massieu.models.loading import load
from massieu.taps import tap

TEXTS = assets.documents()[:10]


@pytest.fixture(scope="module")
def loaded():
    return load(str(assets.MODEL))


@pytest.fixture(scope="module")
def word(loaded) -> int:
    """A token that occurs in few of the documents, and not in the first of the passages that are kept."""
    seen = [set(loaded.tokenizer(text)["input_ids"]) for text in TEXTS]
    counts = Counter(token for tokens in seen for token in tokens)
    return next(token for token, count in sorted(counts.items()) if count == 2)


@pytest.fixture(scope="module")
def broken(loaded, word):
    """The embedded model with one embedding that is nan."""
    model = copy.deepcopy(loaded.model)
    with torch.no_grad():
        model.get_input_embeddings().weight[word] = torch.nan
    return model


@pytest.fixture(scope="module")
def found(loaded, broken):
    return inspect_model(broken, TEXTS, tokenizer=loaded.tokenizer)


def rows_from(loaded, word: int) -> int:
    """Rows at and behind the first occurrence of the token, which see it or are it."""
    ids = [loaded.tokenizer(text)["input_ids"] for text in TEXTS]
    return sum(len(tokens) - tokens.index(word) for tokens in ids if word in tokens)


def test_a_nan_embedding_breaks_rows_of_every_head_and_empties_none(loaded, found, word):
    first = found.heads[found.heads.layer == 0]
    assert (first.broken_rows == rows_from(loaded, word)).all()
    assert (found.heads.broken_rows >= rows_from(loaded, word)).all()
    assert (found.heads.rows + found.heads.broken_rows == found.facts["text"]["counted_tokens"]).all()
    assert not any("see no token" in note for note in found.notes)
    assert any("not finite" in note and "attention rows" in note for note in found.notes)


def test_values_of_the_first_layer_are_those_of_the_rows_before_the_token(loaded, broken, word):
    ids = [loaded.tokenizer(text)["input_ids"] for text in TEXTS]
    before = [tokens[: tokens.index(word)] if word in tokens else tokens for tokens in ids]
    right = inspect_model(
        loaded.model,
        inputs=[{"input_ids": torch.tensor([tokens])} for tokens in before],
        experiments="heads",
        rows=None,
    ).heads.query("layer == 0")
    found = inspect_model(broken, TEXTS, tokenizer=loaded.tokenizer, experiments="heads", rows=None)
    mine = found.heads.query("layer == 0")
    assert mine.rows.tolist() == right.rows.tolist()
    for column in ("entropy", "peak", "mass90", "score_range", "score_max", "entropy_min", "sink_mass", "entropy_se"):
        assert mine[column].tolist() == pytest.approx(right[column].tolist(), rel=1e-4, abs=1e-5), column


def test_the_first_finding_names_the_first_layer_and_the_cause(found, loaded, word):
    first = found.findings[0]
    assert first.quantity == "broken_rows"
    assert "layer 0" in first.sentence
    assert f"{rows_from(loaded, word)} of " in first.sentence
    assert "are damaged" in first.sentence
    assert "--dtype" not in first.sentence  # it was float32
    assert {place[1] for place in first.where} == set(found.heads.layer)


def test_experiments_leave_out_tokens_that_are_not_finite_and_count_them(loaded, broken, found):
    counted, finite = found.facts["text"]["counted_tokens"], 0
    for text in TEXTS:
        with torch.no_grad():
            given = torch.tensor([loaded.tokenizer(text)["input_ids"]])
            states = broken(given, output_hidden_states=True).hidden_states
        finite += int((states[0] + states[1]).isfinite().all(-1).sum())
    assert found.layers.tokens.iloc[0] == finite < counted
    assert found.layers[["expansion", "effective_rank", "fc_linear_r2", "field_symmetry"]].notna().all(axis=None)
    note = next(note for note in found.notes if "left out of the layers table" in note)
    assert str(counted - found.layers.tokens.min()) in note


def test_a_text_without_a_finite_passage_has_no_layers_but_heads(loaded, broken, word):
    text = loaded.tokenizer.decode([word]) + TEXTS[0]
    assert word in loaded.tokenizer(text)["input_ids"]
    found = inspect_model(broken, [text], tokenizer=loaded.tokenizer)
    assert found.layers.empty
    assert (found.heads.broken_rows > 0).all()
    assert any("no passage" in note for note in found.notes)


def test_an_intact_model_has_no_broken_rows_no_note_and_no_finding(loaded):
    found = inspect_model(loaded.model, TEXTS[:2], tokenizer=loaded.tokenizer, experiments="heads")
    assert (found.heads.broken_rows == 0).all()
    assert not any("finite" in note for note in found.notes)
    assert all(finding.quantity != "broken_rows" for finding in found.findings)


def test_broken_rows_survive_merging_and_files(loaded, broken, found):
    reader = Reader(broken, loaded.tokenizer)
    partials = [partial_from_bytes(partial_to_bytes(reader.read(shard))) for shard in text_shards(TEXTS, 3)]
    merged = build_inspection(merge_partials(partials), broken)
    assert merged.heads.broken_rows.tolist() == found.heads.broken_rows.tolist()
    assert merged.layers.tokens.tolist() == found.layers.tokens.tolist()


def test_overflow_in_half_precision_is_counted_by_head():
    query, key = torch.ones(1, 2, 5, 4), torch.ones(1, 2, 5, 4)
    query[0, 1, 3] = torch.inf  # of the second head only
    heads = HeadStatistics(None)
    (batch,) = given_batches([{"input_ids": torch.ones(1, 5)}])
    heads.receive(call_of(query.half(), key.half(), causal=True), batch)
    table = heads.table()
    assert table.broken_rows.tolist() == [0, 1]
    assert table.rows.tolist() == [5, 4]
    others = torch.tensor([1.0, 2.0, 3.0, 5.0]).log().mean().item()
    assert table.entropy.iloc[1] == pytest.approx(others, abs=1e-6)


@pytest.fixture(scope="module")
def overflowing(loaded, word):
    """The embedded model in half precision with one embedding near the largest number of that precision."""
    model = copy.deepcopy(loaded.model).half()
    with torch.no_grad():
        row = model.get_input_embeddings().weight[word]
        row *= 6e4 / row.abs().max()
    return model


def rows_with_broken_projections(model, tokenizer, layer: int) -> int:
    """Rows of a layer whose query, or a key that they see, is not finite: from the projections of the model."""
    projected, found = [], 0
    with model.h[layer].attn.c_attn.register_forward_hook(lambda *given: projected.append(given[-1][0])):
        for text in TEXTS:
            with torch.no_grad():
                model(torch.tensor([tokenizer(text)["input_ids"]]))
            query, key, _ = projected.pop().isfinite().chunk(3, -1)
            found += int((~query.all(-1) | (~key.all(-1)).cummax(0).values).sum())
    return found


def test_overflow_of_half_precision_inside_of_a_corpus_is_counted_and_the_experiments_run(loaded, overflowing):
    found = inspect_model(overflowing, TEXTS, tokenizer=loaded.tokenizer)
    for layer in (0, 1):
        right = rows_with_broken_projections(overflowing, loaded.tokenizer, layer)
        assert right > 0
        assert (found.heads[found.heads.layer == layer].broken_rows == right).all()
    assert found.findings[0].quantity == "broken_rows"
    assert "Try --dtype float32" in found.findings[0].sentence
    assert not any("see no token" in note for note in found.notes)
    assert found.layers[["expansion", "effective_rank", "fc_linear_r2", "field_symmetry"]].notna().all(axis=None)


def test_a_row_that_sees_no_key_is_empty_even_if_its_query_is_nan():
    query, mask = torch.ones(1, 1, 4, 2), torch.ones(1, 1, 4, 4, dtype=torch.bool).tril(-1)
    query[0, 0, 0] = torch.nan
    heads = HeadStatistics(None)
    (batch,) = given_batches([{"input_ids": torch.ones(1, 4)}])
    heads.receive(call_of(query, torch.ones(1, 1, 4, 2), log_weight=mask), batch)
    assert heads.table().broken_rows.tolist() == [0]
    assert "1 attention rows see no token at all; they are left out of every mean." in heads.notes


def test_scores_that_a_model_builds_itself_break_rows_too():
    scores = torch.zeros(1, 1, 3, 3).masked_fill(torch.ones(3, 3).triu(1).bool(), -torch.inf)
    scores[0, 0, 2, 1] = torch.nan
    heads = HeadStatistics(None)
    (batch,) = given_batches([{"input_ids": torch.ones(1, 3)}])
    heads.receive(call_of(None, None, scores=scores), batch)
    assert heads.table().broken_rows.tolist() == [1]


def test_broken_rows_can_end_a_command_with_an_exit_code(broken, loaded, tmp_path, capsys):
    broken.save_pretrained(tmp_path / "model")
    loaded.tokenizer.save_pretrained(tmp_path / "model")
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": each}) + "\n" for each in TEXTS))
    common = ["inspect", str(tmp_path / "model"), "--text", str(text), "--heads-only", "-q"]
    assert main([*common, "--fail-on", "broken_rows>0"]) == 1
    assert "broken_rows > 0: decoder layer 0 head 0 has" in "".join(capsys.readouterr())
    assert main([*common, "--fail-on", "broken_rows>1000000"]) == 0


def test_broken_rows_of_left_padded_batches_are_those_of_single_texts():
    model, inputs = build("gpt2", padding="left")
    with torch.no_grad():
        model.get_input_embeddings().weight[inputs["input_ids"][0, -1]] = torch.nan
    (batch,) = given_batches([inputs])
    heads = HeadStatistics(None)
    with torch.no_grad(), tap(model, lambda call: heads.receive(call, batch)):
        model(**inputs)
    assert (heads.table().query("layer == 0").broken_rows > 0).all()
    assert (heads.table().query("layer == 0").rows > 0).all()


def test_a_word_that_is_broken_everywhere_is_counted_and_damaged_weights_are_refused(loaded, word):
    probed = loaded.tokenizer(ANY_TEXT)["input_ids"]
    model = copy.deepcopy(loaded.model)
    with torch.no_grad():
        model.get_input_embeddings().weight[probed] = torch.nan  # all words of the sentence that is tried first
    found = inspect_model(model, TEXTS, tokenizer=loaded.tokenizer, experiments="heads")
    assert (found.heads.broken_rows > 0).all()
    with torch.no_grad():
        model.get_input_embeddings().weight.nan_to_num_(0.0)
        next(model.parameters()).fill_(torch.nan)
    with pytest.raises(NotObservable, match="whatever the tokens are.*--dtype float32"):
        inspect_model(model, TEXTS, tokenizer=loaded.tokenizer, experiments="heads")
