"""Every statement of the sources is covered, by something that exists."""

import importlib
from pathlib import Path

import pytest

from massieu.claims import all_claims
from massieu.claims.claim import Source
from massieu.claims.statement_table import markdown, statements

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coverage.md"
CLAIMS = {claim.key: claim for claim in all_claims()}


def found(name: str) -> object:
    """An object of the library by its dotted name."""
    package, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(package), attribute)


@pytest.mark.parametrize("row", statements(), ids=lambda row: row.statement[:40])
def test_a_statement_is_covered_by_what_exists_or_says_why_not(row):
    assert row.source in (Source.PAPER, Source.SLIDES)
    assert row.place
    assert row.statement.endswith((".", "?"))
    assert row.covered
    assert [key for key in row.claims if key not in CLAIMS] == []
    for name in row.objects:
        assert found(name) is not None
    assert not (row.not_testable and row.claims)


def test_every_claim_on_the_paper_or_the_slides_tests_one_of_their_statements():
    covering = {key for row in statements() for key in row.claims}
    assert {key for key, claim in CLAIMS.items() if claim.source in (Source.PAPER, Source.SLIDES)} <= covering


def test_the_page_is_the_one_that_the_table_makes():
    assert PAGE.read_text(encoding="utf-8") == markdown(statements())
