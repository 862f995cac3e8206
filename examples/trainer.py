"""Train a small GPT-2 with the Trainer of transformers and watch its attention in TensorBoard.

Needs accelerate and tensorboard, the extra "train" of massieu: pip install 'massieu[train]'. Nothing is downloaded.

    python examples/trainer.py [FOLDER]
    tensorboard --logdir FOLDER            # curves and flags under massieu/, beside the Trainer's own
    massieu watch FOLDER/run.jsonl         # every layer in the terminal; --html page.html for a page
"""

import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from massieu import assets
from massieu.monitor.trainer import WatchCallback

LENGTH = 64
folder = Path(sys.argv[1] if len(sys.argv) > 1 else "trainer-run")
folder.mkdir(parents=True, exist_ok=True)

# Text and tokenizer of massieu, cut into passages.
tokenizer = AutoTokenizer.from_pretrained(assets.MODEL)
tokens = torch.tensor([token for text in assets.documents() for token in tokenizer.encode(text)])
passages = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
data = [{"input_ids": passage, "labels": passage} for passage in passages]

set_seed(0)
config = GPT2Config(
    vocab_size=len(tokenizer),
    n_positions=LENGTH,
    n_embd=64,
    n_layer=3,
    n_head=4,
    bos_token_id=tokenizer.eos_token_id,
    eos_token_id=tokenizer.eos_token_id,
)
model = GPT2LMHeadModel(config)
trainer = Trainer(
    model,
    TrainingArguments(
        output_dir=folder,
        max_steps=40,
        per_device_train_batch_size=8,
        learning_rate=0.1,  # far too large: flags will be raised
        logging_steps=5,  # equal to that of the callback, so that each reading but the first has a loss
        report_to="tensorboard",
        save_strategy="no",
    ),
    train_dataset=data,
    callbacks=[WatchCallback(every=5, log=["tensorboard", folder / "run.jsonl"])],
)
trainer.train()
