"""The page of the documentation is the one that the claims make."""

import re
from pathlib import Path

from massieu.claims import all_claims
from massieu.claims.publication import described
from massieu.report.verdicts import VERDICTS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "claims.md"


def test_the_page_lists_every_claim_with_its_statement_verdict_and_experiment():
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| claim |")]
    by_key = {claim.key: claim for claim in all_claims()}
    known = [by_key.pop(row.split(" | ")[0][2:]) for row in rows]
    assert by_key == {}
    for row, claim in zip(rows, known, strict=True):
        assert row.startswith(f"| {' | '.join([*described(claim), VERDICTS[claim.expected]])} | "), claim.key
        name, file = re.search(r"\[(\w+)\]\(([^)]+)\) \|$", row).groups()
        assert f"def {name}(" in (PAGE.parent / file).read_text(encoding="utf-8")
