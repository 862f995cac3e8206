"""The embedded model: it has learned, it is what its provenance says, and its text was kept from it."""

import hashlib
import json
import math
import os
import re
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from massieu.assets import CHECKPOINTS, HERE, MODEL, PROVENANCE, documents
from massieu.assets.ngrams import NgramCounts, counts, interpolated, ngram_losses
from massieu.assets.text_sources import SourceText, excerpt, passages, read_documents, split, word_runs
from massieu.checks import UserError

transformers = pytest.importorskip("transformers")

FACTS = json.loads(PROVENANCE.read_text(encoding="utf-8"))
RECORDED = {HERE / point["folder"]: point for point in FACTS["checkpoints"]}


def load(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def rows(tokenizer) -> list[Tensor]:
    return [torch.tensor([tokenizer(text)["input_ids"]]) for text in documents()]


@pytest.fixture(scope="module")
def models() -> dict:
    return {folder: load(folder) for folder in CHECKPOINTS}


@torch.no_grad()
def loss(model, rows: list[Tensor]) -> float:
    """Nats per token, by the model's own loss: each text gives one fewer prediction than it has tokens."""
    total = sum(float(model(input_ids=row, labels=row).loss) * (row.shape[1] - 1) for row in rows)
    return total / sum(row.shape[1] - 1 for row in rows)


@torch.no_grad()
def row_entropies(model, rows: list[Tensor]) -> Tensor:
    """Entropy of the rows over the log of their length, averaged over rows: ``(layers, heads)``."""
    found = []
    for row in rows:
        weights = torch.stack(model(input_ids=row, output_attentions=True).attentions)[:, 0, :, 1:]
        length = torch.arange(2, row.shape[1] + 1)
        found.append((-torch.xlogy(weights, weights).sum(-1) / length.log()).mean(-1))
    return torch.stack(found).mean(0)


@pytest.mark.parametrize("folder", CHECKPOINTS, ids=lambda folder: folder.name)
def test_every_folder_loads_by_itself_in_float32(folder, tokenizer):
    model = load(folder)
    assert model.dtype == torch.float32
    assert model.num_parameters() == FACTS["parameters"]
    own = transformers.AutoTokenizer.from_pretrained(folder)
    for text in (documents()[0], "Call me—\n\n“Ahab”, né 1851"):
        assert own(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert own.decode(own(text)["input_ids"]) == text


def test_the_model_loads_without_a_network():
    script = (
        "import socket\n"
        "def refuse(*_, **__): raise OSError('no network')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "from massieu.assets import MODEL\n"
        "AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)\n"
    )
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(HERE.parents[1])}
    subprocess.run([sys.executable, "-c", script], env=offline, check=True, capture_output=True)


def test_the_model_predicts_held_out_text_far_better_than_a_bigram(models, rows):
    found = loss(models[MODEL], rows)
    baseline = FACTS["baselines_nats_per_token"]["excerpt"]
    assert found < baseline["bigram"] - 0.7
    assert found < baseline["trigram"] - 0.2
    assert baseline["bigram"] < baseline["unigram"] - 1.0  # the baselines are not made of straw
    held_out = FACTS["checkpoints"][-1]["held_out"]["nats_per_token"]
    assert held_out < FACTS["baselines_nats_per_token"]["held_out"]["bigram"] - 0.7


def test_losses_fall_over_the_checkpoints_and_are_the_recorded_ones(models, rows):
    found = [loss(model, rows) for model in models.values()]
    # Another processor sums in another order: 1e-4 is ten times what eager and fused attention differ by.
    assert_close(found, [RECORDED[folder]["excerpt"]["nats_per_token"] for folder in CHECKPOINTS], rtol=0, atol=1e-4)
    assert found == sorted(found, reverse=True)
    assert abs(found[0] - math.log(FACTS["recipe"]["vocabulary"])) < 0.3  # untrained: nearly uniform


def test_rounding_to_half_precision_keeps_the_loss():
    before, after = FACTS["held_out_before_rounding"], FACTS["checkpoints"][-1]["held_out"]
    assert abs(after["nats_per_token"] - before["nats_per_token"]) < 1e-3


def test_attention_gets_sharper_and_weights_grow(models, rows):
    first, last = models[CHECKPOINTS[0]], models[MODEL]
    before, after = row_entropies(first, rows[::8]), row_entropies(last, rows[::8])
    assert before.min() > 0.98  # the untrained model averages
    assert after.mean() < 0.75
    assert (after < 0.5).sum() >= 4
    for grown, small in zip(last.transformer.h, first.transformer.h, strict=True):
        assert grown.attn.c_attn.weight.norm() > 1.3 * small.attn.c_attn.weight.norm()


def test_weights_are_those_of_the_provenance():
    assert list(RECORDED) == list(CHECKPOINTS)
    for folder, point in RECORDED.items():
        assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == point["sha256"]


def test_the_card_has_the_values_of_the_provenance():
    from massieu.assets.card import model_card, text_note

    assert (HERE / "README.md").read_text(encoding="utf-8") == model_card(FACTS)
    assert (HERE / "text" / "SOURCE.md").read_text(encoding="utf-8") == text_note(FACTS)


def test_everything_together_is_small():
    files = [path for path in HERE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) < 12_000_000


def test_training_took_less_than_twenty_minutes_of_two_cores():
    assert FACTS["recipe"]["threads"] == 2
    assert FACTS["seconds"]["processor_per_thread"] < 20 * 60


def test_the_text_was_held_out(rows):
    data = FACTS["data"]
    assert len(documents()) == len(data["excerpt"])
    assert set(data["excerpt"]) <= set(data["held_out"])
    assert not set(data["held_out"]) & set(data["learned"])
    assert not set(data["held_out"].values()) & set(data["learned"].values())  # nor the same text by another name
    assert all(150 <= row.shape[1] <= FACTS["recipe"]["context"] for row in rows)


def test_samples_are_made_of_words(models, tokenizer):
    words = set(re.findall(r"[a-z']+", " ".join(documents()).lower()))

    def known(folder) -> float:
        torch.manual_seed(0)
        start = tokenizer(["The whale"] * 4, return_tensors="pt")
        found = models[folder].generate(**start, max_new_tokens=60, do_sample=True, temperature=0.7, top_k=40)
        sampled = re.findall(r"[a-z']+", " ".join(tokenizer.batch_decode(found)).lower())
        return sum(word in words for word in sampled) / len(sampled)

    assert known(MODEL) > 0.7
    assert known(CHECKPOINTS[0]) < 0.5


def test_probabilities_of_ngrams_sum_to_one():
    learned = torch.randint(5, (200,), generator=torch.Generator().manual_seed(0))
    # The same two tokens of context before each token of the vocabulary; 4 4 may never have been seen.
    for context in ([0, 1], [2, 2], [4, 4]):
        asked = torch.tensor([[*context, token] for token in range(5)])
        seen = [counts(learned, asked, order, vocabulary=5) for order in (1, 2, 3)]
        for probability in interpolated(seen, vocabulary=5, discount=0.7):
            assert_close(probability[:, -1].sum(), torch.ones((), dtype=torch.float64))


def test_counts_of_runs_are_those_of_a_loop():
    learned, asked = [0, 1, 0, 1, 2, 0, 1], [0, 1, 2, 2]
    found = counts(torch.tensor(learned), torch.tensor([asked]), order=2, vocabulary=3)
    pairs = list(pairwise(learned))
    wanted = list(pairwise(asked))
    expected = NgramCounts(
        torch.tensor([[pairs.count(pair) for pair in wanted]]),
        torch.tensor([[sum(first == pair[0] for first, _ in pairs) for pair in wanted]]),
        torch.tensor([[len({second for first, second in pairs if first == pair[0]}) for pair in wanted]]),
    )
    assert all(torch.equal(*both) for both in zip(found, expected, strict=True))


def test_rows_of_different_length_count_by_their_tokens():
    learned, rows = torch.tensor([0, 1, 2, 0, 1, 1]), [torch.tensor([0, 1, 2, 0]), torch.tensor([1, 1, 0])]
    together = ngram_losses(learned, rows, vocabulary=3)["unigram"]
    apart = [ngram_losses(learned, [row], vocabulary=3)["unigram"] for row in rows]
    assert together == pytest.approx((3 * apart[0] + 2 * apart[1]) / 5, rel=0.05)  # each picks its own discount


def test_passages_that_repeat_the_training_text_are_excluded():
    def sentence(word: str) -> str:
        return "A " + " ".join([word] * 13) + "."

    held_out = [
        SourceText("chapter_1", f"{sentence('old')} {sentence('new')}"),
        SourceText("1800_x", sentence("speech")),
    ]
    learned = [SourceText("chapter_2", "So " + sentence("old"))]

    def count_tokens(text: str) -> int:
        return 200 * text.count(".")

    assert list(passages(held_out[0].text, count_tokens)) == [sentence("old"), sentence("new")]
    found = excerpt(held_out, learned, count_tokens, passages_of_each=5)
    assert found == [SourceText("chapter_1", sentence("new")), SourceText("1800_x", sentence("speech"))]


def test_reading_keeps_the_order_of_chapters_and_the_range_of_years(tmp_path):
    for name in ("chapter_10.txt", "chapter_2.txt", "1900_b.txt", "1800_a.txt", "1950_c.txt"):
        (tmp_path / name).write_text(name)
    names = [document.name for document in read_documents(tmp_path, tmp_path, last_year=1900)]
    assert names == ["chapter_2", "chapter_10", "1800_a", "1900_b"]
    learned, held_out = split(read_documents(tmp_path, tmp_path, last_year=1900), every=4)
    assert [document.name for document in held_out] == ["1800_a"]
    assert len(learned) == 3
    with pytest.raises(UserError):
        read_documents(tmp_path / "none", tmp_path, last_year=1900)
    assert list(word_runs("too short")) == []
