"""The page on memories shows code that prints what it says, and names everything."""

import inspect
import re
from pathlib import Path

import pytest

import massieu.memory
import massieu.nn

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "memory.md").read_text(encoding="utf-8")


EXAMPLES = re.findall(r"```python\n((?:(?!```).)*)```\n\n```text\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.parametrize(("block", "printed"), EXAMPLES, ids=["kinds", "cues", "file", "capacity"])
def test_the_examples_print_what_the_page_says(block, printed, capsys):
    exec(compile(block, "memory.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("name", ["energy_landscape", "retrieved_images", "capacity_curve", "overlap_transition"])
def test_every_figure_can_be_drawn_as_the_page_says(name, tmp_path, monkeypatch):
    (block,) = [
        each for each in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL) if f"import {name}\n" in each
    ]
    if "sklearn" in block:
        pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "memory.md", "exec"), {"__name__": "__main__"})
    (picture,) = tmp_path.glob("*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_page_names_everything():
    assert [name for name in massieu.memory.__all__ if f"`{name}`" not in PAGE] == []


def test_the_page_compares_every_argument_of_the_layers_and_no_other():
    layers = (massieu.nn.Hopfield, massieu.nn.HopfieldPooling, massieu.nn.HopfieldLayer)
    ours = {name for layer in layers for name in inspect.signature(layer).parameters} - {"options"}
    table = PAGE[PAGE.index("| original argument | ours |") :].split("\n\n")[0]
    first, second = zip(*(line.split(" | ", 1) for line in table.splitlines()[2:]), strict=True)
    theirs = set(re.findall(r"`(\w+)`", " ".join(first)))
    added = {
        name for line, left in zip(second, first, strict=True) if left == "|" for name in re.findall(r"`(\w+)`", line)
    }
    assert theirs | added == ours
    assert added == {"gradient", "generator", "device", "dtype"}
