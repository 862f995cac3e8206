"""Imports point one way, read from the source."""

import ast
from collections import Counter
from pathlib import Path

import one_number
import pytest
from package_map import BANDS, imported, packages, written

ROOT = Path(__file__).resolve().parents[1]
HEIGHT = {name: (number, place) for number, band in enumerate(BANDS.values()) for place, name in enumerate(band)}
ANYWHERE = {"__init__", "__main__", "cli"}  # these load every other name on first use


def violations(root: Path) -> list[str]:
    """Every import of the package under ``root`` that points up, and every package without a band, as sentences."""
    found = []
    for path in sorted((root / "massieu").rglob("*.py")):
        module = path.relative_to(root / "massieu").with_suffix("").parts[0]
        if module in ANYWHERE:
            continue
        if module not in HEIGHT:
            found.append(f"{module} has no band; add it to BANDS")
            continue
        higher = sorted(name for name in imported(path, root, {*HEIGHT}) if HEIGHT.get(name, (9, 9)) > HEIGHT[module])
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
        ("tools.py", "", "tools has no band; add it to BANDS"),
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


def cycles(graph: dict[str, set[str]]) -> list[str]:
    """Pairs of packages that import each other, directly or through others."""

    def reached(start: str) -> set[str]:
        seen, waiting = set[str](), [start]
        while waiting:
            fresh = graph.get(waiting.pop(), set()) - seen
            seen |= fresh
            waiting += fresh
        return seen

    reach = {package: reached(package) for package in graph}
    return [f"{one} and {two}" for one in graph for two in reach[one] if one < two and one in reach.get(two, ())]


def test_no_package_imports_another_that_imports_it_back():
    # The command line and the package itself load every other name on first use.
    graph = {name: found for name, found in packages(ROOT).items() if name not in ANYWHERE}
    assert cycles(graph) == []


def test_a_cycle_inside_a_function_is_seen(tmp_path):
    for module, line in (("corpus", "import massieu.models"), ("models", "def late():\n    import massieu.corpus")):
        (tmp_path / "massieu" / module).mkdir(parents=True)
        (tmp_path / "massieu" / module / "__init__.py").write_text(line)
    assert cycles(packages(tmp_path)) == ["corpus and models"]


def test_the_map_in_contributing_is_that_of_the_imports():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert text == written(text), "python tests/package_map.py draws it again"


def test_one_number_takes_twenty_hops_at_most_and_its_page_names_their_lines():
    assert len(one_number.HOPS) <= 20
    assert one_number.PAGE.read_text(encoding="utf-8") == one_number.drawn(), (
        "python tests/one_number.py draws it again"
    )


def test_a_name_of_a_file_or_a_class_means_one_thing():
    files = Counter(path.stem for path in (ROOT / "massieu").rglob("*.py"))
    assert {name for name, count in files.items() if count > 1} <= {"__init__", "figures", "quantities"}
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "massieu").rglob("*.py")]
    classes = Counter(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    assert [name for name, count in classes.items() if count > 1 and not name.startswith("_")] == []


def test_there_is_no_drawer_for_things_without_a_home():
    drawers = {"utils", "common", "core", "base", "helpers"}
    assert [path for path in (ROOT / "massieu").rglob("*") if path.stem in drawers] == []
