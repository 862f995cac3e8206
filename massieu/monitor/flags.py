"""Flags with hysteresis: a quantity crosses one threshold to raise a flag and another one to clear it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Literal

from massieu.checks import UserError, check_choice
from massieu.monitor.quantities import HEADS, WATCHED
from massieu.monitor.reading import Flag, Place, Reading, summary

__all__ = ["EVALUATION_RULES", "RULES", "Flags", "Rule", "nearest_to_flags"]


@dataclass(frozen=True)
class Rule:
    """Condition that raises a flag.

    Attributes:
        name: name of the flag.
        quantity: compared quantity, one of :data:`massieu.monitor.WATCHED`.
        sign: "<" if small values are bad, ">" if large ones are.
        threshold: limit beyond which the flag is raised.
        back: limit on the good side beyond which it is cleared.
        reason: its meaning, without values.
        reference: source that describes it.
        each: "head" compares every head, "layer" the median head of each layer.
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
        check_choice(self.sign, "sign", ("<", ">"))
        check_choice(self.quantity, "quantity", WATCHED)
        check_choice(self.each, "each", ("head", "layer"))
        for name, value in (("threshold", self.threshold), ("back", self.back)):
            if not isinstance(value, Real) or math.isnan(value):
                raise UserError(f"{name} must be a number, got {value!r}; infinity is never crossed")
        if self.crosses(self.back):
            raise UserError(
                f"back must lie on the good side of threshold, got {self.back:g} for {self.quantity} {self.sign}"
                f" {self.threshold:g}; equal values switch off the hysteresis"
            )

    def crosses(self, value: float) -> bool:
        """Return whether a value raises the flag."""
        return value < self.threshold if self.sign == "<" else value > self.threshold

    def returns(self, value: float) -> bool:
        """Return whether a value clears the flag."""
        return value >= self.back if self.sign == "<" else value <= self.back


RULES: tuple[Rule, ...] = (
    Rule(
        "not finite",
        "broken_rows",
        ">",
        1e-9,  # less than one row
        1e-10,
        "scores are nan or infinite, and so is the loss; the cause lies at an earlier step",
        "Micikevicius et al. 2018, arXiv 1710.03740, section 3.2",
    ),
    Rule(
        "entropy collapse",
        "normalized_entropy",
        "<",
        0.1,
        0.15,
        "most heads of the layer attend to single tokens, which goes with loss spikes and divergence",
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
        # Healthy tokens share a direction, too: small models rest at 0.98 while they learn the frequencies of words,
        # and the last layer of GPT-2 is close to one (Ethayarajh 2019, arXiv 1909.00512), while tokens differ in many
        # directions. Beyond this value they differ by 3% of their norm, and bfloat16 rounds to 0.4%.
        0.999,
        0.998,
        "the tokens of a sequence differ by less than 3% of their norm, so attention can hardly distinguish them",
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
        "the head attends like another head of its layer, so one of them is redundant",
        "Clark et al. 2019, arXiv 1906.04341, section 6",
    ),
)
"""Rules for training, unless others are given."""

EVALUATION_RULES = tuple(rule for rule in RULES if rule.quantity == "broken_rows")
"""Rules outside training: one token at a time, a healthy model has sharp and similar heads."""

Key = tuple[str, str, int, int | None]


class Flags:
    """Currently raised flags.

    Args:
        rules: rules of the flags.
        computed: quantities of the readings; a rule for another one is refused, but one of :data:`RULES` is left out.

    Attributes:
        rules: rules in use.
        left_out: rules without their quantity.

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
        given = _check_rules(rules)
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
        """Flags raised and not cleared, each as it was raised."""
        return tuple(self._active.values())

    def update(self, reading: Reading) -> tuple[Flag, ...]:
        """Return the flags that a reading raises and clears; nan changes nothing."""
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


def nearest_to_flags(reading: Reading, rules: Sequence[Rule] = RULES) -> dict[str, float]:
    """Return the value nearest to each flag over all layers: the smallest where small ones are bad, else the largest.

    Example:
        >>> place = Place("decoder", 0, "h.0.attn", heads=2)
        >>> nearest_to_flags(Reading(0, (place,), {"score_max": torch.tensor([[3.0, 7.0]])}))
        {'score_max/max': 7.0}
    """
    found = {}
    for rule in rules:
        known = [value for _, _, value in _values(rule, reading) if not math.isnan(value)]
        if known:
            name, choose = ("min", min) if rule.sign == "<" else ("max", max)
            found[f"{rule.quantity}/{name}"] = choose(known)
    return found


def _check_rules(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    several = isinstance(rules, Sequence) and not isinstance(rules, str)
    wrong = [type(rule).__name__ for rule in rules if not isinstance(rule, Rule)] if several else []
    if not several or wrong:
        got = f"a {type(rules).__name__} with {wrong[0]}" if wrong else type(rules).__name__
        raise UserError(
            f"rules must be a list of Rule, got {got}; massieu.monitor.RULES are the default, [] flags nothing"
        )
    twice = [name for name, count in Counter(rule.name for rule in rules).items() if count > 1]
    if twice:
        raise UserError(f"rules must have different names, got {twice[0]!r} twice; rename one of them")
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
    evidence = f"{whose} has {words} {value:.3g}, {side} {limit:g}"
    reason = f"{rule.reason} ({evidence})" if state == "raised" else f"{evidence} again"
    assert not math.isnan(value)
    return Flag(rule.name, place.stack, place.layer, head, value, limit, reason, rule.reference, state)
