"""A statement of a source, the evidence of an experiment, and the one place where a number meets a bound."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple, TypeVar

import torch

__all__ = ["Claim", "Curve", "Evidence", "Gap", "Trial", "Verdict", "judge", "worst"]


Case = TypeVar("Case")


class Verdict(enum.StrEnum):
    """What an experiment says about a statement."""

    HOLDS = "HOLDS"
    HOLDS_CORRECTED = "HOLDS_CORRECTED"
    CONDITIONAL = "CONDITIONAL"
    FAILS = "FAILS"
    UNDECIDED = "UNDECIDED"


class Gap(NamedTuple):
    """How far a measurement is from what a statement says, and how far it may be."""

    measured: float
    allowed: float

    @property
    def share(self) -> float:
        """The gap in units of what is allowed; infinite if it is not a number."""
        share = self.measured / self.allowed if self.allowed > 0 else math.inf if self.measured > 0 else 0.0
        return math.inf if math.isnan(share) else share

    @property
    def within(self) -> bool:
        """Whether it is no larger than allowed."""
        return self.share <= 1


@dataclass(frozen=True)
class Curve:
    """What an experiment saw along one axis, for its figure."""

    x: Sequence[float]
    series: dict[str, Sequence[float]]
    x_label: str = ""
    y_label: str = ""
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Evidence:
    """What an experiment measured; it never says pass.

    Attributes:
        printed: the statement as the source prints it.
        control: the same measurement in a case where the statement must break.
        corrected: the statement after the correction.
        conditional: the statement under the stated condition, which ``printed`` lacks.
        instead: what is true in the place of a false statement; if it is out of bounds, the experiment cannot tell.
        table: figures beside the gaps, by name.
        curve: for the figure.
    """

    printed: Gap
    control: Gap
    corrected: Gap | None = None
    conditional: Gap | None = None
    instead: Gap | None = None
    table: dict[str, float] = field(default_factory=dict)
    curve: Curve | None = None

    @property
    def gaps(self) -> dict[str, Gap]:
        """The gaps that were measured, by name."""
        named = {name: getattr(self, name) for name in ("printed", "corrected", "conditional", "instead", "control")}
        return {name: Gap(*gap) for name, gap in named.items() if gap is not None}


def judge(evidence: Evidence) -> Verdict:
    """The verdict on evidence.

    A control that does not break, a true statement that does not come out, or a figure that is not finite: the
    experiment cannot tell.

    Example:
        >>> judge(Evidence(printed=Gap(0.3, 1e-9), corrected=Gap(1e-12, 1e-9), control=Gap(0.5, 1e-9)))
        <Verdict.HOLDS_CORRECTED: 'HOLDS_CORRECTED'>
        >>> judge(Evidence(printed=Gap(1e-12, 1e-9), control=Gap(1e-12, 1e-9)))
        <Verdict.UNDECIDED: 'UNDECIDED'>
    """
    gaps = evidence.gaps
    finite = all(math.isfinite(number) for gap in gaps.values() for number in gap)
    if not finite or gaps["control"].within or ("instead" in gaps and not gaps["instead"].within):
        return Verdict.UNDECIDED
    for name, verdict in (
        ("printed", Verdict.HOLDS),
        ("corrected", Verdict.HOLDS_CORRECTED),
        ("conditional", Verdict.CONDITIONAL),
    ):
        if name in gaps and gaps[name].within:
            return verdict
    return Verdict.FAILS


def worst(trials: Iterable[Evidence]) -> Evidence:
    """The evidence of several trials as one: the largest gaps, and the control that broke least."""
    trials = list(trials)
    first = trials[0]
    gaps = {name: _worst([trial.gaps[name] for trial in trials], name == "control") for name in first.gaps}
    others = {part.name: getattr(first, part.name) for part in fields(first) if part.name not in first.gaps}
    return Evidence(**{**others, **gaps})


def _worst(gaps: list[Gap], control: bool) -> Gap:
    strange = [gap for gap in gaps if not all(map(math.isfinite, gap))]
    return strange[0] if strange else (min if control else max)(gaps, key=lambda gap: gap.share)


@dataclass(frozen=True)
class Trial:
    """The circumstances of one run of an experiment.

    Attributes:
        seed: decides every random choice.
        full: sizes as in the papers; otherwise as small as still tells.
        model: what :func:`massieu.inspect_model` takes; None for the embedded model.
        harmless: the control is the real case, so that it cannot break: no verdict may come of it.
    """

    seed: int = 0
    full: bool = False
    model: str | None = None
    harmless: bool = False

    @functools.cached_property
    def generator(self) -> torch.Generator:
        """The generator of this trial."""
        return torch.Generator().manual_seed(self.seed)

    def size(self, quick: int, full: int) -> int:
        """One of two sizes."""
        return full if self.full else quick

    def control(self, broken: Case, real: Case) -> Case:
        """The ingredient that makes the control break; the real one in a trial that is harmless."""
        return real if self.harmless else broken


@dataclass(frozen=True)
class Claim:
    """A statement of a source with its experiment.

    Attributes:
        key: such as "C14".
        source: the document, one of :mod:`massieu.claims.sources`.
        place: where in the document.
        title: the statement in at most 60 characters, for tables.
        wording: the statement of the source, in our words and no stronger than there.
        reading: the statement that the experiment tests, with its sizes; "our reading" where it says more than the
            wording.
        reference: the independent computation or result with which the experiment compares.
        formula: the statement as plain text, as in :mod:`massieu.inspection.quantities`.
        correction: the condition or the correction; empty if the statement holds as it stands.
        expected: the verdict that our mathematics gives.
        run: the experiment.
        trials: number of runs, each with a seed of its own; the worst counts.
        on_model: whether it measures a trained model; then ``expected`` is that of the embedded one.
    """

    key: str
    source: str
    place: str
    title: str
    wording: str
    reading: str
    reference: str
    formula: str
    correction: str
    expected: Verdict
    run: Callable[[Trial], Evidence]
    trials: int = 3
    on_model: bool = False
