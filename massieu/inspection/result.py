"""The result of an inspection: tables, facts, findings; written as one folder or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from massieu.checks import UserError
from massieu.inspection.findings import Finding, findings
from massieu.inspection.quantities import QUANTITIES, describe

if TYPE_CHECKING:
    import pandas

    from massieu.inspection.parts import Part

__all__ = ["SCHEMA", "Inspection", "check_writable", "read_inspection", "records", "written_together"]

SCHEMA = "massieu.inspection/1"
PART = "part.safetensors"


@dataclass
class Inspection:
    """What ``massieu inspect`` found in a model.

    Attributes:
        heads: one row per head; each mean with its standard error in ``<name>_se``.
        layers: one row per block, controls beside the figures.
        experiments: the tests of the theory in long form, with control and prediction.
        facts: model, text, what was heard, versions, options.
        notes: sentences on what was left out and what does not apply.
        part: the sums behind the tables, which merge with those of other texts; None if they are not at hand, or if
            their memory was wanted back.
    """

    heads: pandas.DataFrame
    layers: pandas.DataFrame
    experiments: pandas.DataFrame
    facts: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    part: Part | None = field(default=None, repr=False)

    @property
    def findings(self) -> list[Finding]:
        """Three to five sentences that a reader wants first, computed from the tables."""
        return findings(self.heads, self.layers, self.facts)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values; what is not a number is None."""
        return {
            "schema": SCHEMA,
            "facts": _plain(self.facts),
            "notes": list(self.notes),
            "findings": [_plain(asdict(finding)) for finding in self.findings],
            "quantities": _plain(describe()),
            **{name: records(getattr(self, name)) for name in ("heads", "layers", "experiments")},
        }

    def to_json(self, path: str | Path) -> None:
        """Write ``inspection.json``, described in docs/inspection.md."""
        _write(Path(path), json.dumps(self.to_dict(), indent=1, allow_nan=False))

    def to_html(self, path: str | Path) -> None:
        """Write the report as one page that needs no network."""
        _write(Path(path), self._page())

    def to_parquet(self, path: str | Path) -> None:
        """Write the heads table as parquet, the facts as JSON in its metadata."""
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.Table.from_pandas(self.heads, preserve_index=False)
        facts = {"massieu": json.dumps({"schema": SCHEMA, "facts": _plain(self.facts)})}
        pyarrow.parquet.write_table(table.replace_schema_metadata({**table.schema.metadata, **facts}), path)

    def save(self, folder: str | Path, *, figures: bool = True, part: bool = True) -> Path:
        """Write report, tables, JSON, figures and the part that merges into a folder; all of them or none.

        Args:
            folder: where; what is there under other names stays.
            figures: whether to draw.
            part: whether to write the sums that :func:`~massieu.inspection.merge_runs` needs, which can be large.

        Returns:
            The path of the report.
        """
        with written_together(Path(folder)) as place:
            self.to_html(place / "report.html")
            self.to_json(place / "inspection.json")
            self.to_parquet(place / "heads.parquet")
            for name in ("layers", "experiments"):
                getattr(self, name).to_parquet(place / f"{name}.parquet", index=False)
            for name in ("heads", "layers", "experiments"):
                getattr(self, name).to_csv(place / f"{name}.csv", index=False)
            if figures:
                from massieu import figures as drawing

                drawing.save_figures(self.to_dict(), place / "figures")
            mergeable = part and self._save_part(place)
        if not mergeable:  # an older one would belong to other tables
            (Path(folder) / PART).unlink(missing_ok=True)
        return Path(folder) / "report.html"

    def _save_part(self, place: Path) -> bool:
        from massieu.inspection.files import save_part
        from massieu.inspection.packing import Unpackable

        if self.part is None:
            return False
        try:
            save_part(self.part, place / PART)
        except Unpackable:  # arguments of a model can be anything
            return False
        return True

    def compare(self, *others: Inspection) -> pandas.DataFrame:
        """This inspection and others side by side: one row per head and quantity, one column per inspection."""
        from massieu.inspection.comparison import compare_heads

        return compare_heads([self, *others])

    def plot(self, quantity: str = "entropy") -> Any:
        """A matplotlib figure of one quantity: a map of all heads, or a profile over the layers with its control."""
        from massieu import figures

        if quantity not in QUANTITIES:
            raise UserError(
                f"quantity must be one of {', '.join(QUANTITIES)}, got {quantity}; entropy is the usual one"
            )
        meant = QUANTITIES[quantity]
        draw = figures.head_map if meant.table == "heads" else figures.layer_profile
        return draw(getattr(self, meant.table), meant)

    def summary(self) -> str:
        """What was heard and found, as plain text."""
        facts = self.facts
        lines = [f"{facts['model']['name']}: {facts['heard']['sentence']}"]
        lines += [f"- {finding.title}: {finding.sentence}" for finding in self.findings]
        return "\n".join(lines)

    def _page(self) -> str:
        from massieu.report import render

        return render(self.to_dict())

    def _repr_html_(self) -> str:
        """In a notebook: the report in a frame, so that its style stays its own."""
        import html

        return (
            f'<iframe srcdoc="{html.escape(self._page(), quote=True)}" title="massieu inspection"'
            ' style="width:100%;height:720px;border:0"></iframe>'
        )

    def __repr__(self) -> str:
        return self.summary()


