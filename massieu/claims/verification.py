"""Run claims side by side: every one in a few trials, the worst gap kept, an error reported and not raised."""

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

__all__ = ["Result", "Results", "examine", "figures_of", "place_of", "verify"]

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, repr=False)
class Result:
    """What a claim came to.

    Attributes:
        claim: the claim.
        verdict: what the evidence says.
        expected: what it should say; None for an experiment on a model of the user's.
        evidence: the worst of all trials; None if the experiment raised.
        seconds: wall time of all trials.
        reason: why the verdict is undecided; empty otherwise.
    """

    claim: Claim
    verdict: Verdict
    expected: Verdict | None
    evidence: Evidence | None
    seconds: float
    reason: str = ""

    @property
    def decisive(self) -> Gap | None:
        """The gap that the verdict rests on."""
        names = {Verdict.HOLDS_CORRECTED: "corrected", Verdict.CONDITIONAL: "conditional"}
        return None if self.evidence is None else self.evidence.gaps[names.get(self.verdict, "printed")]

    @property
    def surprises(self) -> bool:
        """Whether the verdict is not the expected one."""
        return self.expected is not None and self.verdict is not self.expected

    def __repr__(self) -> str:
        expected = "" if self.expected is None else f", expected {self.expected}" if self.surprises else ", as expected"
        reason = f" ({self.reason})" if self.reason else ""
        return f"{self.claim.key}: {self.verdict}{expected}{reason}: {self.claim.wording}"

    def to_dict(self) -> dict[str, Any]:
        """As ``massieu verify --json`` prints it."""
        claim, evidence = self.claim, self.evidence
        gaps = {} if evidence is None else evidence.gaps
        names = ("printed", "control", "corrected", "conditional", "instead")
        figures = {name: figures_of(gaps.get(name)) for name in names}
        file, line = place_of(claim.run)
        return {
            "key": claim.key,
            "source": claim.source,
            "place": claim.place,
            "title": claim.title,
            "wording": claim.wording,
            "reading": claim.reading,
            "reference": claim.reference,
            "formula": claim.formula,
            "correction": claim.correction,
            "verdict": str(self.verdict),
            "expected": None if self.expected is None else str(self.expected),
            **figures,
            "table": {} if evidence is None else {name: _finite(value) for name, value in evidence.table.items()},
            "seconds": round(self.seconds, 3),
            "reason": self.reason,
            "code": f"{file}:{line}",
        }


class Results(list[Result]):
    """Results that print a line each, and are a table in a notebook."""

    def __repr__(self) -> str:
        return "\n".join(map(repr, self))

    def _repr_html_(self) -> str:
        import pandas

        names = ("key", "wording", "source", "verdict", "expected", "reason")
        rows = [{name: result.to_dict()[name] for name in names} for result in self]
        with pandas.option_context("display.max_colwidth", None):
            shown: str = pandas.DataFrame(rows, columns=names).fillna("").to_html(index=False, border=0)
        return shown


def figures_of(gap: Gap | None) -> dict[str, float | None] | None:
    """A gap as plain values, with its share of what is allowed; what is not finite is None."""
    parts = ("measured", "allowed", "share")
    return None if gap is None else {part: _finite(getattr(gap, part)) for part in parts}


