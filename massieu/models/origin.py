"""Origin of a model: the name and options by which other processes load the same one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from massieu.models.loading import Loaded

__all__ = ["Origin"]


@dataclass(frozen=True)
class Origin:
    """Name and options by which other processes load the same model.

    Attributes:
        name: as :func:`massieu.models.loading.load` takes it; None for the embedded model.
        loading: further arguments of that function.
    """

    name: str | None
    loading: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, name: str | None, loading: dict[str, Any], revision: str | None = None) -> Origin:
        """Origin of a model by its name and the revision that was found; a folder by its absolute path.

        Example:
            >>> Origin.of("bert-base-uncased", {"dtype": "float32"}, revision="86b5e09")
            Origin(name='bert-base-uncased', loading=(('dtype', 'float32'), ('revision', '86b5e09')))
        """
        if name is not None and Path(name).expanduser().is_dir():
            name = str(Path(name).expanduser().resolve())
        elif revision is not None:
            loading = {**loading, "revision": revision}
        return cls(name, tuple(sorted(loading.items())))

    def load(self) -> Loaded:
        """Load the model."""
        from massieu import assets
        from massieu.models.loading import load

        return load(str(assets.MODEL) if self.name is None else self.name, **dict(self.loading))
