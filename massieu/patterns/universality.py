"""Theorems on universal approximation by attention with sparse patterns, and a test of their conditions."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from massieu.patterns.edges import Edges, union
from massieu.patterns.hamiltonian import HamiltonianPath, hamiltonian_path
from massieu.patterns.pattern import Pattern, Schedule, as_schedule
from massieu.patterns.probability_maps import MapCondition, ProbabilityMap, probability_condition
from massieu.patterns.reachability import Reach, reach

__all__ = ["Universality", "check_universality"]

YUN, STAR, NONE, UNKNOWN = "Yun 2020", "BigBird star", "none", "unknown"


@dataclass(frozen=True)
class Universality:
    """Conditions of the theorems on a schedule of patterns at one length; ``print`` shows all of them.

    Attributes:
        connections: of each pattern, self-loops included.
        self_loops: True if every token sees itself in every pattern (condition 1).
        chain: the path through all tokens in the union of the patterns, or the reason against one (condition 2).
        reach: layers until every token reaches every token (condition 3).
        probability_map: verdict on the map from scores to weights (assumption 2).
        hub: a token that sees all and is seen by all in every pattern; None without one.
    """

    name: str
    length: int
    connections: tuple[int, ...]
    self_loops: bool
    chain: HamiltonianPath
    reach: Reach
    probability_map: MapCondition
    hub: int | None

    @property
    def path(self) -> bool | None:
        """True if a path visits every token once, False if none does, None if unknown."""
        return self.chain.exists

    @property
    def certificate(self) -> tuple[int, ...] | None:
        """The tokens along that path, each seen by the next."""
        return self.chain.order

    @property
    def reach_layers(self) -> int | None:
        """Layers until every token reaches every token; None if never, or not found."""
        return self.reach.layers

    @property
    def theorems(self) -> tuple[str, ...]:
        """All theorems that apply."""
        shared = self.self_loops and self.probability_map.holds
        yun = shared and self.path is True and self.reach_layers is not None
        star = shared and self.hub is not None
        return tuple(name for name, applies in ((YUN, yun), (STAR, star)) if applies)

    @property
    def theorem(self) -> str:
        """The first that applies, ``"Yun 2020"`` or ``"BigBird star"``; ``"none"``; ``"unknown"`` if the path is."""
        if self.theorems:
            return self.theorems[0]
        rest = self.self_loops and self.probability_map.holds and self.reach_layers is not None
        return UNKNOWN if rest and self.path is None else NONE

    def as_dict(self) -> dict[str, Any]:
        """Return all values by name, as JSON types."""
        return {
            "name": self.name,
            "length": self.length,
            "connections": list(self.connections),
            "self_loops": self.self_loops,
            "path": self.path,
            "path_message": self.chain.message,
            "certificate": None if self.certificate is None else list(self.certificate),
            "reach_layers": self.reach_layers,
            "causal_reach_layers": self.reach.causal_layers,
            "reach_message": self.reach.message,
            "probability_map": self.probability_map.name,
            "probability_map_holds": self.probability_map.holds,
            "probability_map_message": self.probability_map.message,
            "hub": self.hub,
            "theorem": self.theorem,
            "theorems": list(self.theorems),
        }

    def __str__(self) -> str:
        counts = ", ".join(f"{count} ({count / self.length:.2f} T)" for count in self.connections)
        seen = "every token sees itself" if self.self_loops else "some token does not see itself"
        lines = [
            f"{self.name} on {self.length} tokens: {counts} connections",
            f"1 self-loops       {_answer(self.self_loops)}, {seen}",
            f"2 path in union    {_answer(self.path)}, {self.chain.message}",
            f"3 full reach       {_answer(self.reach_layers is not None)}, {self.reach.message}",
            f"  probability map  {_answer(self.probability_map.holds)}, {self.probability_map.message}",
            f"theorem            {_STATEMENTS[self.theorem]}",
        ]
        if self.theorem == YUN and STAR in self.theorems:
            lines.append(f"                   {_STATEMENTS[STAR]}")
        return "\n".join(lines)


_STATEMENTS = {
    YUN: ("Yun et al. 2020: with trainable positions, every continuous function on a compact set, in d_p for p < ∞"),
    STAR: "Zaheer et al. 2020: the pattern contains a star; its hub must be a token of its own",
    NONE: "neither of the two applies",
    UNKNOWN: "unknown: Yun et al. 2020 if there is a path",
}


def check_universality(
    schedule: Pattern | Schedule | Iterable[Pattern],
    length: int,
    *,
    probability_map: ProbabilityMap = "softmax",
    seed: int = 0,
) -> Universality:
    r"""Return which theorem on universal approximation applies to a schedule of sparse patterns.

    The conditions of Yun et al. on patterns :math:`A^1, \dots, A^p`, used by layers in turn: (1) every token sees
    itself in each; (2) the union has a path :math:`\gamma` through all tokens, :math:`\gamma(i) \in \bigcup_l
    A^l_{\gamma(i+1)}`; (3) after s layers every token reaches every token; and the map from scores to weights tends to
    hardmax as scores grow. The condition of Zaheer et al.: a token that sees all and is seen by all. Both theorems are
    sufficient only.

    Args:
        schedule: a pattern, a :class:`Schedule` or a list of patterns.
        length: number of tokens T.
        probability_map: see :func:`probability_condition`.
        seed: of random choices in the search for a path.

    Source:
        Yun et al. 2020, "O(n) connections are expressive enough", assumptions 1 and 2; Zaheer et al. 2020, "Big Bird",
        theorem 1.

    Example:
        >>> from massieu.patterns import star, star_ring
        >>> found = check_universality(star_ring(), 256)
        >>> found.connections, found.self_loops, found.path, found.reach_layers, found.theorem
        ((1276,), True, True, 2, 'Yun 2020')
        >>> print(check_universality(star(), 8))
        star on 8 tokens: 22 (2.75 T) connections
        1 self-loops       yes, every token sees itself
        2 path in union    no, all subsets of 8 tokens were searched
        3 full reach       yes, after 2 layers every token reaches every token
          probability map  yes, softmax tends to hardmax as scores grow
        theorem            Zaheer et al. 2020: the pattern contains a star; its hub must be a token of its own
    """
    schedule = as_schedule(schedule)
    edges = schedule.at(length)
    return Universality(
        name=repr(schedule),
        length=int(length),
        connections=tuple(each.connections for each in edges),
        self_loops=all(each.has_self_loops for each in edges),
        chain=hamiltonian_path(union(edges), seed=seed),
        reach=reach(schedule, length),
        probability_map=probability_condition(probability_map, length),
        hub=_hub(edges),
    )


def _hub(edges: Sequence[Edges]) -> int | None:
    """Return a token that sees all and is seen by all in every pattern, or None."""
    length, common = edges[0].length, functools.reduce(operator.and_, edges)
    hubs = np.flatnonzero(common.counts == length)
    tokens = np.arange(length)
    return next((int(hub) for hub in hubs if common.contains(tokens, np.full(length, hub)).all()), None)


def _answer(holds: bool | None) -> str:
    return {True: "yes", False: "no", None: "unknown"}[holds]
