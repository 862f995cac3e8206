"""Documents from files, from standard input, or from a dataset by name."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["read_dataset", "read_documents"]


def read_documents(paths: Sequence[str | Path], column: str = "text") -> list[str]:
    """The documents in text files: what lies between blank lines, or one line each in ``.jsonl``; "-" is stdin.

    A line of ``.jsonl`` is a string, or an object that holds the text in the field ``column``.
    """
    documents = []
    for path in paths:
        text = _read(path)
        found = _lines(path, text, column) if str(path).endswith(".jsonl") else _paragraphs(text)
        if not found:
            raise ValueError(f"{path} must hold some text, and it is empty; pass a file with at least one sentence")
        documents += found
    return documents


def read_dataset(name: str, *, column: str = "text", limit: int | None = None) -> list[str]:
    """Documents of a dataset of the Hugging Face hub, ``NAME[:CONFIG[:SPLIT]]``, the training split by default."""
    try:
        import datasets
    except ImportError:
        raise ValueError("--dataset needs the package datasets, which is not installed; pip install datasets") from None
    place, config, split = (*name.split(":"), "", "")[:3]
    try:
        rows = datasets.load_dataset(place, config or None, split=split or "train", streaming=True)
        found = [row[column] for row in itertools.islice(rows, limit)]
    except KeyError:
        raise ValueError(f"{name} has no column {column}; name the one that holds the text with --column") from None
    except Exception as error:  # whatever the hub, the network or a loading script raises
        raise ValueError(f"the dataset {name} cannot be read ({' '.join(str(error).split())[:160]})") from error
    return [text for text in found if isinstance(text, str) and text.strip()]


def _read(path: str | Path) -> str:
    try:
        content = sys.stdin.buffer.read() if str(path) == "-" else Path(path).read_bytes()
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path} must be a text file in UTF-8, and it is not; convert it, or pass another") from None
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read: {error.strerror or error}; check the path and its permissions"
        ) from None


def _paragraphs(text: str) -> list[str]:
    return [part.strip() for part in re.split(r"\n\s*\n", text.replace("\r\n", "\n")) if part.strip()]


def _lines(path: str | Path, text: str, column: str) -> list[str]:
    found = []
    for number, line in enumerate(text.split("\n"), 1):  # other line ends may stand inside a JSON string
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:
            raise ValueError(f"{path} must hold one JSON value a line, and line {number} is none; check it") from None
        value = value.get(column) if isinstance(value, dict) else value
        if not isinstance(value, str):
            raise ValueError(
                f'{path} must hold strings or objects with a field "{column}", and line {number} does not;'
                " name the field with --column"
            )
        if value.strip():
            found.append(value)
    return found
