"""The pages of the documentation are the ones that the claims make."""

import re
from pathlib import Path

from massieu.claims import all_claims
from massieu.claims.publication import described
from massieu.report.verdicts import VERDICTS

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, FULL, RATES = DOCS / "claims.md", DOCS / "claims-full.md", DOCS / "reliability.md"


def rows_of(page):
    """The cells of the rows of a page's tables."""
    lines = page.read_text(encoding="utf-8").splitlines()
    found = [line for line in lines if line.startswith("| ") and not line.startswith("| claim |")]
    return [re.split(r"(?<!\\\\) \| ", line.strip("| ")) for line in found]


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


def test_the_page_of_full_sizes_has_the_expected_verdict_of_every_claim():
    assert "make verify-full" in FULL.read_text(encoding="utf-8")
    expected = [(claim.key, claim.title.replace("|", "\\|"), VERDICTS[claim.expected]) for claim in all_claims()]
    assert [tuple(cells[:3]) for cells in rows_of(FULL)] == expected


def test_the_page_of_failure_rates_has_every_claim_at_both_sizes():
    rows = rows_of(RATES)
    keys = [claim.key for claim in all_claims()]
    assert [cells[0] for cells in rows] == keys * 2
    trials = [int(cells[2]) for cells in rows]
    assert min(trials[: len(keys)]) >= 20  # of quick sizes
    assert [cells[0] for cells in rows if int(cells[3]) > 0.01 * int(cells[2])] == []
