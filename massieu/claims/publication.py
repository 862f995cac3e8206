"""Verdicts for readers: a page with figures and code, JSON, and the table of the documentation."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from massieu.claims.claim import Claim
from massieu.claims.verification import Result, figures_of
from massieu.inspection.publishing import written_together
from massieu.report.verdicts import VERDICTS, render_verdicts

__all__ = ["described", "markdown", "save"]


def save(results: Sequence[Result], folder: Path, facts: dict[str, Any]) -> Path:
    """Write ``claims.html``, ``claims.json`` and ``claims.md``, all of them or none. Returns the path of the page."""
    facts = {**facts, **versions()}
    with written_together(folder, "verification", facts.get("model") or "") as place:
        page = render_verdicts([_document(result) for result in results], facts)
        (place / "claims.html").write_text(page, encoding="utf-8")
        content = {"facts": facts, "claims": [result.to_dict() for result in results]}
        (place / "claims.json").write_text(json.dumps(content, allow_nan=False, indent=1), encoding="utf-8")
        (place / "claims.md").write_text(markdown(results), encoding="utf-8")
    return folder / "claims.html"


def markdown(results: Sequence[Result]) -> str:
    """The claims as a page of the documentation, with links to their experiments."""
    lines = [
        "# Claims",
        "",
        "Written by `massieu verify --out DIR`. Measured is the gap that decides the verdict, in units of what is"
        " allowed; the control is the same measurement with one thing changed, so that it must break, in units of the"
        " same bound. In italics: the condition, the correction, or what is true instead. Of the ledger's rows, C43 is"
        " a definition and C49 cannot be tested here.",
        "",
        "| claim | statement | place | verdict | measured | control | experiment |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        control = None if result.evidence is None else result.evidence.gaps["control"]
        cells = [*described(result.claim), VERDICTS[result.verdict], _share(result.decisive), _share(control)]
        lines.append(f"| {' | '.join([*cells, _link(result.claim)])} |")
    return "\n".join(lines) + "\n"


def described(claim: Claim) -> list[str]:
    """Key, statement with formula and remark, and place, as cells of a table."""
    formula = f" `{claim.formula}`" if claim.formula else ""
    remark = f" *{claim.correction}*" if claim.correction else ""
    statement = f"{claim.statement}{formula}{remark}"
    return [cell.replace("|", "\\|") for cell in (claim.key, statement, claim.source)]


def _link(claim: Claim) -> str:
    file = Path(inspect.getsourcefile(claim.run) or "").name
    return f"[{claim.run.__name__}](../massieu/claims/{file})"


def versions() -> dict[str, str]:
    """What the figures were computed with."""
    names = ("massieu", "torch", "transformers", "scipy")
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {**found, "python": platform.python_version()}


def _document(result: Result) -> dict[str, Any]:
    curve = None if result.evidence is None else result.evidence.curve
    more = {"decisive": figures_of(result.decisive), "listing": inspect.getsource(result.claim.run)}
    return {**result.to_dict(), **more, "curve": None if curve is None else asdict(curve)}


def _share(gap: Any) -> str:
    return "–" if gap is None else f"{gap.share:.2g}"
