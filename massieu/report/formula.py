"""Formulas in plain text set as HTML."""

from __future__ import annotations

import re
from html import escape

from markupsafe import Markup

__all__ = ["typeset"]

# A letter alone is a variable; "a" before a word is the article, and I a class or the identity: both upright.
_VARIABLE = re.compile(r"(?<![^\W_])([B-HJ-Zb-zα-ωΛ]\u0304?|[aA](?! [A-Za-z]{2}))(?![^\W\d_])")


def typeset(formula: str) -> Markup:
    """Set subscripts after ``_``, superscripts after ``^`` and single letters in italics; escape the rest.

    Example:
        >>> print(typeset("log Z = log Σ_j e^{s_j} < 1"))
        log <i>Z</i> = log Σ<sub><i>j</i></sub> <i>e</i><sup><i>s</i><sub><i>j</i></sub></sup> &lt; 1
    """
    pieces, end = [], 0
    for start, stop, sign, inside in _groups(formula):
        tag = "sub" if sign == "_" else "sup"
        pieces += [_slant(formula[end:start]), f"<{tag}>{typeset(inside)}</{tag}>"]
        end = stop
    return Markup("".join([*pieces, _slant(formula[end:])]))


def _groups(formula: str) -> list[tuple[int, int, str, str]]:
    """Return start, end, sign and content of every subscript and superscript of the outermost level."""
    found, place = [], 0
    while place < len(formula) - 1:
        if formula[place] not in "_^":
            place += 1
            continue
        stop = _closing(formula, place + 1) if formula[place + 1] == "{" else place + 1
        inside = formula[place + 2 : stop] if formula[place + 1] == "{" else formula[place + 1]
        found.append((place, stop + 1, formula[place], inside))
        place = stop + 1
    return found


def _closing(formula: str, opening: int) -> int:
    depth = 0
    for place in range(opening, len(formula)):
        depth += {"{": 1, "}": -1}.get(formula[place], 0)
        if depth == 0:
            return place
    return len(formula)


def _slant(text: str) -> str:
    pieces = _VARIABLE.split(text)
    return "".join(f"<i>{escape(piece)}</i>" if number % 2 else escape(piece) for number, piece in enumerate(pieces))
