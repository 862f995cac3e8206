"""``massieu learn``: train a small model to learn functions from the examples in its context."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

from massieu.checks import UserError, visible
from massieu.commands import Command, check_packages
from massieu.commands.arguments import add_results, count, number, positive, seed, whole
from massieu.commands.interrupts import INTERRUPTED, interruptible
from massieu.outputs.progress import Progress, command_progress

__all__ = ["add", "run"]

NO_MEMORY = ("DefaultCPUAllocator", "not enough memory", "out of memory", "overflowed")  # in messages of torch


def add(command: Command) -> None:
    """Declare the arguments."""
    parser = command("learn", run, "train a small model to learn functions from the examples in its context")
    parser.add_argument(
        "task", metavar="TASK", help="linear, sparse, ridge, quadratic, logistic, tree, network or sine"
    )
    parser.add_argument("--dim", type=whole, default=5, metavar="D", help="dimension of the inputs (default: 5)")
    parser.add_argument(
        "--noise", type=number, metavar="S", help="standard deviation (default: 0.5 where there is noise)"
    )
    how = parser.add_argument_group("method")
    how.add_argument(
        "--model", default="softmax", help="softmax (a transformer) or linear (one layer) (default: softmax)"
    )
    how.add_argument("--layout", help="tokens of the transformer: pairs or interleaved (default: pairs)")
    how.add_argument(
        "--examples",
        type=positive,
        metavar="N",
        help="number of examples before the last query (default: twice the dimension)",
    )
    how.add_argument(
        "--pool",
        type=positive,
        metavar="K",
        help="train on K functions only, to tell retrieval from learning (default: new ones at every step)",
    )
    how.add_argument(
        "--steps",
        type=positive,
        metavar="N",
        help="steps of the optimizer (default: 9000, a minute or two; 3000 for a linear layer)",
    )
    how.add_argument("--seed", type=seed, default=0, metavar="N", help="seed of weights and data (default: 0)")
    how.add_argument(
        "--patience", type=positive, metavar="N", help="stop after N measurements without a better one (default: never)"
    )
    how.add_argument("--target", type=number, metavar="ERROR", help="stop at this error (default: never)")
    results = parser.add_argument_group("results")
    add_results(results, "checkpoint, history.csv, learned.json and a page")
    results.add_argument(
        "--resume", action="store_true", help="continue from the checkpoint in --out, with the same options"
    )
    results.add_argument("--checkpoint-every", type=positive, default=100, metavar="N", help="steps (default: 100)")
    fitted = "tasks for Lasso, trees and networks, which are fitted to each prefix; 0 leaves them out (default: 256)"
    results.add_argument("--fitted", type=count, default=256, metavar="N", help=fitted)
    results.add_argument("--tensorboard", action="store_true", help="events for TensorBoard in --out")


def run(options: argparse.Namespace) -> int:
    """Train a model, write and print how it compares; an interrupted run can be resumed."""
    check_packages("pandas", "rich", "safetensors", "jinja2", "sklearn", extra="verify")
    from massieu.context.training_files import NAME

    if options.out is None and (options.resume or options.tensorboard):
        raise UserError("--resume and --tensorboard need the folder of the run, got none; pass --out DIR")
    try:
        with interruptible():
            return _learn(options)
    except KeyboardInterrupt:
        if options.out is None:
            raise
        there = (Path(options.out) / NAME).exists()
        remedy = "; the same command with --resume goes on from the checkpoint"
        print(
            f"massieu: interrupted{remedy if there else ' before the first checkpoint; start again'}", file=sys.stderr
        )
        return INTERRUPTED
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(word in str(error) for word in NO_MEMORY):
            raise
        sizes = {name: getattr(options, name) for name in ("dim", "examples", "pool")}
        given = ", ".join(f"--{name} {value}" for name, value in sizes.items() if value is not None)
        raise UserError(f"there is not enough memory for {given}; lower them") from None


def _learn(options: argparse.Namespace) -> int:
    from massieu.context import LearningRecipe, learn, training_files

    task = _task(options)
    names = ("model", "layout", "examples", "pool", "steps", "seed", "patience", "target")
    recipe = LearningRecipe(**{name: getattr(options, name) for name in names})
    files = ("out", "resume", "checkpoint_every", "tensorboard", "fitted")
    choices = {name: getattr(options, name) for name in files}
    with contextlib.ExitStack() as stack:
        shown: list[Progress | None] = []

        def progress(task: str, done: int, total: int) -> None:
            if not shown:  # not earlier: errors of the input come first
                shown.append(stack.enter_context(command_progress(options.quiet or options.json, first=task)))
            if shown[0] is not None:
                shown[0](task, done, total)

        found = learn(task, recipe, **choices, progress=progress)
    document = found.to_dict()
    page = None
    if options.out is not None:
        from massieu.report.learning_page import render_learning

        page = Path(options.out) / "learned.html"
        training_files.write_text(page.with_suffix(".json"), json.dumps(document, allow_nan=False, indent=1))
        training_files.write_text(page, render_learning(document))
    if options.json:
        print(json.dumps(document, allow_nan=False))
    elif not options.quiet:
        from massieu.report.terminal import show_learned, terminal

        show_learned(document, terminal())
    if not options.json:
        print(f"page: {visible(str(page))}" if page else "pass --out DIR for checkpoints, the tables and the page")
    return 0


def _task(options: argparse.Namespace) -> Any:
    from massieu.context import task_named
    from massieu.context.tasks import TASKS

    setting: dict[str, Any] = {"dim": options.dim}
    if options.task in TASKS and "noise" in inspect.signature(TASKS[options.task]).parameters:
        setting["noise"] = 0.5 if options.noise is None else options.noise
    elif options.task in TASKS and options.noise is not None:
        raise UserError(f"the noise of {options.task} is in its labels, got --noise {options.noise}; leave it out")
    return task_named(options.task, **setting)
