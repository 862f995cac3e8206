"""Statements of the source documents with the claims or objects that cover them, or the reason why none can.

``python -m massieu.claims.statement_table`` prints the page of the documentation.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Statement", "markdown", "statements"]

FILE = Path(__file__).with_name("statements.csv")


@dataclass(frozen=True)
class Statement:
    """A statement of a source.

    Attributes:
        source: the document, one of :class:`massieu.claims.claim.Source`.
        place: section, equation or slide.
        statement: the statement, in our words.
        claims: keys of the claims that test it.
        objects: names in the library that stand for it or compute it, such as "massieu.attend".
        not_testable: the reason why no experiment can tell; empty otherwise.
    """

    source: str
    place: str
    statement: str
    claims: tuple[str, ...]
    objects: tuple[str, ...]
    not_testable: str

    @property
    def covered(self) -> str:
        """Claims, objects or the reason, as text of a table."""
        keys = ", ".join(self.claims)
        objects = ", ".join(f"`{name}`" for name in self.objects)
        reason = f"not testable: {self.not_testable}" if self.not_testable else ""
        return "; ".join(filter(None, (keys, objects, reason)))


def statements() -> list[Statement]:
    """Return all statements in the order of the documents.

    Example:
        >>> all(statement.covered for statement in statements())
        True
    """
    found = []
    with FILE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            claims, objects = (tuple(row[name].split()) for name in ("claims", "objects"))
            found.append(Statement(row["source"], row["place"], row["statement"], claims, objects, row["not_testable"]))
    return found


def markdown(rows: Sequence[Statement]) -> str:
    """Return the statements as a page of the documentation, a table for each document."""
    lines = [
        "# Statements of the sources",
        "",
        "Written by `python -m massieu.claims.statement_table`. Every statement of the paper and of the slides, with"
        " the [claims](claims.md) that test it, the object that is it, or the reason why no experiment can tell.",
    ]
    for source in dict.fromkeys(row.source for row in rows):
        own = [row for row in rows if row.source == source]
        tested = sum(bool(row.claims) for row in own)
        lines += ["", f"## {source}", "", f"{len(own)} statements, {tested} of them tested by claims.", ""]
        lines += ["| place | statement | covered by |", "|---|---|---|"]
        for row in own:
            cells = (row.place, row.statement, row.covered)
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(statements()), end="")