def examine(
    claim: Claim, *, seed: int = 0, full: bool = False, model: str | None = None, harmless: bool = False
) -> Result:
    """Run one claim here; with ``harmless`` its control is the real case, which must leave it undecided."""
    begin = time.perf_counter()
    expected = None if model is not None and claim.on_model else claim.expected
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
        engine: such as :class:`massieu.engine.Dask`, whose workers run the claims instead; they must be registered.
        progress: called with what is being done, how much of it is done, and of how much.

    Example:
        >>> massieu.claims.verify(massieu.claims.select(["C14"]), workers=1)[0].verdict
        <Verdict.FAILS: 'FAILS'>
    """
    claims = all_claims() if claims is None else list(claims)
    prints = None
    if engine is not None and model is not None:
        from massieu.models.origin import Origin

        model = Origin.of(model, {}).name  # a folder by its whole path: others work elsewhere
        prints = _prints(model) if any(claim.on_model for claim in claims) else None
    options: dict[str, Any] = {"seed": seed, "full": full, "model": model}
    # Experiments on a model share what they measured, so they run one after the other in one process.
    parts = [[claim] for claim in claims if not claim.on_model]
    together = [claim for claim in claims if claim.on_model]
    parts = [together, *parts] if together else parts
    known = all(_registered().get(claim.key) == claim for claim in claims)
    workers = min(workers or os.cpu_count() or 1, len(parts))
    found: dict[str, Result] = {}

    def done(results: list[Result]) -> None:
        for result in results:
            found[result.claim.key] = result
            if progress is not None:
                progress("verifying", len(found), len(claims))

    if engine is not None and known:
        task = functools.partial(_examine_elsewhere, options=options, prints=prints)
        waiting = [[claim.key for claim in part] for part in parts]
        again: list[list[str]] = []
        for rows in engine.map(task, waiting, lost=again.append):
            done([Result(_registered()[key], *rest) for key, *rest in rows or ()])
        # What was beside one that ended its worker may be lost with it: each is tried once more, alone.
        for keys in again:
            (rows,) = engine.map(task, [keys], lost=functools.partial(_rows_lost, options=options))
            done([Result(_registered()[key], *rest) for key, *rest in rows])
    elif workers > 1 and known:  # other processes know the registered claims only
        for results in _side_by_side(parts, options, workers):
            done(results)
    else:
        for claim in (claim for part in parts for claim in part):
            done([examine(claim, **options)])
    return Results(found[claim.key] for claim in claims)


def _side_by_side(parts: Sequence[Sequence[Claim]], options: dict[str, Any], workers: int) -> Iterator[list[Result]]:
    """Results as they come. Where a process ends, what it worked on is tried once more, alone, and the rest goes on."""
    waiting, again = list(parts), False
    while waiting:
        broken = []
        with ProcessPoolExecutor(1 if again else workers, mp_context=get_context("spawn"), initializer=_alone) as pool:
            jobs = {pool.submit(_examine_keys, [claim.key for claim in part], options): part for part in waiting}
            try:
                for job in as_completed(jobs):
                    try:
                        rows = job.result()
                    except BrokenProcessPool:
                        broken.append(jobs[job])
                        continue
                    by_key = {claim.key: claim for claim in jobs[job]}
                    yield [Result(by_key[key], *rest) for key, *rest in rows]
            except BaseException:
                for process in list((pool._processes or {}).values()):
                    process.terminate()  # otherwise leaving would wait for what they work on
                raise
        if again and broken:
            # One at a time, in order: the first of them is the one that ended its process.
            first, *broken = sorted(broken, key=waiting.index)
            yield [_lost(claim, options) for claim in first]
        waiting, again = broken, True


def _lost(claim: Claim, options: dict[str, Any]) -> Result:
    expected = None if options["model"] is not None and claim.on_model else claim.expected
    return Result(claim, Verdict.UNDECIDED, expected, None, 0.0, "the process that ran it ended; was memory short?")


def _examine_keys(keys: list[str], options: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What a worker does; experiments are functions of modules, so only their keys travel."""
    return [_row(examine(_registered()[key], **options)) for key in keys]


def _examine_elsewhere(
    keys: list[str], options: dict[str, Any], prints: tuple[str, str | None] | None
) -> list[tuple[Any, ...]]:
    """The same in a process that was not begun for it, whose model must be the one with these fingerprints."""
    _alone()
    name = options["model"]
    if prints is not None and any(_registered()[key].on_model for key in keys) and _prints(name) != prints:
        raise UserError(
            f"the worker {platform.node()} must have the model of the process that asks it, but its {name} has other"
            " weights or another tokenizer; give all machines the same files and the same versions"
        )
    return _examine_keys(keys, options)


def _rows_lost(keys: list[str], options: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What to say of claims that end every worker that takes them."""
    return [_row(_lost(_registered()[key], options)) for key in keys]


def _row(result: Result) -> tuple[Any, ...]:
    return result.claim.key, result.verdict, result.expected, result.evidence, result.seconds, result.reason


def _prints(model: str | None) -> tuple[str, str | None]:
    """Of a model and its tokenizer."""
    from massieu.models.fingerprint import model_fingerprint, tokenizer_fingerprint
    from massieu.models.loading import load

    loaded = load(str(model))
    return model_fingerprint(loaded.model), tokenizer_fingerprint(loaded.tokenizer)


def _registered() -> dict[str, Claim]:
    return {claim.key: claim for claim in all_claims()}


def _alone() -> None:
    """One thread for each worker: they share the cores."""
    import torch

    torch.set_num_threads(1)


def _doubt(evidence: Evidence) -> str:
    """Why evidence cannot tell."""
    gaps = evidence.gaps
    strange = [name for name, gap in gaps.items() if not all(map(math.isfinite, gap))]
    if strange:
        return f"not a finite number: {', '.join(strange)}"
    name, words = "instead", "what is true instead did not come out"
    if gaps["control"].within:
        name, words = "control", "the control did not break"
    return f"{words}: {gaps[name].share:.3g} of what is allowed"


def place_of(run: Callable[..., Any]) -> tuple[str, int]:
    """File, relative to the repository, and line of an experiment."""
    file = Path(inspect.getsourcefile(run) or "")
    short = file.relative_to(ROOT) if file.is_relative_to(ROOT) else Path(file.name)
    return short.as_posix(), inspect.getsourcelines(run)[1]


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