def read_inspection(path: str | Path) -> Inspection:
    """An inspection from its folder, or from its ``inspection.json``."""
    import pandas

    place = Path(path)
    file = place / "inspection.json" if place.is_dir() else place
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{path} must be the folder of an inspection or its inspection.json, and it cannot be read"
            f" ({error.strerror or error}); make one with massieu inspect MODEL --out DIR"
        ) from None
    except ValueError:
        raise UserError(f"{file} must be JSON as massieu inspect writes it, and it is not; inspect again") from None
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise UserError(f"{file} must have the schema {SCHEMA}, got {schema}; inspect again with this version")
    try:
        tables = {name: pandas.DataFrame.from_records(content[name]) for name in ("heads", "layers", "experiments")}
        return Inspection(**tables, facts={**content["facts"]}, notes=[*content["notes"]])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file} must hold tables, facts and notes, and {error} is missing; inspect again") from None


def check_writable(folder: Path) -> None:
    """One sentence now, rather than after minutes of work, if nothing can be written there."""
    made = _absent(folder)
    with written_together(folder):
        pass
    _remove(made)


@contextlib.contextmanager
def written_together(folder: Path) -> Iterator[Path]:
    """A place to write files that move into ``folder`` when all are there; otherwise everything is as it was before."""
    made, place, done = _absent(folder), None, False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix=".massieu-", dir=folder))
        (place / "new").mkdir()
        yield place / "new"
        _move(place / "new", folder, place / "old")
        done = True
    except OSError as error:
        why = error.strerror or str(error)
        raise UserError(f"the folder {folder} cannot be written to: {why}; choose another with --out") from error
    finally:
        if place is not None:
            shutil.rmtree(place, ignore_errors=True)
        if not done:
            _remove(made)


def _move(source: Path, folder: Path, old: Path) -> None:
    """Move all files from one folder into another, or none: what was replaced comes back if one fails."""
    names = [path.relative_to(source) for path in sorted(source.rglob("*")) if path.is_file()]
    for name in names:
        if (folder / name).is_dir():
            raise IsADirectoryError(errno.EISDIR, f"there is a folder called {name}")
    made = _absent(*(folder / name.parent for name in names))
    moved: list[Path] = []
    try:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if (folder / name).exists():
                (old / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(folder / name, old / name)
            moved.append(name)
            os.replace(source / name, folder / name)
    except BaseException:
        for name in moved:
            (folder / name).unlink(missing_ok=True)
            if (old / name).exists():
                os.replace(old / name, folder / name)
        _remove(made)
        raise


def _absent(*folders: Path) -> list[Path]:
    """Those of the folders and the folders around them that do not exist, the innermost first."""
    every = {path for folder in folders for path in (folder, *folder.parents)}
    return sorted((path for path in every if not path.exists()), key=lambda path: -len(path.parts))


def _remove(folders: list[Path]) -> None:
    """Remove folders that are there and empty."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def records(table: pandas.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table as plain values."""
    return [{str(name): _plain(value) for name, value in row.items()} for row in table.to_dict("records")]


def _plain(value: Any) -> Any:
    """A value that JSON has; a number that is none becomes None."""
    if isinstance(value, dict):
        return {str(name): _plain(own) for name, own in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(own) for own in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
