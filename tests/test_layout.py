"""Imports point one way, read from the source."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = [
    {"checks"},
    {"kernels"},
    {"statistics", "outputs", "plotting"},
    {"measures", "duality", "geometry"},
    {"dynamics", "contrast", "memory", "margin", "context", "patterns", "universal", "nn", "assets"},
    {"taps", "figures", "report", "accumulators"},
    {"models", "corpus", "inspection", "monitor", "engine"},
    {"claims"},
    {"__init__"},
    {"commands"},
    {"cli", "__main__"},
]
HEIGHT = {name: height for height, layer in enumerate(LAYERS) for name in layer}


def imported(path: Path, root: Path) -> set[str]:
    """The modules of massieu that a file names in its imports, inside functions too; ``__init__`` is massieu itself."""
    names: set[tuple[str, ...]] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {tuple(alias.name.split(".")) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(root).parts[: -node.level] if node.level else ()
            source = (*package, *(node.module or "").split(".")) if node.module else package
            names |= {(*source, alias.name) for alias in node.names}
    ours = [name for name in names if name[0] == "massieu"]
    return {name[1] if len(name) > 1 and name[1] in HEIGHT else "__init__" for name in ours}


def violations(root: Path) -> list[str]:
    """Every import of the package under ``root`` that points up, and every module without a layer, as sentences."""
    found = []
    for path in sorted((root / "massieu").rglob("*.py")):
        module = path.relative_to(root / "massieu").with_suffix("").parts[0]
        if module not in HEIGHT:
            found.append(f"{module} has no layer; add it to LAYERS")
            continue
        higher = sorted(name for name in imported(path, root) if HEIGHT[name] > HEIGHT[module])
        found += [f"{path.relative_to(root).as_posix()} imports {name}" for name in higher]
    return found


def test_imports_point_one_way():
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("statistics.py", "import massieu.cli", "massieu/statistics.py imports cli"),
        ("kernels/tiles.py", "from massieu import statistics", "massieu/kernels/tiles.py imports statistics"),
        ("kernels/tiles.py", "from ..statistics import attend", "massieu/kernels/tiles.py imports statistics"),
        ("duality.py", "def late():\n    from massieu import attend", "massieu/duality.py imports __init__"),
        ("measures/__init__.py", "from .. import nn", "massieu/measures/__init__.py imports nn"),
        ("tools.py", "", "tools has no layer; add it to LAYERS"),
        ("duality.py", "import torch\nfrom massieu.measures.points import Points", None),
        ("measures/__init__.py", "from .points import Points", None),
        ("cli.py", "import massieu\nfrom massieu import kernels", None),
    ],
)
def test_an_import_that_points_up_is_seen(file, line, complaint, tmp_path):
    path = tmp_path / "massieu" / file
    path.parent.mkdir(parents=True)
    path.write_text(line)
    assert violations(tmp_path) == ([complaint] if complaint else [])


def test_there_is_no_drawer_for_things_without_a_home():
    drawers = {"utils", "common", "core", "base", "helpers"}
    assert [path for path in (ROOT / "massieu").rglob("*") if path.stem in drawers] == []
