"""Tiny decoder with tokenizer and text, for the attacks."""

from __future__ import annotations

import random
from pathlib import Path

import torch

__all__ = ["make_model", "make_text"]

WORDS = "call me some years ago never mind how long the whale sea ship and of".split()  # noqa: SIM905


def make_model(folder: Path) -> Path:
    """Write a decoder of one block with two heads, and a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    numbers = {word: number for number, word in enumerate(("[UNK]", "[PAD]", *WORDS))}
    words = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]", model_max_length=32
    )
    tokenizer.save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=len(numbers), n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1
        )
        GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def make_text(path: Path, seed: str, documents: int = 24) -> Path:
    """Write documents of random words, one JSON string per line."""
    chance = random.Random(seed)
    texts = (" ".join(chance.choices(WORDS, k=chance.randint(4, 24))) for _ in range(documents))
    path.write_text("".join(f'"{text}"\n' for text in texts))
    return path
