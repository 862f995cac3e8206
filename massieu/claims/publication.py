"""Publication of verdicts: a page with plots and code, JSON, and the tables of the documentation."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import inspect
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from massieu.claims.claim import Claim
from massieu.claims.runner import Result, code_place, gap_values
from massieu.outputs.folders import publish
from massieu.report.verdicts import CONTROL, UNIT, VERDICTS, render_verdicts

__all__ = ["described", "full_markdown", "markdown", "save"]

COLUMNS = ("claim", "the source says", "tested", "place", "verdict", "measured", "control", "experiment")


def save(results: Sequence[Result], folder: Path, facts: dict[str, Any]) -> Path:
    """Write ``claims.html``, ``claims.json`` and ``claims.md``, all of them or none; return the path of the page."""
    facts = {**facts, **versions()}
    with publish(folder, "verification", facts.get("model") or "") as place:
        page = render_verdicts([_document(result) for result in results], facts)
        (place / "claims.html").write_text(page, encoding="utf-8")
        content = {"facts": facts, "claims": [result.to_dict() for result in results]}
        (place / "claims.json").write_text(json.dumps(content, allow_nan=False, indent=1), encoding="utf-8")
        table = full_markdown(results, facts) if facts.get("full") else markdown(results)
        (place / "claims.md").write_text(table, encoding="utf-8")
    return folder / "claims.html"


def markdown(results: Sequence[Result]) -> str:
    """Return the claims as a page of the documentation: a table for each subject, with links to their experiments."""
    lines = [
        "# Claims",
        "",
        f"Written by `massieu verify --out DIR`. {UNIT} {CONTROL} It is the same measurement with one thing changed, so"
        " that it must break. In italics: the condition, the correction, or what is true instead."
        " [All statements of the sources](coverage.md) lists what has no claim and why.",
    ]
    subjects: dict[str, list[Result]] = {}
    for result in results:
        subjects.setdefault(result.claim.run.__module__.rpartition(".")[0], []).append(result)
    for subject, own in subjects.items():
        lines += ["", f"## {_heading(subject)}", "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
        for result in own:
            control = None if result.evidence is None else result.evidence.gaps["control"]
            cells = [*described(result.claim), VERDICTS[result.verdict], _share(result.decisive), _share(control)]
            lines.append(f"| {' | '.join([*cells, _link(result.claim)])} |")
    return "\n".join(lines) + "\n"


def full_markdown(results: Sequence[Result], facts: Mapping[str, Any]) -> str:
    """Return the verdicts at full size as a page of the documentation."""
    lines = [
        "# Claims at full size",
        "",
        f"Written by `make verify-full` with the seed {facts.get('seed')} in {facts.get('seconds')} seconds."
        f" {UNIT} {CONTROL} [The other table](claims.md) says what each claim says and tests.",
        "",
        "| claim | statement | verdict | measured | control | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        control = None if result.evidence is None else result.evidence.gaps["control"]
        title = result.claim.title.replace("|", "\\|")
        numbers = [_share(result.decisive), _share(control), f"{result.seconds:.1f}"]
        lines.append(f"| {' | '.join([result.claim.key, title, VERDICTS[result.verdict], *numbers])} |")
    return "\n".join(lines) + "\n"


def described(claim: Claim) -> list[str]:
    """Return key, statement, tested reading with its reference, and place, as cells of a table."""
    formula = f" `{claim.formula}`" if claim.formula else ""
    remark = f" *{claim.correction}*" if claim.correction else ""
    said = f"{claim.wording}{formula}{remark}"
    tested = f"{claim.reading} Compared with {claim.reference}."
    return [cell.replace("|", "\\|") for cell in (claim.key, said, tested, f"{claim.source}, {claim.place}")]


def _heading(subject: str) -> str:
    return (importlib.import_module(subject).__doc__ or subject).strip().rstrip(".")


def _link(claim: Claim) -> str:
    file, _ = code_place(claim.run)
    return f"[{claim.run.__name__}](../{file})"


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that compute."""
    found = {}
    for name in ("massieu", "torch", "transformers", "scipy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return {**found, "python": platform.python_version()}


def _document(result: Result) -> dict[str, Any]:
    curve = None if result.evidence is None else result.evidence.curve
    more = {"decisive": gap_values(result.decisive), "listing": inspect.getsource(result.claim.run)}
    return {**result.to_dict(), **more, "curve": None if curve is None else asdict(curve)}


def _share(gap: Any) -> str:
    return "–" if gap is None else f"{gap.share:.2g}"
