"""A statement of a source, the evidence of its experiment, and the verdict on it."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import torch

__all__ = ["Claim", "Curve", "Evidence", "Gap", "Source", "Trial", "Verdict", "judge", "worst"]

Case = TypeVar("Case")


class Source(enum.StrEnum):
    """Documents that claims quote, by the names that tables and pages show."""

    PAPER = "A Probabilistic Interpretation of Transformers"
    SLIDES = "A perspective on the fundamentals of transformers (slides)"
    OURS = "Massieu"  # statements of this project
    AHN = "Ahn et al. 2023"
    AMIT = "Amit et al. 1985"
    CASTIN = "Castin et al. 2024"
    DEMIRCIGIL = "Demircigil et al. 2017"
    DONG = "Dong et al. 2021"
    GARG = "Garg et al. 2022"
    GESHKOVSKI = "Geshkovski et al. 2023"
    GESHKOVSKI_2024 = "Geshkovski et al. 2024"
    KAJITSUKA = "Kajitsuka and Sato 2023"
    KROTOV = "Krotov and Hopfield 2016"
    LUCIBELLO = "Lucibello and Mézard 2024"
    MCELIECE = "McEliece et al. 1987"
    MILLIDGE = "Millidge et al. 2022"
    OSWALD = "von Oswald et al. 2022"
    RAMSAUER = "Ramsauer et al. 2020"
    RAN_MILO = "Ran-Milo 2026"
    RAVENTOS = "Raventós et al. 2023"
    SANDER = "Sander et al. 2022"
    SANTOS = "Santos et al. 2024"
    SOHN = "Sohn 2016"
    TARZANAGH = "Tarzanagh et al. 2023"
    THRAMPOULIDIS = "Thrampoulidis 2024"
    VASUDEVA = "Vasudeva et al. 2024"
    VELICKOVIC = "Veličković et al. 2024"
    XIE = "Xie et al. 2022"
    YUN_2019 = "Yun et al. 2019"
    YUN_2020 = "Yun et al. 2020"
    ZAHEER = "Zaheer et al. 2020"
    ZHAI = "Zhai et al. 2023"
    ZHANG = "Zhang et al. 2023"


class Verdict(enum.StrEnum):
    """Outcome of an experiment on a statement."""

    HOLDS = "HOLDS"
    HOLDS_CORRECTED = "HOLDS_CORRECTED"
    CONDITIONAL = "CONDITIONAL"
    FAILS = "FAILS"
    UNDECIDED = "UNDECIDED"


class Gap(NamedTuple):
    """Distance of a measurement from a statement, and the bound on it."""

    measured: float
    allowed: float

    @property
    def share(self) -> float:
        """The gap in units of the bound; infinite if it is not a number."""
        share = self.measured / self.allowed if self.allowed > 0 else math.inf if self.measured > 0 else 0.0
        return math.inf if math.isnan(share) else share

    @property
    def within(self) -> bool:
        """True if the gap is no larger than its bound."""
        return self.share <= 1


@dataclass(frozen=True)
class Curve:
    """Measurements along one axis, for a plot."""

    x: Sequence[float]
    series: dict[str, Sequence[float]]
    x_label: str = ""
    y_label: str = ""
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Evidence:
    """Measurements of an experiment; :func:`judge` turns them into a verdict.

    Attributes:
        printed: the statement as the source prints it.
        control: the same measurement in a case where the statement must break.
        corrected: the statement after the correction.
        conditional: the statement under the stated condition, which ``printed`` lacks.
        instead: the true statement in the place of a false one; out of bounds, it leaves the verdict undecided.
        table: values beside the gaps, by name.
        curve: the plot.
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
    """Return the verdict on evidence.

    It is undecided if the control does not break, ``instead`` is out of bounds, or a value is not finite.

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
    """Merge the evidence of several trials: the largest gaps, and the control that broke least."""
    trials = list(trials)
    gaps = {name: _worst([trial.gaps[name] for trial in trials], name == "control") for name in trials[0].gaps}
    return replace(trials[0], **gaps)  # type: ignore[arg-type]


def _worst(gaps: list[Gap], control: bool) -> Gap:
    strange = [gap for gap in gaps if not all(map(math.isfinite, gap))]
    return strange[0] if strange else (min if control else max)(gaps, key=lambda gap: gap.share)


@dataclass(frozen=True)
class Trial:
    """Circumstances of one run of an experiment.

    Attributes:
        seed: seed of every random choice.
        full: sizes as in the papers instead of quick ones.
        model: argument of :func:`massieu.inspect_model`; None for the embedded model.
        harmless: the control is the real case; it cannot break, so the verdict must be undecided.
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
        """Return one of two sizes."""
        return full if self.full else quick

    def control(self, broken: Case, real: Case) -> Case:
        """Return the ingredient that breaks the control; the real one in a harmless trial."""
        return real if self.harmless else broken


@dataclass(frozen=True)
class Claim:
    """A statement of a source with its experiment.

    Attributes:
        key: such as "C14".
        source: the document, one of :class:`Source`.
        place: section, equation or slide of the document.
        title: the statement in at most 60 characters, for tables.
        wording: the statement of the source, in our words and no stronger than there.
        reading: the statement that the experiment tests, with its sizes; "our reading" where it says more than the
            wording.
        reference: the independent computation or result with which the experiment compares.
        formula: the statement as plain text, as in :mod:`massieu.inspection.quantities`.
        correction: the condition or the correction; empty if the statement holds as it stands.
        expected: the verdict that our mathematics gives.
        run: the experiment.
        trials: number of runs, each with its own seed; the worst counts.
        on_model: True if it measures a trained model; ``expected`` is then the verdict on the embedded one.
        slow: True if it trains models for many seconds; tests run it with one seed.
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
    slow: bool = False
