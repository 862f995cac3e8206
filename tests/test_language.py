"""Words: one vocabulary and one spelling in code, docs and pages; docstrings begin with a noun or an imperative."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WRITTEN = [
    path
    for folder, ending in (
        ("massieu", "*.py"),
        ("massieu/report", "*.html"),
        ("massieu/report", "*.js"),
        ("docs", "*.md"),
    )
    for path in sorted((ROOT / folder).rglob(ending))
] + [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
OPENERS = {"What", "How", "Whether", "Where", "Who", "Which", "Why", "When", "That"}
HEARING = re.compile(r"\b(un)?(hear|hears|heard|hearing|ears?|listens?|listening|listened|deaf)\b", re.IGNORECASE)
BRITISH = re.compile(
    r"\b\w*(colour|neighbour|behaviour|favour|centre[ds]?\b|licence|fulfil\b|towards\b|misspelt|catalogue|artefact"
    r"|(normal|minim|maxim|real|initial|regular|recogn|quant|material|general|linear|optim|factor|symmetr|parametr"
    r"|character|organ|summar|local|serial|vector|random|token)is(e|ed|er|es|ing|ation)\b)",
    re.IGNORECASE,
)


def opener(text: str) -> str | None:
    """The first word of a docstring if it is an indirect question."""
    first = text.split()[0].rstrip(".,:;") if text.split() else ""
    return first if first in OPENERS else None


def documented(tree: ast.Module) -> list[tuple[int, str]]:
    """Docstrings of a module with their lines."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    return [(getattr(node, "lineno", 1), text) for node in nodes if (text := ast.get_docstring(node))]


def test_docstrings_begin_with_a_noun_or_an_imperative():
    found = [
        f"{path.relative_to(ROOT)}:{line} {text.splitlines()[0]}"
        for path in WRITTEN
        if path.suffix == ".py"
        for line, text in documented(ast.parse(path.read_text(encoding="utf-8")))
        if opener(text)
    ]
    assert found == []


@pytest.mark.parametrize("pattern", [HEARING, BRITISH], ids=["observed", "American"])
def test_one_word_for_one_thing_in_one_spelling(pattern):
    found = [
        f"{path.relative_to(ROOT)}:{number} {match.group(0)}"
        for path in WRITTEN
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (match := pattern.search(line))
    ]
    assert found == []


def test_words_that_are_not_ours_are_seen():
    assert opener("What takes readings.") == "What"
    assert opener("Destination for readings.") is None
    assert HEARING.search("heard 5 of 5")
    assert not HEARING.search("nearest heart")
    assert BRITISH.search("normalised colours")
    assert not BRITISH.search("equally precise, a wise promise, raised")
