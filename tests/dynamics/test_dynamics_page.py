"""The page on dynamics shows code that prints what it says, and names every function."""

import re
from pathlib import Path

import massieu.dynamics

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "dynamics.md").read_text(encoding="utf-8")


def test_the_example_prints_what_the_page_says(capsys):
    ((block, printed),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(compile(block, "dynamics.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == printed


def test_the_page_names_everything():
    names = [*massieu.dynamics.__all__, *massieu.dynamics.OBSERVABLES, *massieu.dynamics.CONTRACTIONS]
    assert [name for name in names if f"`{name}`" not in PAGE] == []
