"""The page on memories shows code that prints what it says, and names everything."""

import re
from pathlib import Path

import massieu.memory

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "memory.md").read_text(encoding="utf-8")


def test_the_example_prints_what_the_page_says(capsys):
    ((block, printed),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(compile(block, "memory.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == printed


def test_the_page_names_everything():
    assert [name for name in massieu.memory.__all__ if f"`{name}`" not in PAGE] == []
