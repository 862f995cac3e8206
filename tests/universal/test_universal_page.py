"""The page on universal approximation shows code that prints what it says, and names everything."""

import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
import massieu.universal

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "universal.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n((?:(?!```).)*)```", PAGE, flags=re.DOTALL)
SHOWN = re.findall(r"```python\n((?:(?!```).)*)```\n\n```text\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.parametrize(("block", "printed"), SHOWN, ids=["grid", "resolution", "memory", "strips"])
def test_the_examples_print_what_the_page_says(block, printed, capsys):
    exec(compile(block, "universal.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == printed


def test_every_block_is_followed_by_what_it_prints():
    assert [block for block, _ in SHOWN] == BLOCKS


def test_the_page_names_everything():
    assert [name for name in massieu.universal.__all__ if f"`{name}`" not in PAGE] == []
