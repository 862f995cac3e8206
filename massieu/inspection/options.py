"""How a text is read: what the figures depend on, and what only decides how fast they come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from massieu.checks import UserError

__all__ = ["Options"]

EXPERIMENTS = ("heads", "default")
LONG_DOCUMENTS = ("error", "cut", "skip")


@dataclass(frozen=True)
class Options:
    """How a text is read; the arguments of :func:`~massieu.inspection.inspect_model` of the same names.

    Example:
        >>> Options(max_length=128).of_figures()
        {'max_length': 128, 'experiments': 'default', 'rows': 32, 'special_tokens': False, 'long_documents': 'cut'}
    """

    batch_size: int = 16
    max_length: int | None = None
    experiments: Literal["default", "heads"] = "default"
    rows: int | None = 32
    special_tokens: bool = False
    padding: Literal["right", "left"] = "right"
    long_documents: Literal["error", "cut", "skip"] | None = None

    def __post_init__(self) -> None:
        if self.experiments not in EXPERIMENTS:
            raise UserError(
                f"experiments must be one of {', '.join(EXPERIMENTS)}, got {self.experiments}; heads is the fastest"
            )
        if not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise UserError(f"batch_size must be a positive whole number, got {self.batch_size!r}; 16 is usual")
        if self.padding not in ("right", "left"):
            raise UserError(f"padding must be right or left, got {self.padding!r}; right is usual")
        if self.max_length is not None and (not isinstance(self.max_length, int) or self.max_length < 2):
            raise UserError(f"max_length must be a whole number of at least 2, got {self.max_length!r}; 256 is usual")
        if self.long_documents not in (None, *LONG_DOCUMENTS):
            raise UserError(
                f"long_documents must be one of {', '.join(LONG_DOCUMENTS)}, got {self.long_documents!r};"
                " cut makes passages of them"
            )

    @property
    def treatment(self) -> Literal["error", "cut", "skip"]:
        """What is done with documents that are too long: they are cut if a length was given, and refused otherwise."""
        return self.long_documents or ("error" if self.max_length is None else "cut")

    def of_batches(self) -> dict[str, Any]:
        """Options of :class:`~massieu.corpus.batching.Batcher`."""
        names = ("batch_size", "max_length", "special_tokens", "padding")
        return {**{name: getattr(self, name) for name in names}, "long_documents": self.treatment}

    def of_figures(self) -> dict[str, Any]:
        """Those that figures depend on: parts that differ in one of them cannot be merged."""
        names = ("max_length", "experiments", "rows", "special_tokens")
        return {**{name: getattr(self, name) for name in names}, "long_documents": self.treatment}
