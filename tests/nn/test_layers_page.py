"""The page on layers shows code that runs, prints what it says, and copies the weights."""

import re
from pathlib import Path

import torch
from torch.testing import assert_close

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "layers.md").read_text(encoding="utf-8")


def test_the_recipe_copies_the_weights_of_torch(capsys):
    ((block, printed),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, flags=re.DOTALL)
    assert PAGE.count("```python") == 1
    torch.manual_seed(0)
    names = {"__name__": "__main__"}
    exec(compile(block, "layers.md", "exec"), names)
    assert capsys.readouterr().out == printed
    theirs, ours, x = names["theirs"].double(), names["ours"].double(), torch.randn(3, 7, 32, dtype=torch.float64)
    # Biases start at zero in both; only others show that they were copied to the right place.
    with torch.no_grad():
        theirs.in_proj_bias.copy_(torch.randn(96))
        theirs.out_proj.bias.copy_(torch.randn(32))
    copying = block[block.index("state = ") : block.index("x, absent")]
    exec(compile(copying, "layers.md", "exec"), names)
    assert_close(ours(x), theirs(x, x, x, need_weights=False)[0], rtol=0, atol=1e-14)


def test_the_page_names_every_layer():
    import massieu.nn

    functions = {"rotate"}
    assert [name for name in massieu.nn.__all__ if f"`{name}`" not in PAGE and name not in functions] == []
