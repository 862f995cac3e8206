"""The result of an inspection: tables, facts, findings; written as one folder or not at all."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from massieu.checks import UserError, did_you_mean
from massieu.inspection.findings import Finding, findings
from massieu.inspection.predictions import Prediction, predictions
from massieu.inspection.quantities import QUANTITIES, describe
from massieu.outputs.folders import check_digest, publish
from massieu.outputs.spreadsheets import write_csv
from massieu.report import SCHEMA

if TYPE_CHECKING:
    import pandas

    from massieu.inspection.partial_result import PartialResult

__all__ = ["SCHEMA", "Inspection", "read_inspection", "records"]

PARTIAL = "partial.safetensors"
PARTIAL_BYTES = 32 << 20
"""Size up to which a partial result is written by default."""

NONE = type(None)
FACTS: dict[str, dict[str, tuple[type, ...]]] = {
    "model": {"name": (str,)},
    "text": {
        **{"sha256": (str,), "documents": (int,), "tokens": (int,), "counted_tokens": (int,)},
        **{"source": (str, NONE), "excluded": (str, NONE), "unit": (str, NONE), "max_length": (int, NONE)},
    },
    "coverage": {"sentence": (str,), "observed": (int,), "expected": (int,), "missing": (list,)},
    "versions": {},
    "options": {},
}
"""Facts that every reader of an inspection needs, with their kinds."""

OPTIONAL_FACTS = {"model": ("hidden", "head_width")}
"""Facts that are whole numbers or missing."""

LARGEST = sys.float_info.max
MOST_ROWS = 1 << 31

KEYS: dict[str, dict[str, type]] = {"heads": {"stack": str, "layer": int, "head": int}, "layers": {"layer": int}}


@dataclass
class Inspection:
    """Result of ``massieu inspect``: the tables of one model on one text.

    Attributes:
        heads: one row per head; each mean with its standard error in ``<name>_se``.
        layers: one row per block, controls beside the values.
        experiments: the tests of the theory in long form, with control and prediction.
        facts: model, text, coverage, versions, options.
        notes: sentences on what was left out and what does not apply.
        partial: the sums behind the tables, which merge with those of other texts; None if they are not in memory.
    """

    heads: pandas.DataFrame
    layers: pandas.DataFrame
    experiments: pandas.DataFrame
    facts: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    partial: PartialResult | None = field(default=None, repr=False)

    @property
    def findings(self) -> list[Finding]:
        """Most important observations, at most six, computed from the tables."""
        return findings(self.heads, self.layers, self.facts)

    @property
    def predictions(self) -> list[Prediction]:
        """Predictions of the theory with what was measured, the control and a verdict."""
        return predictions(self.heads, self.layers, self.facts)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values; what is not a number is None."""
        return {
            "schema": SCHEMA,
            "facts": _plain(self.facts),
            "notes": list(self.notes),
            "findings": [_plain(asdict(finding)) for finding in self.findings],
            "predictions": [_plain(asdict(prediction)) for prediction in self.predictions],
            "quantities": _plain(describe()),
            **{name: records(getattr(self, name)) for name in ("heads", "layers", "experiments")},
        }

    def to_json(self, path: str | Path) -> None:
        """Write ``inspection.json``, described in docs/inspection.md."""
        _write(Path(path), _json(self.to_dict()))

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

    def save(self, folder: str | Path, *, figures: bool = True, partial: bool | None = None) -> Path:
        """Write report, tables, JSON, figures and the partial result into a folder; all of them or none.

        Args:
            folder: where; files of the run that was written there before are replaced or removed, other files stay.
            figures: whether to draw.
            partial: whether to write the sums that :func:`~massieu.inspection.merge_runs` needs, which can be large;
                None writes them up to 32 MB.

        Returns:
            The path of the report.
        """
        from massieu.report import render

        with publish(Path(folder), "inspection", self.facts["model"]["name"]) as place:
            document = self.to_dict()
            _write(place / "report.html", render(document))
            _write(place / "inspection.json", _json(document))
            self.to_parquet(place / "heads.parquet")
            for name in ("layers", "experiments"):
                getattr(self, name).to_parquet(place / f"{name}.parquet", index=False)
            for name in ("heads", "layers", "experiments"):
                write_csv(getattr(self, name), place / f"{name}.csv")
            if figures:
                from massieu import figures as drawing

                drawing.save_figures(self.heads, self.layers, QUANTITIES, place / "figures")
            mergeable = partial is not False and self._save_partial(place, math.inf if partial else PARTIAL_BYTES)
        if not mergeable:  # an older one would belong to other tables
            (Path(folder) / PARTIAL).unlink(missing_ok=True)
        return Path(folder) / "report.html"

    def _save_partial(self, place: Path, most: float) -> bool:
        from massieu.accumulators.serialization import Unpackable
        from massieu.inspection.partial_files import save_partial

        if self.partial is None:
            return False
        try:
            return save_partial(self.partial, place / PARTIAL, most=most) is not None
        except Unpackable:  # arguments of a model can be anything
            return False

    def compare(self, *others: Inspection) -> pandas.DataFrame:
        """This inspection and others side by side: one row per head and quantity, one column per inspection."""
        from massieu.inspection.comparison import compare_heads

        return compare_heads([self, *others])

    def plot(self, quantity: str = "entropy", *, ax: Any = None) -> Any:
        """A matplotlib figure of one quantity: a map of all heads, or a profile over the layers with its control.

        It shows itself in a notebook. With ``ax`` it is drawn into these axes, one for each stack of the model.
        """
        from massieu import figures

        if quantity not in QUANTITIES:
            near = did_you_mean(quantity, QUANTITIES)
            raise UserError(f"quantity must be one of {', '.join(QUANTITIES)}, got {quantity}{near}; try entropy")
        meant = QUANTITIES[quantity]
        draw = figures.head_map if meant.table == "heads" else figures.layer_profile
        return draw(getattr(self, meant.table), meant, ax=ax)

    def summary(self) -> str:
        """Coverage and findings as plain text."""
        facts = self.facts
        lines = [f"{facts['model']['name']}: {facts['coverage']['sentence']}"]
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
    file = check_digest(place / "inspection.json" if place.is_dir() else place)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{path} must be the folder of an inspection or its inspection.json, and it cannot be read"
            f" ({error.strerror or error}); make one with massieu inspect MODEL --out DIR"
        ) from None
    except (ValueError, RecursionError):
        raise UserError(f"{file} must be JSON as massieu inspect writes it, and it is not; inspect again") from None
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        got = str(schema)[:40]
        raise UserError(
            f"{file} must have the schema {SCHEMA}, got {got} of another version; inspect again with this one"
        )
    odd = _odd_content(content)
    if odd is not None:
        raise UserError(
            f"{file} must hold tables, facts and notes as massieu inspect writes them, and {odd} is missing or not as"
            " expected; inspect again"
        )
    tables = {name: pandas.DataFrame.from_records(content[name]) for name in ("heads", "layers", "experiments")}
    return Inspection(**tables, facts={**content["facts"]}, notes=[*content["notes"]])


