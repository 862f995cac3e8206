"""Runner of claims: a few trials of each side by side, the worst gap of them, errors reported as undecided."""

from __future__ import annotations

import functools
import inspect
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from massieu.checks import UserError
from massieu.claims.claim import Claim, Evidence, Gap, Trial, Verdict, judge, worst
from massieu.claims.registry import all_claims

if TYPE_CHECKING:
    from massieu.engine import Engine

__all__ = ["Result", "Results", "code_place", "examine", "gap_values", "verify"]

ROOT = Path(__file__).resolve().parents[2]
Row = tuple[Any, ...]  # a key and the fields of a result but its claim, to be sent between processes


@dataclass(frozen=True, repr=False)
class Result:
    """Result of a claim.

    Attributes:
        claim: the claim.
        verdict: the verdict on the evidence.
        expected: the expected verdict; None for an experiment on a model of the user.
        evidence: the worst of all trials; None if the experiment raised.
        seconds: wall time of all trials.
        reason: the reason why the verdict is undecided; empty otherwise.
    """

    claim: Claim
    verdict: Verdict
    expected: Verdict | None
    evidence: Evidence | None
    seconds: float
    reason: str = ""

    @property
    def decisive(self) -> Gap | None:
        """The gap that decided the verdict."""
        names = {Verdict.HOLDS_CORRECTED: "corrected", Verdict.CONDITIONAL: "conditional"}
        return None if self.evidence is None else self.evidence.gaps[names.get(self.verdict, "printed")]

    @property
    def surprises(self) -> bool:
        """True if the verdict is not the expected one."""
        return self.expected is not None and self.verdict is not self.expected

    def __repr__(self) -> str:
        expected = "" if self.expected is None else f", expected {self.expected}" if self.surprises else ", as expected"
        reason = f" ({self.reason})" if self.reason else ""
        return f"{self.claim.key}: {self.verdict}{expected}{reason}: {self.claim.wording}"

    def to_dict(self) -> dict[str, Any]:
        """Return the result as ``massieu verify --json`` prints it."""
        claim, evidence = self.claim, self.evidence
        gaps = {} if evidence is None else evidence.gaps
        words = ("key", "source", "place", "title", "wording", "reading", "reference", "formula", "correction")
        file, line = code_place(claim.run)
        return {
            **{name: str(getattr(claim, name)) for name in words},
            "verdict": str(self.verdict),
            "expected": None if self.expected is None else str(self.expected),
            **{
                name: gap_values(gaps.get(name))
                for name in ("printed", "control", "corrected", "conditional", "instead")
            },
            "table": {} if evidence is None else {name: _finite(value) for name, value in evidence.table.items()},
            "seconds": round(self.seconds, 3),
            "reason": self.reason,
            "code": f"{file}:{line}",
        }


class Results(list[Result]):
    """List of results: a line each when printed, a table in a notebook."""

    def __repr__(self) -> str:
        return "\n".join(map(repr, self))

    def _repr_html_(self) -> str:
        import pandas

        names = ("key", "wording", "source", "verdict", "expected", "reason")
        rows = [{name: result.to_dict()[name] for name in names} for result in self]
        with pandas.option_context("display.max_colwidth", None):
            shown: str = pandas.DataFrame(rows, columns=names).fillna("").to_html(index=False, border=0)
        return shown


def gap_values(gap: Gap | None) -> dict[str, float | None] | None:
    """Return a gap as plain values, with its share of the bound; None for values that are not finite."""
    parts = ("measured", "allowed", "share")
    return None if gap is None else {part: _finite(getattr(gap, part)) for part in parts}


def examine(
    claim: Claim, *, seed: int = 0, full: bool = False, model: str | None = None, harmless: bool = False
) -> Result:
    """Run one claim in this process; with ``harmless`` its control is the real case, so that it is undecided."""
    begin = time.perf_counter()
    expected = _expected(claim, model)
    try:
        trials = (Trial(1000 * seed + number, full, model, harmless) for number in range(claim.trials))
        evidence = worst(claim.run(trial) for trial in trials)
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return Result(claim, Verdict.UNDECIDED, expected, None, time.perf_counter() - begin, reason)
    verdict = judge(evidence)
    reason = _doubt(evidence) if verdict is Verdict.UNDECIDED else ""
    return Result(claim, verdict, expected, evidence, time.perf_counter() - begin, reason)


def verify(
    claims: Sequence[Claim] | None = None,
    *,
    seed: int = 0,
    full: bool = False,
    model: str | None = None,
    workers: int | None = None,
    engine: Engine | None = None,
    progress: Callable[[str, int, int], object] | None = None,
) -> Results:
    """Run claims side by side, each in one thread, and return their results in the order of the claims.

    Args:
        claims: some of :func:`all_claims`; None for all.
        seed: other random choices, same verdicts.
        full: sizes as in the papers instead of quick ones.
        model: for the experiments on a trained model; None for the embedded one.
        workers: processes; None for one per core.
        engine: such as :class:`massieu.engine.Dask`, to run registered claims on its workers.
        progress: called with the name of the phase, the claims done and their number.

    Example:
        >>> massieu.claims.verify(massieu.claims.select(["C14"]), workers=1)[0].verdict
        <Verdict.FAILS: 'FAILS'>
    """
    claims = all_claims() if claims is None else list(claims)
    prints = None
    if engine is not None and model is not None:
        from massieu.models.origin import Origin

        model = Origin.of(model, {}).name  # the whole path of a folder: workers have other working folders
        prints = _fingerprints(model) if any(claim.on_model for claim in claims) else None
    options: dict[str, Any] = {"seed": seed, "full": full, "model": model}
    by_key = {claim.key: claim for claim in claims}
    # Experiments on a model share measurements, so they run one after the other in one process.
    groups = [[key for key, claim in by_key.items() if claim.on_model]]
    groups = [group for group in [*groups, *([key] for key, claim in by_key.items() if not claim.on_model)] if group]
    registered = _registered()
    known = all(registered.get(key) == claim for key, claim in by_key.items())
    workers = min(workers or os.cpu_count() or 1, len(groups))
    if engine is not None and known:
        rows = _on_engine(engine, groups, options, prints)
    elif workers > 1 and known:  # other processes have the registered claims only
        rows = _in_processes(groups, options, workers)
    else:
        rows = (_row(examine(by_key[key], **options)) for group in groups for key in group)
    found: dict[str, Result] = {}
    for key, *rest in rows:
        found[key] = Result(by_key[key], *rest)
        if progress is not None:
            progress("verifying", len(found), len(claims))
    return Results(found[claim.key] for claim in claims)


