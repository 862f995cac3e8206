"""The README shows code that runs and prints what it says."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
SHOWN = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize(("block", "printed"), SHOWN, ids=range(len(SHOWN)))
def test_a_block_prints_the_text_that_follows_it(block, printed, capsys):
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == printed


def test_every_python_block_is_followed_by_what_it_prints():
    assert [block for block, _ in SHOWN] == BLOCKS
    assert len(BLOCKS) == 3


def test_the_first_example_is_the_first_block_and_five_lines_long():
    assert (ROOT / "examples" / "first.py").read_text(encoding="utf-8") == BLOCKS[0]
    assert len([line for line in BLOCKS[0].splitlines() if line]) == 5