def _odd_content(content: dict[str, Any]) -> str | None:
    """The first thing in the content of an ``inspection.json`` that is missing or of another kind."""
    facts, notes = content.get("facts"), content.get("notes")
    if not isinstance(facts, dict):
        return "facts"
    for group, names in FACTS.items():
        if not isinstance(facts.get(group), dict):
            return f"facts.{group}"
        for name, kinds in names.items():
            if name not in facts[group] or type(facts[group][name]) not in kinds:
                return f"facts.{group}.{name}"
        for name in OPTIONAL_FACTS.get(group, ()):
            if type(facts[group].get(name)) not in (int, NONE):
                return f"facts.{group}.{name}"
    if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
        return "notes"
    return next(
        (odd for name in ("heads", "layers", "experiments") if (odd := _odd_table(name, content.get(name)))), None
    )


def _odd_table(name: str, rows: Any) -> str | None:
    """First column of a table with an unexpected value, such as ``heads.entropy``."""
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows) or (name == "heads" and not rows):
        return name
    for row in rows:
        for key, kind in KEYS.get(name, {}).items():
            value = row.get(key)
            if type(value) is not kind or (isinstance(value, int) and not 0 <= value < MOST_ROWS):
                return f"{name}.{key}"
        for key, value in row.items():
            meant = QUANTITIES.get(key.removesuffix("_se"))
            if meant is not None and not (_is_number(value) if meant.scale != "class" else _is_class(value)):
                return f"{name}.{key}"
    return None


def _is_class(value: Any) -> bool:
    """True for the name of a class and for an empty cell."""
    return value is None or isinstance(value, str)


def _is_number(value: Any) -> bool:
    """True for a finite number and for an empty cell."""
    return value is None or (type(value) in (int, float) and abs(value) < LARGEST)


def _json(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=1, allow_nan=False)


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
