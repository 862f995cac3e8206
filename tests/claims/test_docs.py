"""The page of the documentation is the one that the claims make."""

from pathlib import Path

from massieu.claims import all_claims
from massieu.report.verdicts import VERDICTS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "claims.md"


def test_the_page_lists_every_claim_with_its_statement_and_verdict():
    rows = [line.split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")][1:]
    listed = {row[0].removeprefix("| "): row for row in rows}
    assert list(listed) == [claim.key for claim in all_claims()]
    for claim in all_claims():
        text, verdict = listed[claim.key][1:3]
        remark = f" *{claim.correction}*" if claim.correction else ""
        assert text == f"{claim.statement}{remark}".replace("|", "\\|"), claim.key
        assert verdict == VERDICTS[claim.expected]
