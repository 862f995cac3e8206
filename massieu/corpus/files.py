"""Files of a corpus in folders and behind wildcards, with their formats."""

from __future__ import annotations

import errno
import fnmatch
import itertools
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from massieu.checks import UserError
from massieu.corpus.opening import BLOCK, COMPRESSIONS, Elsewhere, file_system, is_local, unreadable

__all__ = ["File", "find_files"]

FORMATS = {
    **dict.fromkeys((".txt", ".text", ".md"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    **{".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"},
}
KNOWN = "known are .txt, .md, .jsonl, .csv, .tsv, each also with .gz, .bz2, .xz or .zst, and .parquet"

WILD = "*?["

VERSIONS = (
    *("ETag", "etag", "md5Hash", "Content-MD5", "Digest", "CRC"),
    *("mtime", "LastModified", "last_modified", "Last-Modified", "modified", "updated", "created"),
)
"""Names in file systems for a checksum of a file, or the time when it was written."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of a corpus.

    Attributes:
        path: a path that opens it, or a URL for people.
        name: name in reports: its path below the folder that all files of the corpus share.
        size: in bytes, as stored; None if unknown, or if reading cannot begin in the middle.
        format: text, jsonl, csv, tsv or parquet.
        compression: the last extension if it is that of a compression, else empty.
        pipe: whether it can be read only once.
        elsewhere: opens a file that is not on this machine.
        version: a checksum, or when it was written, if known.
    """

    path: str
    name: str
    size: int | None
    format: str
    compression: str = ""
    pipe: bool = False
    elsewhere: Elsewhere | None = None
    version: str = ""


STANDARD_INPUT = File("-", "-", None, "text", pipe=True)


def find_files(paths: Sequence[str | Path]) -> list[File]:
    """Find the files of paths, folders, wildcards and URLs in this order, each once; "-" is standard input.

    Folders are searched to the bottom, in the order of names, for files with a known extension.
    """
    found: dict[object, File] = {}
    for path in paths:
        for file in [STANDARD_INPUT] if str(path) == "-" else _named(str(path)):
            found.setdefault(_identity(file), file)
    return _with_names([*found.values()])


def _identity(file: File) -> object:
    """Value that is equal for all names of a file."""
    if file.elsewhere is None:
        return os.path.realpath(file.path)
    return file.elsewhere.system._fs_token, file.elsewhere.path  # a cache has the token of the cached system


def _with_names(files: list[File]) -> list[File]:
    """Files named by their paths below the folder they share, and by their archives if there are several."""
    links = [_links(file.path) if file.elsewhere else (file.path, "") for file in files]
    shared = _shared_folder([own for file, (own, _) in zip(files, links, strict=True) if not file.pipe])
    archives = {archive for _, archive in links}
    above = _shared_folder([archive for archive in archives if archive])
    named = []
    for file, (own, archive) in zip(files, links, strict=True):
        name = own.removeprefix(shared)
        if archive and len(archives) > 1:
            name += f"::{archive.removeprefix(above).removeprefix('::')}"
        named.append(replace(file, name=name.encode("utf-8", "replace").decode()))  # not all names are UTF-8
    return named


def _named(path: str) -> list[File]:
    """The files behind one argument."""
    if not path:
        raise UserError('a path must name a file or a folder, got an empty one; "." is this folder')
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
    except Exception as error:  # any error of the file system
        raise unreadable(path, error) from error
    if listed is None:
        return [_file(system, info, path, place)]
    known = [name for name in sorted(listed) if _is_meant(name, place, base) and not _is_pipe(system, name)]
    found = [_file(system, listed[name], path, place) for name in known]
    if not found:
        raise UserError(f"{path} must hold a file that can be read, and there is none; {KNOWN}")
    return found


def _is_meant(name: str, place: str, base: str) -> bool:
    """Return whether a folder or a wildcard includes a file in it.

    Hidden files and those without extension are included only by a wildcard such as ``.h*`` or ``part-*``.
    """
    pattern, below = (f"/{each.removeprefix(base).lstrip('/')}" for each in (place, name))
    if "/." in below and "/." not in pattern:
        return False
    extension, compression = _extensions(name)
    last = pattern.rpartition("/")[2]
    # The wildcard may have matched a folder above the file.
    asked = last.strip(f"{WILD}.") and fnmatch.fnmatchcase(name.rpartition("/")[2], last)
    return bool((extension or asked) and _format(extension, compression))


def _is_pipe(system: Any, name: str) -> bool:
    return is_local(system) and not os.path.isfile(name)


def _is_device(name: str) -> bool:
    """Return whether a path is a device other than the terminal of standard input: it may have no end."""
    mode = os.stat(name).st_mode
    return stat.S_ISBLK(mode) or (stat.S_ISCHR(mode) and os.path.realpath(name) != os.path.realpath("/dev/stdin"))


def _file(system: Any, info: dict[str, Any], path: str, place: str) -> File:
    """File of a file system, at or below the place of a path."""
    name = info["name"]
    extension, compression = _extensions(name)
    format = _format(extension, compression)
    if format is None:
        got = f"{extension}{compression}"
        raise UserError(f"{path} must have an extension that says what it holds, got {got}; {KNOWN}")
    if is_local(system):
        pipe = _is_pipe(system, name)
        if pipe and _is_device(name):
            raise UserError(f"{path} must be a file, or a pipe of plain text, got a device; write it to a file first")
        if pipe and (format != "text" or compression):
            got = f"a pipe of {extension}{compression}"
            raise UserError(f"{path} must be a file, or a pipe of plain text, got {got}; write it to a file first")
        return File(name, name, info.get("size"), format, compression, pipe, version=_version(info))
    size = _size(system, info)
    elsewhere = Elsewhere(system, name, stream=size is None and _is_web(system))
    address = _address(path, place, name)
    return File(address, name, size, format, compression, elsewhere=elsewhere, version=_version(info))


def _address(path: str, place: str, name: str) -> str:
    """The URL of a file, given one that names a place in the same file system.

    Example:
        >>> _address("ftp://ishmael:secret@sea.org/books", "/books", "/books/whale.txt")
        'ftp://ishmael@sea.org/books/whale.txt'
        >>> _address("zip://in/*.txt::sea.zip", "in/*.txt", "in/whale.txt")
        'zip://in/whale.txt::sea.zip'
    """
    own, archive = _links(path)
    place = place.strip("/")
    before = own[: own.rindex(place)] if place and place in own else f"{own.partition('://')[0]}://"
    whole = f"{name}{archive}" if "://" in name else f"{before}{name.lstrip('/')}{archive}"
    return re.sub("(//[^/:@]*):[^/@]*@", r"\1@", whole)  # without a password


def _links(path: str) -> tuple[str, str]:
    """A URL of fsspec without its caches: the file, and the archive or the like that holds it."""
    own, sign, rest = path.partition("::")
    return _links(rest) if sign and "://" not in own else (own, f"{sign}{rest}")


def _size(system: Any, info: dict[str, Any]) -> int | None:
    """Bytes of a file; None if unknown, or if reading cannot begin in the middle."""
    from fsspec.archive import AbstractArchiveFileSystem

    size = info.get("size")
    if size is None or not info.get("partial", True) or isinstance(system, AbstractArchiveFileSystem):
        return None
    return None if _is_web(system) and size > BLOCK and not _gives_ranges(system, info["name"]) else int(size)


def _version(info: dict[str, Any]) -> str:
    """Checksum of a file, or the time when it was written, with its name in the file system."""
    return next((f"{mark} {info[mark]}" for mark in VERSIONS if info.get(mark) is not None), "")


def _is_web(system: Any) -> bool:
    return "http" in ([system.protocol] if isinstance(system.protocol, str) else system.protocol)


def _gives_ranges(system: Any, name: str) -> bool:
    """Return whether a server sends ranges of a file, by trying: servers need not declare it."""
    try:
        with system.open(name, "rb", block_size=1) as file:
            file.seek(1)
            return len(file.read(1)) == 1
    except Exception:  # any error of the server
        return False


def _format(extension: str, compression: str) -> str | None:
    """Format of a file; one without extension is text, and Parquet compresses by itself."""
    format = FORMATS.get(extension or ".txt")
    return None if compression and format == "parquet" else format


def _extensions(path: str) -> tuple[str, str]:
    """Extension of a file without its compression (and query, in a URL), and that of the compression."""
    end = path.rsplit("/", 1)[-1].lower()
    end = end.partition("?")[0] if "://" in path else end
    compression = next((own for own in COMPRESSIONS if end.endswith(own)), "")
    return os.path.splitext(end.removesuffix(compression))[1], compression


def _shared_folder(paths: list[str]) -> str:
    """Longest folder shared by all paths, with its final slash; empty without one."""
    folders = [path.split("/")[:-1] for path in paths]
    shared = itertools.takewhile(lambda parts: len({*parts}) == 1, zip(*folders, strict=False))
    return "".join(f"{parts[0]}/" for parts in shared)
