"""``massieu inspect``: measure every attention head and layer of a transformer on a text."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from massieu.checks import UserError, visible
from massieu.commands import REPORT_PACKAGES, Command, check_packages
from massieu.commands.arguments import (
    add_engine,
    add_loading,
    add_results,
    engine,
    loading,
    number,
    path,
    positive,
    seed,
)
from massieu.commands.notices import check_output, checkpoint_warnings_in_one_line
from massieu.outputs.progress import command_progress

if TYPE_CHECKING:
    from massieu.corpus import Corpus
    from massieu.engine import Checkpoint

__all__ = ["add", "run"]

CHECKPOINT = "checkpoint.safetensors"


def add(command: Command) -> None:
    """Declare the arguments."""
    parser = command("inspect", run, "measure every attention head and layer of a transformer on a text")
    parser.add_argument(
        "model",
        nargs="?",
        type=path,
        metavar="MODEL",
        help="folder, installed package or Hugging Face id (default: the embedded model)",
    )
    _add_text(parser)
    how = parser.add_argument_group("method")
    how.add_argument("--batch-size", type=positive, default=16, metavar="N", help="passages per batch (default: 16)")
    how.add_argument(
        "--rows", type=_rows, default=32, metavar="N|all", help="rows of a passage examined in full (default: 32)"
    )
    how.add_argument("--heads-only", action="store_true", help="statistics of attention only: the fastest")
    add_loading(parser)
    _add_run(add_engine(parser))
    _add_results(parser)


def _add_text(parser: argparse.ArgumentParser) -> None:
    text = parser.add_argument_group("text")
    text.add_argument(
        "--text",
        action="extend",
        nargs="+",
        type=path,
        metavar="PATH",
        help="files, folders, wildcards or URLs of .txt, .jsonl, .csv, .tsv and .parquet, compressed or not;"
        " - is standard input (default: the embedded text)",
    )
    text.add_argument(
        "--dataset",
        type=path,
        metavar="NAME[:CONFIG[:SPLIT]]",
        help="documents of a Hugging Face dataset (default: the files of --text)",
    )
    text.add_argument("--column", metavar="NAME", help="field or column that holds the text (default: text)")
    text.add_argument("--limit", type=positive, metavar="N", help="use the first N documents (default: all)")
    text.add_argument(
        "--sample", type=number, metavar="SHARE", help="use a fraction of the documents, such as 0.01 (default: 1)"
    )
    text.add_argument("--seed", type=seed, default=0, metavar="N", help="seed of the sample (default: 0)")
    text.add_argument("--strict", action="store_true", help="fail at the first record that cannot be read")
    text.add_argument(
        "--max-length",
        type=positive,
        metavar="T",
        help="cut documents into passages of T tokens (default: they are not cut)",
    )
    text.add_argument(
        "--long-documents",
        choices=("error", "cut", "skip"),
        help="treatment of documents with more tokens than the model reads (default: error, or cut with --max-length)",
    )
    text.add_argument("--special-tokens", action="store_true", help="count special tokens as well")


def _add_run(group: Any) -> None:
    group.add_argument(
        "--workers", type=positive, metavar="N", help="processes of a cluster on this machine (default: one per core)"
    )
    group.add_argument("--resume", action="store_true", help="continue an interrupted run of the same command")
    group.add_argument(
        "--checkpoint", type=path, metavar="FILE", help="file for the state of the run (default: one in --out)"
    )
    group.add_argument(
        "--checkpoint-every", type=number, default=30, metavar="S", help="seconds between two checkpoints (default: 30)"
    )
    group.add_argument(
        "--split-bytes", type=positive, metavar="N", help="bytes of text in a shard (default: up to 1 MB)"
    )


def _add_results(parser: argparse.ArgumentParser) -> None:
    results = parser.add_argument_group("results")
    add_results(results, "report.html, tables, JSON and figures")
    partial = results.add_mutually_exclusive_group()
    partial.add_argument(
        "--partial",
        action="store_true",
        default=None,
        help="write the partial result for massieu merge, whatever its size (default: up to 32 MB)",
    )
    partial.add_argument("--no-partial", dest="partial", action="store_false", help="do not write the partial result")
    results.add_argument(
        "--fail-on",
        action="append",
        default=[],
        metavar="EXPR",
        help="exit code 1 if the condition holds: 'broken_rows > 0' for any head with scores that are not finite,"
        " 'median(entropy) by layer < 0.1' for a layer in which half of the heads attend to one token,"
        " 'share(entropy < 0.05) > 0.2' for a fifth of all heads; mean, min and max work as well, and a column alone"
        " means any head (default: no condition)",
    )


def run(options: argparse.Namespace) -> int:
    """Inspect a model; write and print the inspection."""
    check_packages("transformers", "pandas", "rich", "fsspec", *(REPORT_PACKAGES if options.out else ()))
    from massieu.inspection import inspect_model, result, thresholds

    conditions = [thresholds.parse_threshold(expression) for expression in options.fail_on]
    if options.heads_only:
        thresholds.check_heads_only(conditions)
    corpus = _corpus(options)
    if options.out:
        check_output(options.out, "inspection", quiet=options.quiet)
    checkpoint = _checkpoint(options)
    if options.resume and checkpoint is not None and not options.quiet:
        start = "going on from" if checkpoint.path.exists() else "beginning, since there is no checkpoint"
        print(f"{start} {visible(str(checkpoint.path))}", file=sys.stderr)
    chosen = engine(options, options.workers)
    if not (options.out or options.quiet or options.json):
        print("no report will be written; pass --out DIR for one ...", file=sys.stderr)
    mentioned = contextlib.nullcontext if checkpoint is None else checkpoint.mentioned
    shown = command_progress(options.quiet or options.json)
    with mentioned(), contextlib.closing(chosen), checkpoint_warnings_in_one_line(), shown as progress:
        found = inspect_model(
            options.model,
            corpus,
            batch_size=options.batch_size,
            max_length=options.max_length,
            experiments="heads" if options.heads_only else "default",
            rows=options.rows,
            special_tokens=options.special_tokens,
            long_documents=options.long_documents,
            progress=progress or False,
            engine=chosen,
            checkpoint=checkpoint,
            **loading(options),
        )
    crossed = thresholds.crossings(found, conditions)
    with mentioned():
        report = found.save(options.out, partial=options.partial) if options.out else None
    if checkpoint is not None:
        checkpoint.remove()
    if (
        report is not None
        and options.partial is None
        and not (options.quiet or (report.parent / result.PARTIAL).exists())
    ):
        sentence = "would exceed 32 MB and was not written; massieu merge needs it: --partial"
        print(f"{result.PARTIAL} {sentence}", file=sys.stderr)
    if options.json:
        print(json.dumps(found.to_dict(), allow_nan=False))
    elif not options.quiet:
        from massieu.report.terminal import show_inspection, terminal

        show_inspection(found.to_dict(), terminal())
    if report is not None and not options.json:
        print(f"report: {visible(str(report))}")
    for sentence in crossed:
        print(f"massieu: {visible(sentence)}", file=sys.stderr)
    return 1 if crossed else 0


def _corpus(options: argparse.Namespace) -> Corpus:
    """Return the documents selected by the options."""
    from massieu.corpus import Corpus

    if options.text and options.dataset:
        raise UserError("text comes from --text or from --dataset, got both; choose one")
    column, subset = options.column or "text", {name: getattr(options, name) for name in ("limit", "sample", "seed")}
    if options.dataset:
        from massieu.corpus.hub import read_dataset

        rows, size = read_dataset(options.dataset, column=column), options.split_bytes
        return Corpus.from_texts(rows, options.dataset, strict=options.strict, shard_bytes=size, **subset)
    if options.text:
        corpus = Corpus(options.text, column, strict=options.strict, shard_bytes=options.split_bytes, **subset)
        if not options.column or any(file.format != "text" for file in corpus.files):
            return corpus
    if options.column:
        raise UserError("--column names a column of --dataset, .csv or .parquet or a field of .jsonl; leave it out")
    from massieu import assets

    return Corpus.from_texts(assets.documents(), "embedded text", **subset)


def _checkpoint(options: argparse.Namespace) -> Checkpoint | None:
    """Return the checkpoint of the run; None without --out and --checkpoint."""
    from massieu.engine import Checkpoint

    path = options.checkpoint or (Path(options.out) / CHECKPOINT if options.out else None)
    if path is None and options.resume:
        raise UserError("--resume goes on from a checkpoint, got no place; pass --out or --checkpoint as before")
    if options.out and path is not None and os.path.realpath(path) == os.path.realpath(options.out):
        raise UserError(f"--checkpoint must be a file, got the folder of --out; leave it out for {CHECKPOINT} in it")
    return None if path is None else Checkpoint(Path(path), options.resume, options.checkpoint_every)


def _rows(text: str) -> int | None:
    return None if text == "all" else positive(text)
