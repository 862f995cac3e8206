"""Code of README and documentation runs and prints the output shown; pages name every subject of their section."""

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import massieu.nn

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    path.name: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
BLOCKS = {
    f"{page}-{i}": (block, printed)
    for page, text in PAGES.items()
    for i, (block, printed) in enumerate(
        re.findall(r"```python\n((?:(?!```).)*)```(?:\n\n```text\n(.*?)```)?", text, flags=re.DOTALL)
    )
}
SHOWN = {name: pair for name, pair in BLOCKS.items() if pair[1]}
DRAWN = {name: block for name, (block, printed) in BLOCKS.items() if not printed and ".savefig(" in block}
CONTINUED = "watch.md-4"  # with the names of the page's first block
# Lines for a program that the reader has.
SKETCHES = ["engine.md-0", "inspection.md-0", "watch.md-1", "watch.md-2", "watch.md-3"]
NEEDED = {
    "context.md": ["pandas", "sklearn"],
    "inspection.md": ["transformers", "pandas", "fsspec"],
    "margin.md": ["scipy", "pandas", "matplotlib"],
    "memory.md": ["matplotlib", "sklearn"],
    "patterns.md": ["matplotlib"],
    "taps.md": ["transformers"],
    "universal.md": ["matplotlib"],
    "watch.md": ["pandas"],
}
UNNAMED = {"contrast": {"BoostingStep", "Embedding"}, "nn": {"rotate"}}  # what functions return, and one for experts


def execute(name: str) -> dict[str, object]:
    """Return the names defined by a block."""
    for package in NEEDED.get(name.split("-")[0], ()):
        pytest.importorskip(package)
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile(BLOCKS[name][0], name, "exec"), names)
    return names


@pytest.mark.parametrize("name", SHOWN)
def test_a_block_prints_the_text_that_follows_it(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    execute(name)
    assert capsys.readouterr().out == SHOWN[name][1]


@pytest.mark.parametrize("name", DRAWN)
def test_a_block_that_prints_nothing_draws_a_picture(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    execute(name)
    (picture,) = tmp_path.glob("*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_every_other_block_is_a_sketch_of_what_the_reader_has():
    assert [name for name in BLOCKS if name not in SHOWN and name not in DRAWN and name != CONTINUED] == SKETCHES
    for name in SKETCHES:
        compile(BLOCKS[name][0], name, "exec")


@pytest.mark.parametrize(
    ("page", "package", "tables"),
    [
        ("contrast.md", "contrast", ()),
        ("dynamics.md", "dynamics", ("OBSERVABLES", "CONTRACTIONS")),
        ("layers.md", "nn", ()),
        ("margin.md", "margin", ()),
        ("memory.md", "memory", ()),
        ("patterns.md", "patterns", ()),
        ("universal.md", "universal", ()),
    ],
)
def test_a_page_names_everything_that_it_is_about(page, package, tables):
    module = import_module(f"massieu.{package}")
    names = [*module.__all__, *(name for table in tables for name in getattr(module, table))]
    assert [name for name in names if f"`{name}`" not in PAGES[page] and name not in UNNAMED.get(package, ())] == []


def test_the_first_example_is_the_first_block_of_the_readme_and_five_lines_long():
    first = BLOCKS["README.md-0"][0]
    assert (ROOT / "examples" / "first.py").read_text(encoding="utf-8") == first
    assert len([line for line in first.splitlines() if line]) == 5


def test_the_recipe_on_layers_copies_the_weights_of_torch():
    (recipe,) = (key for key, (code, _) in BLOCKS.items() if "theirs = nn.MultiheadAttention" in code)
    names = execute(recipe)
    theirs, ours, x = names["theirs"].double(), names["ours"].double(), torch.randn(3, 7, 32, dtype=torch.float64)
    # Biases start at zero in both; only others show that they were copied to the right place.
    with torch.no_grad():
        theirs.in_proj_bias.copy_(torch.randn(96))
        theirs.out_proj.bias.copy_(torch.randn(32))
    block = BLOCKS[recipe][0]
    exec(compile(block[block.index("state = ") : block.index("x, absent")], "layers.md", "exec"), names)
    assert_close(ours(x), theirs(x, x, x, need_weights=False)[0], rtol=0, atol=1e-14)


def test_the_page_on_memories_compares_every_argument_of_the_layers_and_no_other():
    layers = (massieu.nn.Hopfield, massieu.nn.HopfieldPooling, massieu.nn.HopfieldLayer)
    ours = {name for layer in layers for name in inspect.signature(layer).parameters} - {"options"}
    page = PAGES["memory.md"]
    table = page[page.index("| original argument | ours |") :].split("\n\n")[0]
    first, second = zip(*(line.split(" | ", 1) for line in table.splitlines()[2:]), strict=True)
    theirs = set(re.findall(r"`(\w+)`", " ".join(first)))
    added = {
        name for line, left in zip(second, first, strict=True) if left == "|" for name in re.findall(r"`(\w+)`", line)
    }
    assert theirs | added == ours
    assert added == {"gradient", "generator", "device", "dtype"}


def test_the_penalties_go_on_from_the_first_block_of_their_page(capsys):
    names = execute("watch.md-0")
    exec(compile(BLOCKS[CONTINUED][0], CONTINUED, "exec"), names)
    assert names["loss"].isfinite()
    assert all(parameter.grad is not None for parameter in names["model"].parameters())
