"""A small language model trained on public-domain text, checkpoints of its training, and held-out text to inspect.

``train.py`` writes all files of this folder; ``README.md`` is the model card and ``provenance.json`` has its values.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["CHECKPOINTS", "MODEL", "PROVENANCE", "TEXT", "documents"]

HERE = Path(__file__).resolve().parent

MODEL = HERE / "model"
"""Folder of the trained model with its tokenizer, in the format of transformers."""

CHECKPOINTS = (*sorted((HERE / "checkpoints").glob("step-*")), MODEL)
"""Folders of the same model along its training, the untrained one first and :data:`MODEL` last."""

TEXT = HERE / "text" / "heldout.txt"
"""The text to inspect: one document per line, blank lines between them."""

PROVENANCE = HERE / "provenance.json"
"""Data, licenses, recipe, versions, times and losses of the training script."""


def documents() -> list[str]:
    """Return the held-out texts: passages of chapters and speeches, each short enough for the model's window.

    Example:
        >>> from massieu.assets import CHECKPOINTS, MODEL, documents
        >>> CHECKPOINTS[-1] == MODEL, (MODEL / "config.json").is_file()
        (True, True)
        >>> len(documents()) >= 24 and all(text == text.strip() != "" for text in documents())
        True
    """
    return TEXT.read_text(encoding="utf-8").strip().split("\n\n")
