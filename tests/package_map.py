"""Map of the packages, drawn from their imports: ``python tests/package_map.py`` writes it into CONTRIBUTING.md."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- map: python tests/package_map.py -->\n", "<!-- end of map -->\n"
BANDS = {
    "core": ("checks", "plotting", "outputs", "kernels", "statistics", "measures", "duality", "geometry"),
    "theory": ("dynamics", "contrast", "memory", "margin", "patterns", "nn", "context", "universal"),
    "pages": ("assets", "report", "figures"),
    "instruments": ("accumulators", "taps", "models", "corpus", "engine", "inspection", "monitor"),
    "surfaces": ("claims", "__init__", "commands", "cli"),
}
"""Packages by band; each imports only from those before it and from bands above."""


def imported(path: Path, root: Path, known: set[str]) -> set[str]:
    """Packages of massieu that a file imports, inside functions too; ``__init__`` is massieu itself."""
    names: set[tuple[str, ...]] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {tuple(alias.name.split(".")) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(root).parts[: -node.level] if node.level else ()
            source = (*package, *(node.module or "").split(".")) if node.module else package
            names |= {(*source, alias.name) for alias in node.names}
    ours = [name for name in names if name[0] == "massieu"]
    return {name[1] if len(name) > 1 and name[1] in known else "__init__" for name in ours}


def packages(root: Path) -> dict[str, set[str]]:
    """Packages that each package imports, for type checkers too."""
    paths = sorted((root / "massieu").rglob("*.py"))
    homes = [path.relative_to(root / "massieu").with_suffix("").parts[0] for path in paths]
    found: dict[str, set[str]] = {home: set() for home in homes}
    for path, home in zip(paths, homes, strict=True):
        found[home] |= imported(path, root, {*homes}) - {home}
    return found


def purpose(name: str, root: Path) -> str:
    """First line of the docstring of a package."""
    path = root / "massieu" / name
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def drawn(root: Path = ROOT) -> str:
    """Map as a table: band, package, purpose, and the packages that it imports."""
    graph = packages(root)
    lines = ["| band | package | holds | imports |", "|---|---|---|---|"]
    for band, members in BANDS.items():
        for name in members:
            if name == "__init__":
                continue
            below = [other for others in BANDS.values() for other in others if other in graph[name]]
            lines.append(f"| {band} | `{name}` | {purpose(name, root)} | {', '.join(below) or 'torch and numpy'} |")
    return "\n".join(lines) + "\n"


def written(text: str) -> str:
    """CONTRIBUTING.md with the map of today in the place of the one that it holds."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + drawn() + END + rest.partition(END)[2]


if __name__ == "__main__":
    file = ROOT / "CONTRIBUTING.md"
    file.write_text(written(file.read_text(encoding="utf-8")), encoding="utf-8")
