"""Flags with hysteresis: a quantity crosses one threshold to raise a flag and has to come back over another."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Literal

from massieu.checks import UserError
from massieu.monitor.quantities import HEADS, WATCHED
from massieu.monitor.reading import Flag, Place, Reading, summary

__all__ = ["OF_ANY_PASS", "RULES", "Flags", "Rule", "worst"]


@dataclass(frozen=True)
class Rule:
    """When to raise a flag.

    Attributes:
        name: of the flag.
        quantity: which quantity of :data:`massieu.monitor.WATCHED` is compared.
        sign: "<" if small values are bad, ">" if large ones are.
        threshold: beyond this the flag is raised.
        back: beyond this, on the other side, it is cleared again.
        reason: what it means, without the figures.
        reference: who described it.
        each: whether every head is compared, or the median of the heads of a layer.
    """

    name: str
    quantity: str
    sign: Literal["<", ">"]
    threshold: float
    back: float
    reason: str
    reference: str
    each: Literal["head", "layer"] = "head"

    def __post_init__(self) -> None:
        if self.sign not in ("<", ">"):
            raise UserError(f'sign must be "<" or ">", got {self.sign!r}; "<" where small values are bad')
        if not isinstance(self.quantity, str) or self.quantity not in WATCHED:
            raise UserError(
                f"quantity must be one of {', '.join(WATCHED)}, got {self.quantity!r}; massieu.monitor.WATCHED explains"
                " them"
            )
        if self.each not in ("head", "layer"):
            raise UserError(f'each must be "head" or "layer", got {self.each!r}; "layer" compares the median head')
        for name, value in (("threshold", self.threshold), ("back", self.back)):
            if not isinstance(value, Real) or math.isnan(value):
                raise UserError(f"{name} must be a number, got {value!r}; infinity is never crossed")
        if self.crosses(self.back):
            raise UserError(
                f"back must lie on the good side of threshold, got {self.back:g} for {self.quantity} {self.sign}"
                f" {self.threshold:g}; equal values switch off the hysteresis"
            )

    def crosses(self, value: float) -> bool:
        """Whether a value raises the flag."""
        return value < self.threshold if self.sign == "<" else value > self.threshold

    def returns(self, value: float) -> bool:
        """Whether a value clears it."""
        return value >= self.back if self.sign == "<" else value <= self.back


RULES: tuple[Rule, ...] = (
    Rule(
        "not finite",
        "broken_rows",
        ">",
        1e-9,  # less than one row
        1e-10,
        "scores are nan or infinite, so the loss is no number either; the cause lies at an earlier step",
        "Micikevicius et al. 2018, arXiv 1710.03740, section 3.2",
    ),
    Rule(
        "entropy collapse",
        "normalized_entropy",
        "<",
        0.1,
        0.15,
        "most heads of the layer look at single tokens, which goes with loss spikes and divergence",
        "Zhai et al. 2023, arXiv 2303.06296",
        each="layer",
    ),
    Rule(
        "logit growth",
        "score_max",
        ">",
        100.0,
        80.0,
        "scores of this size saturate the softmax and strain half precision; where they kept growing, runs diverged",
        "Dehghani et al. 2023, arXiv 2302.05442; the bound is that of Kimi K2, arXiv 2507.20534",
    ),
    Rule(
        "rank collapse",
        "token_cosine",
        ">",
        # Healthy tokens share a direction, too: small models rest at 0.98 while they learn how often words occur, and
        # the last layer of GPT-2 is close to one (Ethayarajh 2019, arXiv 1909.00512), while tokens differ in many
        # directions. From here on they differ by 3% of their norm, where bfloat16 rounds to 0.4%.
        0.999,
        0.998,
        "the tokens of a sequence differ by less than 3% of their norm, so attention has next to nothing to tell apart",
        "Dong et al. 2021, arXiv 2103.03404",
        each="layer",
    ),
    Rule(
        "dead head",
        "output_share",
        "<",
        0.01,
        0.02,
        "the head adds next to nothing beside the others of its layer and could be removed",
        "Michel et al. 2019, arXiv 1905.10650",
    ),
    Rule(
        "duplicate head",
        "likeness",
        ">",
        0.98,
        0.95,
        "the head attends as another head of its layer does, so one of them is redundant",
        "Clark et al. 2019, arXiv 1906.04341, section 6",
    ),
)
"""What is flagged in training unless other rules are given."""

OF_ANY_PASS = tuple(rule for rule in RULES if rule.quantity == "broken_rows")
"""What is flagged outside training: one token at a time, a healthy model has sharp and similar heads."""

Key = tuple[str, str, int, int | None]


class Flags:
    """The flags that are raised now.

    Args:
        rules: when to raise one.
        computed: the quantities that readings will hold; a rule for another one is refused, one of :data:`RULES` left
            out.

    Attributes:
        rules: those that are followed.
        left_out: those that are not.

    Example:
        >>> flags = Flags(RULES)
        >>> place = Place("decoder", 0, "h.0.attn", heads=1)
        >>> for score in (50.0, 120.0, 90.0, 70.0):
        ...     reading = Reading(0, (place,), {"score_max": torch.tensor([[score]])})
        ...     print([flag.state for flag in flags.update(reading)], len(flags.active))
        [] 0
        ['raised'] 1
        [] 1
        ['cleared'] 0
    """

    def __init__(self, rules: Sequence[Rule] = RULES, computed: Collection[str] = frozenset(WATCHED)) -> None:
        given = _checked(rules)
        self.rules = tuple(rule for rule in given if rule.quantity in computed)
        self.left_out = tuple(rule for rule in given if rule.quantity not in computed)
        for rule in self.left_out:
            if rule not in RULES:
                raise UserError(
                    f"the rule {rule.name!r} compares {rule.quantity}, which is not computed; add it to quantities"
                )
        self._active: dict[Key, Flag] = {}

    @property
    def active(self) -> tuple[Flag, ...]:
        """The flags that are raised and not cleared, each as it was raised."""
        return tuple(self._active.values())

    def update(self, reading: Reading) -> tuple[Flag, ...]:
        """What a reading raises and clears; a value that is nan changes nothing."""
        changed = []
        labels = {
            (place.stack, place.layer): label for place, label in zip(reading.places, reading.labels, strict=True)
        }
        for rule in self.rules:
            for place, head, value in _values(rule, reading):
                key = (rule.name, place.stack, place.layer, head)
                if key not in self._active and rule.crosses(value):
                    self._active[key] = _flag(rule, place, labels[key[1:3]], head, value, "raised")
                    changed.append(self._active[key])
                elif key in self._active and rule.returns(value):
                    del self._active[key]
                    changed.append(_flag(rule, place, labels[key[1:3]], head, value, "cleared"))
        return tuple(changed)


def worst(reading: Reading, rules: Sequence[Rule] = RULES) -> dict[str, float]:
    """Over all layers, the value that is nearest to each flag: the smallest where small ones are bad, else the largest.

    Example:
        >>> place = Place("decoder", 0, "h.0.attn", heads=2)
        >>> worst(Reading(0, (place,), {"score_max": torch.tensor([[3.0, 7.0]])}))
        {'score_max/max': 7.0}
    """
    found = {}
    for rule in rules:
        known = [value for _, _, value in _values(rule, reading) if not math.isnan(value)]
        if known:
            name, choose = ("min", min) if rule.sign == "<" else ("max", max)
            found[f"{rule.quantity}/{name}"] = choose(known)
    return found


def _checked(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """The rules, if that is what they are."""
    several = isinstance(rules, Sequence) and not isinstance(rules, str)
    wrong = [type(rule).__name__ for rule in rules if not isinstance(rule, Rule)] if several else []
    if not several or wrong:
        got = f"a {type(rules).__name__} with {wrong[0]}" if wrong else type(rules).__name__
        raise UserError(
            f"rules must be a list of Rule, got {got}; massieu.monitor.RULES is what is flagged by default, [] flags"
            " nothing"
        )
    twice = [name for name, count in Counter(rule.name for rule in rules).items() if count > 1]
    if twice:
        raise UserError(f"rules must have names of their own, got {twice[0]!r} twice; a flag is known by its name")
    return tuple(rules)


def _values(rule: Rule, reading: Reading) -> Iterator[tuple[Place, int | None, float]]:
    for i, place in enumerate(reading.places):
        if rule.quantity in reading.layers:
            yield place, None, reading.layers[rule.quantity][i].item()
        elif rule.quantity in reading.heads:
            heads = reading.heads[rule.quantity][i, : place.heads]
            if rule.each == "head":
                yield from ((place, head, value) for head, value in enumerate(heads.tolist()))
            else:
                yield place, None, summary(heads.tolist())["median"]


def _flag(
    rule: Rule, place: Place, label: str, head: int | None, value: float, state: Literal["raised", "cleared"]
) -> Flag:
    median = "the median head of " if rule.each == "layer" and rule.quantity in HEADS else ""
    whose = f"{median}{label}" if head is None else f"head {head} of {label}"
    limit = rule.threshold if state == "raised" else rule.back
    side = {"raised": {"<": "below", ">": "above"}, "cleared": {"<": "above", ">": "below"}}[state][rule.sign]
    words = rule.quantity.replace("_", " ")
    figure = f"{whose} has {words} {value:.3g}, {side} {limit:g}"
    reason = f"{rule.reason} ({figure})" if state == "raised" else f"{figure} again"
    assert not math.isnan(value)
    return Flag(rule.name, place.stack, place.layer, head, value, limit, reason, rule.reference, state)
