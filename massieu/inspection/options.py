"""Reading options, and which of them affect results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from massieu.checks import check_choice, check_count

__all__ = ["Options"]


@dataclass(frozen=True)
class Options:
    """Reading options: the arguments of :func:`~massieu.inspection.inspect_model` of the same names.

    Example:
        >>> Options(max_length=128).result_affecting()
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
        check_choice(self.experiments, "experiments", ("heads", "default"))
        check_count(self.batch_size, "batch_size", remedy="16 is usual")
        check_choice(self.padding, "padding", ("right", "left"))
        if self.max_length is not None:
            check_count(self.max_length, "max_length", least=2, remedy="256 is usual")
        check_choice(self.long_documents, "long_documents", ("error", "cut", "skip", None))

    @property
    def treatment(self) -> Literal["error", "cut", "skip"]:
        """Treatment of documents that are too long: cut if a length was given, an error otherwise."""
        return self.long_documents or ("error" if self.max_length is None else "cut")

    def of_batches(self) -> dict[str, Any]:
        """Options of :class:`~massieu.corpus.batching.Batcher`."""
        names = ("batch_size", "max_length", "special_tokens", "padding")
        return {**{name: getattr(self, name) for name in names}, "long_documents": self.treatment}

    def result_affecting(self) -> dict[str, Any]:
        """Options that results depend on: partial results that differ in one of them cannot be merged."""
        names = ("max_length", "experiments", "rows", "special_tokens")
        return {**{name: getattr(self, name) for name in names}, "long_documents": self.treatment}