def _on_engine(
    engine: Engine, groups: list[list[str]], options: dict[str, Any], prints: tuple[str, str | None] | None
) -> Iterator[Row]:
    """Yield the rows of groups that run on an engine; members of a group whose worker ended run once more, alone."""
    task = functools.partial(_examine_on_worker, options=options, prints=prints)
    again: list[list[str]] = []
    for rows in engine.map(task, groups, lost=again.append):
        yield from rows or ()
    for keys in again:
        (rows,) = engine.map(task, [keys], lost=functools.partial(_lost_rows, options=options))
        yield from rows


def _in_processes(groups: list[list[str]], options: dict[str, Any], workers: int) -> Iterator[Row]:
    """Yield rows as they come; groups whose process ended run once more, one at a time."""
    waiting, again = list(groups), False
    while waiting:
        broken = []
        context = get_context("spawn")
        with ProcessPoolExecutor(1 if again else workers, mp_context=context, initializer=_use_one_thread) as pool:
            jobs = {pool.submit(_examine_keys, group, options): group for group in waiting}
            try:
                for job in as_completed(jobs):
                    try:
                        rows = job.result()
                    except BrokenProcessPool:
                        broken.append(jobs[job])
                        continue
                    yield from rows
            except BaseException:
                for process in list((pool._processes or {}).values()):
                    process.terminate()  # otherwise leaving would wait for their experiments
                raise
        if again and broken:
            # One at a time, in order: the first of them ended its process.
            first, *broken = sorted(broken, key=waiting.index)
            yield from _lost_rows(first, options)
        waiting, again = broken, True


def _examine_keys(keys: list[str], options: dict[str, Any]) -> list[Row]:
    """Examine registered claims in a worker; only keys travel, because experiments are functions of modules."""
    return [_row(examine(_registered()[key], **options)) for key in keys]


def _examine_on_worker(keys: list[str], options: dict[str, Any], prints: tuple[str, str | None] | None) -> list[Row]:
    """Examine claims in a worker of an engine, whose model must have these fingerprints."""
    _use_one_thread()
    name = options["model"]
    if prints is not None and any(_registered()[key].on_model for key in keys) and _fingerprints(name) != prints:
        raise UserError(
            f"the worker {platform.node()} must have the same model as this process, but its {name} has other"
            " weights or another tokenizer; give all machines the same files and the same versions"
        )
    return _examine_keys(keys, options)


def _lost_rows(keys: list[str], options: dict[str, Any]) -> list[Row]:
    """Return undecided rows for claims that ended every process they ran in."""
    reason = "the process that ran it ended; was memory short?"
    claims = [_registered()[key] for key in keys]
    return [
        _row(Result(claim, Verdict.UNDECIDED, _expected(claim, options["model"]), None, 0.0, reason))
        for claim in claims
    ]


def _expected(claim: Claim, model: str | None) -> Verdict | None:
    return None if model is not None and claim.on_model else claim.expected


def _row(result: Result) -> Row:
    return result.claim.key, result.verdict, result.expected, result.evidence, result.seconds, result.reason


def _fingerprints(model: str | None) -> tuple[str, str | None]:
    """Return those of a model and of its tokenizer."""
    from massieu.models.fingerprint import model_fingerprint, tokenizer_fingerprint
    from massieu.models.loading import load

    loaded = load(str(model))
    return model_fingerprint(loaded.model), tokenizer_fingerprint(loaded.tokenizer)


def _registered() -> dict[str, Claim]:
    return {claim.key: claim for claim in all_claims()}


def _use_one_thread() -> None:
    import torch

    torch.set_num_threads(1)  # workers share the cores


def _doubt(evidence: Evidence) -> str:
    """Return the reason why evidence is undecided."""
    gaps = evidence.gaps
    strange = [name for name, gap in gaps.items() if not all(map(math.isfinite, gap))]
    if strange:
        return f"not a finite number: {', '.join(strange)}"
    if gaps["control"].within:
        return f"the control did not break: {gaps['control'].share:.3g} of what is allowed"
    return f"what is true instead did not come out: {gaps['instead'].share:.3g} of what is allowed"


def code_place(run: Callable[..., Any]) -> tuple[str, int]:
    """Return the file of an experiment, relative to the repository, and its line."""
    file = Path(inspect.getsourcefile(run) or "")
    short = file.relative_to(ROOT) if file.is_relative_to(ROOT) else Path(file.name)
    return short.as_posix(), inspect.getsourcelines(run)[1]


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
