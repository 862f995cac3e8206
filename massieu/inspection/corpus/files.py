"""Files of a corpus: which there are in folders and behind wildcards, and what is in them."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from massieu.inspection.corpus.opening import COMPRESSIONS, file_system, is_local, unreadable

__all__ = ["File", "find_files"]

FORMATS = {
    **dict.fromkeys((".txt", ".text", ".md"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    **{".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"},
}
KNOWN = "known are .txt, .md, .jsonl, .csv, .tsv, each also with .gz, .bz2, .xz or .zst, and .parquet"

WILD = "*?["


@dataclass(frozen=True, slots=True)
class File:
    """A file of a corpus.

    Attributes:
        path: what opens it, a path or a URL.
        name: what it is called in reports: its path below the folder that all files of the corpus share.
        size: in bytes, as it is stored; None if its place does not tell, or cannot begin in the middle.
        format: text, jsonl, csv, tsv or parquet.
        compression: the last extension if it is that of a compression, else empty.
        pipe: whether it can be read only once.
    """

    path: str
    name: str
    size: int | None
    format: str
    compression: str = ""
    pipe: bool = False


STANDARD_INPUT = File("-", "-", None, "text", pipe=True)


def find_files(paths: Sequence[str | Path]) -> list[File]:
    """The files that paths, folders, wildcards and URLs name, in this order, each once; "-" is standard input.

    Folders are searched to the bottom, in the order of names, for files with a known extension.
    """
    found: dict[str, File] = {}
    for path in paths:
        for file in [STANDARD_INPUT] if str(path) == "-" else _named(str(path)):
            found.setdefault(os.path.realpath(file.path) if "://" not in file.path else file.path, file)
    shared = _shared_folder([file.path for file in found.values() if not file.pipe])
    return [replace(file, name=file.path.removeprefix(shared)) for file in found.values()]


def _named(path: str) -> list[File]:
    """The files behind one argument."""
    system, place = file_system(path)
    base = place
    try:
        if system.exists(place):
            info = system.info(place)
            listed = system.find(place, detail=True) if info["type"] == "directory" else None
        elif any(sign in place for sign in WILD):
            base = place[: min(place.find(sign) for sign in WILD if sign in place)].rpartition("/")[0]
            matched = system.glob(place, detail=True)
            listed = {name: own for name, own in matched.items() if own["type"] != "directory"}
            for name in matched.keys() - listed.keys():
                listed |= system.find(name, detail=True)
        else:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    except Exception as error:  # whatever the place raises
        raise unreadable(path, error) from error
    if listed is None:
        return [_file(system, info, path)]
    shown = [name for name in sorted(listed) if not name.removeprefix(base).count("/.")]
    known = [name for name in shown if _extensions(name)[0] and _format(*_extensions(name))]
    found = [file for file in (_file(system, listed[name], path) for name in known) if not file.pipe]
    if not found:
        raise ValueError(f"{path} must hold a file that can be read, and there is none; {KNOWN}")
    return found


def _file(system: Any, info: dict[str, Any], path: str) -> File:
    extension, compression = _extensions(info["name"])
    format = _format(extension, compression)
    if format is None:
        got = f"{extension}{compression}"
        raise ValueError(f"{path} must have an extension that says what it holds, got {got}; {KNOWN}")
    local = is_local(system)
    place = info["name"] if local else system.unstrip_protocol(info["name"])
    size = info.get("size") if info.get("partial", True) else None
    return File(place, place, size, format, compression, pipe=local and not os.path.isfile(place))


def _format(extension: str, compression: str) -> str | None:
    """What a file holds; one without extension is taken for text, and Parquet compresses by itself."""
    format = FORMATS.get(extension or ".txt")
    return None if compression and format == "parquet" else format


def _extensions(path: str) -> tuple[str, str]:
    """The extension of a file, before that of its compression; of a URL without its query."""
    end = path.rsplit("/", 1)[-1].lower()
    end = end.partition("?")[0] if "://" in path else end
    compression = next((own for own in COMPRESSIONS if end.endswith(own)), "")
    return os.path.splitext(end.removesuffix(compression))[1], compression


def _shared_folder(paths: list[str]) -> str:
    """The beginning of all paths that ends with a slash; empty if they share no folder."""
    folders = [path.split("/")[:-1] for path in paths]
    shared = itertools.takewhile(lambda parts: len({*parts}) == 1, zip(*folders, strict=False))
    return "".join(f"{parts[0]}/" for parts in shared)
