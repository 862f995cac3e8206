"""The command line: parse, call one function, print."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import inspect
import io
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import massieu

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[1]
INTERRUPTED = 130
CLOSED = 141  # as shells call a process that ended because nobody read on
NO_MEMORY = ("DefaultCPUAllocator", "not enough memory", "out of memory", "overflowed")  # as torch says it
PATIENCE = 10.0  # seconds between two lines on how far we are


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0 done, 1 a ``--fail-on`` condition holds or a verdict is not the expected one, 2 bad usage or bad input, 3
    attention that cannot be observed, 130 interrupted.
    """
    options = command_line().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a console may lack a sign that a sentence has
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("massieu: interrupted; nothing was written", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # who read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED
    except (ValueError, TypeError) as error:  # bad input, such as a kernel that does not exist
        if not _is_message(error):
            raise
        print(f"massieu: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if type(error).__name__ != "NotObservable":
            raise
        print(f"massieu: {error}", file=sys.stderr)
        return 3
    return code


class Parser(argparse.ArgumentParser):
    """A parser that answers bad usage with one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def command_line() -> Parser:
    """The parser of all commands; each sets ``run``, a function of the options that returns the exit code."""
    parser = Parser(prog="massieu", description="Softmax attention as an exponential family.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"massieu {massieu.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int], help: str) -> Parser:
        added: Parser = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
        added.add_argument("--json", action="store_true", help="print one JSON object")
        added.set_defaults(run=run)
        return added

    _add_inspect(command("inspect", run_inspect, "measure every attention head and layer of a transformer on a text"))

    compare = command("compare", run_compare, "show two or more inspections side by side")
    compare.add_argument("runs", nargs="+", metavar="RUN", help="folder that massieu inspect --out wrote")
    compare.add_argument("--out", metavar="DIR", help="write the page and the tables there")

    verify = command("verify", run_verify, "test every statement of the sources by an experiment with a control")
    verify.add_argument("keys", nargs="*", metavar="KEY", help="claims by key or glob, such as C14 or 'X*'; none: all")
    verify.add_argument("--list", action="store_true", help="show the claims and run nothing")
    verify.add_argument("--full", action="store_true", help="sizes as in the papers: half an hour instead of minutes")
    verify.add_argument("--seed", type=_seed, default=0, metavar="N", help="other random choices")
    verify.add_argument("--model", metavar="MODEL", help="for experiments on a trained model; none: the embedded one")
    verify.add_argument("--workers", type=_positive, metavar="N", help="processes; none: one per core")
    verify.add_argument("--out", metavar="DIR", help="write a page with figures and code, and JSON, there")
    verify.add_argument("-q", "--quiet", action="store_true", help="no progress and no table")

    watch = command("watch", run_watch, "show the log of a watched training run while it grows")
    watch.add_argument("log", metavar="LOG", help="the .jsonl or .csv file that massieu.watch(log=...) writes")
    watch.add_argument("--once", action="store_true", help="show it as it is now, and end")
    watch.add_argument("--html", metavar="PAGE", help="write a page with charts of every quantity there, and end")
    _add_learn(command("learn", run_learn, "train a small model to learn functions from the examples in its context"))

    doctor = command(
        "doctor", run_doctor, "say what is installed, which kernel is in use and what a model lets us hear"
    )
    doctor.add_argument("model", nargs="?", metavar="MODEL", help="folder, installed package or Hugging Face id")
    _add_loading(doctor)

    bench = command("bench", run_bench, "measure the ratios of benchmarks/ on this machine")
    names = "forward, forward_bfloat16, forward_grouped, forward_backward, retrieval, scale, memory, inspection, "
    words = f"some of {names}contrast, dynamics, learning, margin, patterns, watch; all of them when none is named"
    bench.add_argument("names", nargs="*", metavar="NAME", help=words)
    return parser


def _add_inspect(parser: Parser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="folder, installed package or Hugging Face id; none: the embedded model",
    )
    text = parser.add_argument_group("text")
    text.add_argument(
        "--text",
        action="extend",
        nargs="+",
        metavar="FILE",
        help="documents between blank lines, or one a line in .jsonl; - is standard input; none: the embedded text",
    )
    text.add_argument("--dataset", metavar="NAME[:CONFIG[:SPLIT]]", help="documents of a Hugging Face dataset")
    text.add_argument("--column", metavar="NAME", help="of a dataset or .jsonl, what holds the text; none: text")
    text.add_argument("--limit", type=_positive, metavar="N", help="use the first N documents")
    text.add_argument("--max-length", type=_positive, metavar="T", help="cut documents into passages of T tokens")
    text.add_argument("--special-tokens", action="store_true", help="count special tokens as well")
    how = parser.add_argument_group("how")
    how.add_argument("--batch-size", type=_positive, default=16, metavar="N", help="passages at once")
    how.add_argument("--rows", type=_rows, default=32, metavar="N|all", help="rows of a passage looked at whole")
    how.add_argument("--heads-only", action="store_true", help="statistics of attention alone: the fastest")
    _add_loading(parser)
    results = parser.add_argument_group("results")
    results.add_argument("--out", metavar="DIR", help="write report.html, tables, JSON and figures there")
    results.add_argument(
        "--fail-on",
        action="append",
        default=[],
        metavar="EXPR",
        help="such as 'entropy_min<0.1': exit code 1 if it holds",
    )
    results.add_argument("-q", "--quiet", action="store_true", help="no progress and no table")


def _add_learn(parser: Parser) -> None:
    parser.add_argument(
        "task", metavar="TASK", help="linear, sparse, ridge, quadratic, logistic, tree, network or sine"
    )
    parser.add_argument("--dim", type=_whole, default=5, metavar="D", help="of the inputs; none: 5")
    parser.add_argument("--noise", type=_number, metavar="S", help="standard deviation; none: 0.5 where there is noise")
    how = parser.add_argument_group("how")
    how.add_argument("--model", default="softmax", help="softmax (a transformer) or linear (one layer); none: softmax")
    how.add_argument("--layout", help="tokens of the transformer: pairs or interleaved; none: pairs")
    how.add_argument("--examples", type=_positive, metavar="N", help="before the last query; none: twice the dimension")
    how.add_argument("--pool", type=_positive, metavar="K", help="train on K functions only: retrieval or learning?")
    how.add_argument(
        "--steps",
        type=_positive,
        metavar="N",
        help="of the optimizer; none: 6000, four minutes, or 3000 of a linear layer",
    )
    how.add_argument("--seed", type=_seed, default=0, metavar="N", help="other weights and data; none: 0")
    how.add_argument(
        "--patience", type=_positive, metavar="N", help="stop after N measurements without a better one; none: never"
    )
    how.add_argument("--target", type=_number, metavar="ERROR", help="stop at this error; none: never")
    results = parser.add_argument_group("results")
    results.add_argument("--out", metavar="DIR", help="write checkpoint, history.csv, learned.json and a page there")
    results.add_argument(
        "--resume", action="store_true", help="go on from the checkpoint in --out, with the same options"
    )
    results.add_argument("--checkpoint-every", type=_positive, default=100, metavar="N", help="steps; none: 100")
    fitted = "tasks for Lasso, trees and networks, which are fitted to each prefix; 0 leaves them out; none: 256"
    results.add_argument("--fitted", type=_count, default=256, metavar="N", help=fitted)
    results.add_argument("--tensorboard", action="store_true", help="events for TensorBoard in --out")
    results.add_argument("-q", "--quiet", action="store_true", help="no progress and no table")


def _add_loading(parser: Parser) -> None:
    loading = parser.add_argument_group("model")
    loading.add_argument("--dtype", default="auto", help="auto (float32), float32, bfloat16, float16 or float64")
    loading.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps")
    loading.add_argument("--revision", help="branch, tag or commit of a Hugging Face id")
    loading.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    loading.add_argument("--offline", action="store_true", help="never ask the network")


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text}")
    return number


def _whole(text: str) -> int:
    if not text.removeprefix("-").isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text}")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text}") from None


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 0, got {text}")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"expected a whole number below {2**32}, got {text}")
    return int(text)


def _rows(text: str) -> int | None:
    return None if text == "all" else _positive(text)


def _loading(options: argparse.Namespace) -> dict[str, Any]:
    names = ("dtype", "device", "revision", "trust_remote_code", "offline")
    return {name: getattr(options, name) for name in names}


def run_inspect(options: argparse.Namespace) -> int:
    """Inspect a model, write and print what was found."""
    _need("transformers", "pandas", "rich")
    from massieu.inspection import inspect_model, result, texts, thresholds

    conditions = [thresholds.parse_threshold(expression) for expression in options.fail_on]
    if options.heads_only:
        thresholds.check_heads_only(conditions)
    if options.text and options.dataset:
        raise ValueError("text comes from --text or from --dataset, got both; choose one")
    if options.column and not options.dataset and not any(path.endswith(".jsonl") for path in options.text or ()):
        raise ValueError("--column names a column of --dataset or a field of .jsonl, got neither; leave it out")
    documents, source = None, None
    if options.text:
        documents = texts.read_documents(options.text, options.column or "text")
        source = ", ".join(Path(path).name for path in options.text)
    elif options.dataset:
        documents = texts.read_dataset(options.dataset, column=options.column or "text", limit=options.limit)
        source = options.dataset
    elif options.limit:
        from massieu import assets

        documents, source = assets.documents(), "embedded text"
    if options.out:
        result.check_writable(Path(options.out))
    with _progress(options.quiet or options.json) as progress:
        found = inspect_model(
            options.model,
            documents[: options.limit] if documents is not None else None,
            batch_size=options.batch_size,
            max_length=options.max_length,
            experiments="heads" if options.heads_only else "default",
            rows=options.rows,
            special_tokens=options.special_tokens,
            source=source,
            progress=progress,
            **_loading(options),
        )
    crossed = thresholds.crossings(found, conditions)
    report = found.save(options.out) if options.out else None
    if options.json:
        print(json.dumps(found.to_dict(), allow_nan=False))
    elif not options.quiet:
        from rich.console import Console

        from massieu.report.terminal import show_inspection

        show_inspection(found.to_dict(), Console())
    if report is not None and not options.json:
        print(f"report: {report}")
    elif not options.json and not options.quiet:
        print("pass --out DIR for the report, the tables and the figures")
    for sentence in crossed:
        print(f"massieu: {sentence}", file=sys.stderr)
    return 1 if crossed else 0


def run_compare(options: argparse.Namespace) -> int:
    """Show inspections side by side."""
    _need("pandas", "rich")
    from massieu.inspection import comparison, result

    if len(options.runs) < 2:
        raise ValueError(f"compare needs at least two inspections, got {len(options.runs)}; name another folder")
    inspections = [result.read_inspection(run) for run in options.runs]
    for run, inspection in zip(options.runs, inspections, strict=True):
        inspection.facts["run"] = Path(run).resolve().name
    means = comparison.compare_means(inspections)
    if options.out:
        page = comparison.save_comparison(inspections, Path(options.out))
    if options.json:
        tables = {"means": means, "heads": comparison.compare_heads(inspections)}
        found = {name: result.records(table) for name, table in tables.items()}
        print(json.dumps({**found, "notes": comparison.reservations(inspections)}))
        return 0
    from rich.console import Console

    from massieu.report.terminal import show_comparison

    show_comparison(result.records(means), Console())
    for sentence in comparison.reservations(inspections):
        print(sentence)
    print(f"page: {page}" if options.out else "pass --out DIR for the page and the tables")
    return 0


def run_verify(options: argparse.Namespace) -> int:
    """Run claims, write and print their verdicts; 1 if one is not the expected."""
    _need("transformers", "pandas", "rich", "scipy", extra="verify")
    from massieu import claims
    from massieu.inspection import result

    chosen = claims.select(options.keys)
    if options.list:
        return _list_claims(chosen, options.json)
    if options.model is not None and any(claim.on_model for claim in chosen):
        from massieu.inspection.loading import load

        load(options.model)  # what is wrong with it is one sentence now
    if options.out:
        result.check_writable(Path(options.out))
    begin = time.perf_counter()
    choices = {"seed": options.seed, "full": options.full, "model": options.model}
    with _progress(options.quiet or options.json, first="starting") as progress:
        found = claims.verify(chosen, **choices, workers=options.workers, progress=progress)
    facts = {"seconds": round(time.perf_counter() - begin, 1), **choices}
    page = None
    if options.out:
        from massieu.claims import publication

        page = publication.save(found, Path(options.out), facts)
    if options.json:
        print(json.dumps({"facts": facts, "claims": [each.to_dict() for each in found]}, allow_nan=False))
    elif not options.quiet:
        from rich.console import Console

        from massieu.report.terminal import show_verdicts

        show_verdicts([_verdict_row(each) for each in found], facts["seconds"], Console())
    if page is not None and not options.json:
        print(f"page: {page}")
    for each in found:
        if each.surprises or each.reason:
            wanted = f", expected {each.expected}" if each.surprises else ""
            reason = f" ({each.reason})" if each.reason else ""
            print(f"massieu: {each.claim.key} is {each.verdict}{wanted}{reason}", file=sys.stderr)
    return 1 if any(each.surprises for each in found) else 0


def run_learn(options: argparse.Namespace) -> int:
    """Train a model, write and print how it compares; an interrupted run can be resumed."""
    _need("pandas", "rich", "safetensors", "jinja2", "sklearn", extra="verify")
    from massieu.context.checkpoints import NAME

    if options.out == "":
        raise ValueError("--out must name a folder, got an empty name; . is the current folder")
    if options.out is None and (options.resume or options.tensorboard):
        raise ValueError("--resume and --tensorboard need the folder of the run, got none; pass --out DIR")
    try:
        return _learn(options)
    except KeyboardInterrupt:
        if options.out is None:
            raise
        there = (Path(options.out) / NAME).exists()
        how = "; the same command with --resume goes on from the checkpoint"
        print(f"massieu: interrupted{how if there else ' before the first checkpoint; start again'}", file=sys.stderr)
        return INTERRUPTED
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(word in str(error) for word in NO_MEMORY):
            raise
        asked = {name: getattr(options, name) for name in ("dim", "examples", "pool")}
        sizes = ", ".join(f"--{name} {value}" for name, value in asked.items() if value is not None)
        raise ValueError(f"there is not enough memory for {sizes}; lower them") from None


def _learn(options: argparse.Namespace) -> int:
    from massieu.context import checkpoints, learn

    names = ("model", "layout", "examples", "pool", "steps", "seed", "patience", "target", "out", "resume")
    choices = {name: getattr(options, name) for name in (*names, "checkpoint_every", "tensorboard", "fitted")}
    task = _task(options)
    with contextlib.ExitStack() as stack:
        shown: list[Callable[[str, int, int], object] | None] = []

        def progress(what: str, done: int, total: int) -> None:
            if not shown:  # only now: what is wrong with the input has been said before
                shown.append(stack.enter_context(_progress(options.quiet or options.json, first=what)))
            if shown[0] is not None:
                shown[0](what, done, total)

        found = learn(task, **choices, progress=progress)
    document = found.to_dict()
    page = None
    if options.out is not None:
        from massieu.report.learning import render_learning

        page = Path(options.out) / "learned.html"
        checkpoints.write_text(page.with_suffix(".json"), json.dumps(document, allow_nan=False, indent=1))
        checkpoints.write_text(page, render_learning(document))
    if options.json:
        print(json.dumps(document, allow_nan=False))
    elif not options.quiet:
        from rich.console import Console

        from massieu.report.terminal import show_learned

        show_learned(document, Console())
    if not options.json:
        print(f"page: {page}" if page else "pass --out DIR for checkpoints, the tables and the page")
    return 0


def _task(options: argparse.Namespace) -> Any:
    from massieu.context import task_named
    from massieu.context.tasks import TASKS

    setting: dict[str, Any] = {"dim": options.dim}
    if options.task in TASKS and "noise" in inspect.signature(TASKS[options.task]).parameters:
        setting["noise"] = 0.5 if options.noise is None else options.noise
    elif options.task in TASKS and options.noise is not None:
        raise ValueError(f"the noise of {options.task} is in its labels, got --noise {options.noise}; leave it out")
    return task_named(options.task, **setting)


def _verdict_row(found: Any) -> dict[str, Any]:
    decisive, evidence = found.decisive, found.evidence
    return {
        "claim": found.claim.key,
        "verdict": str(found.verdict),
        "expected": str(found.expected or "-"),
        "measured": None if decisive is None else decisive.measured,
        "allowed": None if decisive is None else decisive.allowed,
        "control": None if evidence is None else evidence.control.measured,
        "seconds": found.seconds,
        "statement": found.claim.statement,
        "reason": found.reason,
    }


def _list_claims(chosen: Sequence[Any], as_json: bool) -> int:
    names = ("key", "expected", "source", "statement")
    rows = [{name: str(getattr(each, name)) for name in names} for each in chosen]
    if as_json:
        print(json.dumps({"claims": rows}))
        return 0
    from rich.console import Console

    from massieu.report.terminal import show_claims

    show_claims(rows, Console())
    return 0


def run_watch(options: argparse.Namespace) -> int:
    """Show the log of a training run, once or while it grows."""
    _need("rich", "jinja2")
    from rich.console import Console

    from massieu.monitor.logs import read_log
    from massieu.report import watching

    log, console = read_log(options.log), Console()
    if options.html:
        watching.save_watch(log.to_dict(), Path(options.html))
    if options.json:
        print(json.dumps(log.to_dict(), allow_nan=False))
    elif options.html:
        print(f"page: {options.html}")
    elif options.once or not console.is_terminal:
        console.print(watching.terminal_view(log.to_dict(), width=console.width))
    else:
        watching.follow(log, console)
    return 0


def run_doctor(options: argparse.Namespace) -> int:
    """Print what is installed, and what would be heard of a model."""
    import numpy
    import torch

    from massieu import kernels

    facts: dict[str, Any] = {
        "massieu": massieu.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "threads": torch.get_num_threads(),
        "kernel": kernels.backend(),
        "reason": kernels.reason(),
    }
    code = 0
    if options.model:
        _need("transformers")
        from massieu.inspection.hearing import what_is_heard

        heard = what_is_heard(options.model, **_loading(options))
        facts |= heard
        code = 3 if heard["missing"] or not heard["modules"] else 0
    if options.json:
        print(json.dumps(facts))
    else:
        for name, fact in facts.items():
            lines = fact if isinstance(fact, list) else [fact]
            for i, line in enumerate(lines):
                print(f"{'' if i else name:<8} {line}")
    return code


def run_bench(options: argparse.Namespace) -> int:
    """Run the benchmarks of the repository that this package was imported from."""
    if not (ROOT / "benchmarks" / "__init__.py").exists():
        print(
            "massieu bench: the benchmarks are not part of the installed package;"
            " run it from a clone of the repository, installed with pip install -e .",
            file=sys.stderr,
        )
        return 2
    # First on the path: other distributions install a top-level package of the same name.
    sys.path.insert(0, str(ROOT))
    code: int | None = importlib.import_module("benchmarks").main(options.names, json=options.json)
    return code or 0


@contextlib.contextmanager
def _progress(quiet: bool, first: str = "loading") -> Iterator[Callable[[str, int, int], object] | None]:
    """A bar on stderr with the time that is left where somebody can see it, else a line for everything that begins."""
    if quiet:
        yield None
        return
    if not sys.stderr.isatty():
        begun, said = {first}, [time.perf_counter()]
        print(f"{first} ...", file=sys.stderr, flush=True)

        def tell(what: str, done: int, total: int) -> None:
            if what not in begun:
                begun.add(what)
                print(f"{what} ...", file=sys.stderr, flush=True)
            elif time.perf_counter() - said[-1] > PATIENCE:
                said.append(time.perf_counter())
                print(f"{what}: {done} of {total} ..." if total else f"{what} ...", file=sys.stderr, flush=True)

        yield tell
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(first, total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total or None)


def _need(*packages: str, extra: str = "inspect") -> None:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ValueError(f"this command needs {', '.join(missing)}, not installed; pip install 'massieu[{extra}]'")


def _is_message(error: Exception) -> bool:
    """Whether an error was raised by our own code as a sentence, and not somewhere inside."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and Path(__file__).parent in Path(trace.tb_frame.f_code.co_filename).parents
