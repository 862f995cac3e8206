"""The page of the documentation is the one that the claims make."""

import re
from pathlib import Path

from massieu.claims import all_claims
from massieu.claims.publication import described
from massieu.report.verdicts import VERDICTS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "claims.md"


def test_the_page_lists_every_claim_with_its_statement_verdict_and_experiment():
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")][1:]
    known = all_claims()
    assert len(rows) == len(known)
    for row, claim in zip(rows, known, strict=True):
        assert row.startswith(f"| {' | '.join([*described(claim), VERDICTS[claim.expected]])} | "), claim.key
        name, file = re.search(r"\[(\w+)\]\(([^)]+)\) \|$", row).groups()
        assert f"def {name}(" in (PAGE.parent / file).read_text(encoding="utf-8")
