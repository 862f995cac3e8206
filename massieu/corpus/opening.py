"""Open files on this machine or elsewhere, compressed or not."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import os
import stat
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple, cast

from massieu.checks import UserError, optional_package

__all__ = ["BLOCK", "COMPRESSIONS", "Elsewhere", "damage", "file_system", "is_local", "needed", "opened", "unreadable"]

PATIENCE = 30.0  # seconds for a process to open the other end of a pipe
BLOCK = 1 << 18  # bytes requested at once of a file that is not on this machine


def _open_zstandard(file: IO[bytes]) -> Any:
    return io.BufferedReader(needed("pyarrow").CompressedInputStream(file, "zstd"), BLOCK)


COMPRESSIONS: dict[str, Callable[..., Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstandard,
}
"""Functions that open compressed files, by extension."""


class Elsewhere(NamedTuple):
    """Place of a file that is not in the file system of this machine.

    Attributes:
        system: file system of fsspec; it can be pickled.
        path: path of the file there.
        stream: whether it can be read from its beginning only.
    """

    system: Any
    path: str
    stream: bool = False


@contextlib.contextmanager
def opened(path: str, compression: str = "", elsewhere: Elsewhere | None = None) -> Iterator[IO[bytes]]:
    """Open a file and decompress it."""
    with _stored(path, elsewhere) as file:
        if not compression:
            yield file
            return
        with COMPRESSIONS[compression](file) as plain:
            yield plain


def damage(error: Exception) -> str | None:
    """Return the defect of a compressed or a Parquet file; None for an error unrelated to the content."""
    # The standard library and pyarrow report bad content by errors without number, which the system never does.
    plain = type(error) is OSError and error.errno is None
    known = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, UnicodeDecodeError)
    arrow = type(error).__name__ in ("ArrowInvalid", "ArrowNotImplementedError")  # pyarrow may not be installed
    if not (plain or arrow or isinstance(error, known)):
        return None
    return " ".join(str(error).split())[:120] or type(error).__name__


def file_system(path: str) -> tuple[Any, str]:
    """Return the file system of a path, and the path there."""
    core = needed("fsspec.core")
    try:
        system, place = core.url_to_fs(path)
    except Exception as error:  # an unknown protocol, or one that needs another package
        raise unreadable(path, error) from error
    return system, str(place)


def needed(module: str) -> Any:
    """Return a module of a package that reads some files."""
    return optional_package(module, "reading this", "inspect")


def is_local(system: Any) -> bool:
    """Return whether a file system is that of this machine."""
    return "file" in ([system.protocol] if isinstance(system.protocol, str) else system.protocol)


def unreadable(path: str, error: Exception) -> UserError:
    """Return the error for a path that cannot be opened or read to the end."""
    why = getattr(error, "strerror", None) or " ".join(str(error).split())[:160] or type(error).__name__
    return UserError(f"{path} cannot be read: {why}; check the path and its permissions")


def _stored(path: str, elsewhere: Elsewhere | None) -> IO[bytes]:
    try:
        if elsewhere is None:
            return _pipe(path) if stat.S_ISFIFO(os.stat(path).st_mode) else open(path, "rb")
        file = elsewhere.system.open(elsewhere.path, "rb", block_size=0 if elsewhere.stream else BLOCK)
    except Exception as error:  # any error of the file system
        raise unreadable(path, error) from error
    if isinstance(file, io.BytesIO):  # in memory, where all readers share one position
        return io.BytesIO(file.getvalue())
    return cast(IO[bytes], io.BufferedReader(file, BLOCK))  # its own lines are slow


def _pipe(path: str) -> IO[bytes]:
    """Open a named pipe; without a timeout, this would wait forever for a process that writes to it."""
    found: list[IO[bytes]] = []
    waiting = threading.Thread(target=lambda: found.append(open(path, "rb")), daemon=True)  # noqa: SIM115
    waiting.start()
    waiting.join(PATIENCE)
    if found:
        return found[0]
    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))  # ends the thread
    waiting.join()
    found[0].close()
    raise TimeoutError(f"nothing has opened it for writing within {PATIENCE:g} seconds")
