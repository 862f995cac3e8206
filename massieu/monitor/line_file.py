"""Files written line by line, by one process at a time."""

from __future__ import annotations

import contextlib
import os
import weakref
from pathlib import Path

from massieu.checks import UserError
from massieu.monitor.messages import log_message

__all__ = ["LineFile"]


class LineFile:
    """A locked file that grows by whole lines.

    A line reaches the system in one write, so a killed process loses at most the line that it was writing; the next
    opening drops such an incomplete line. (If the machine goes down, the lines of the last seconds may be lost.)

    Attributes:
        path: path of the file.
        whole: length of its whole lines in bytes.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._open, self._warned = path, False, False
        if path.parent != Path() and not path.parent.is_dir():
            raise UserError(f"{path} cannot be written: there is no folder {path.parent}; create it first")
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
        try:
            self._file = os.open(path, flags, 0o644)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}; choose another path") from error
        self._open = True
        try:
            _lock(self._file, path)
            self.whole = _drop_half_line(self._file)
        except BaseException:
            self.close()
            raise
        _OPEN.add(self)

    def write(self, line: str) -> bool:
        """Append one line or several; return whether this succeeded."""
        data = memoryview(line.encode() + b"\n")
        if not self._open:
            raise UserError(f"{self.path} is closed; open another sink to write on")
        try:
            while data:
                data = data[os.write(self._file, data) :]
            self.whole = os.fstat(self._file).st_size
        except OSError as error:  # a full disk does not end the training
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self.whole)
            if not self._warned:
                self._warned = True
                log_message(f"{self.path} could not be written: {error.strerror}; it will miss readings")
            return False
        return True

    def first(self) -> str:
        """Return the first line, without its end; empty if there is none."""
        os.lseek(self._file, 0, os.SEEK_SET)
        with os.fdopen(self._file, "rb", closefd=False) as file:
            return file.readline().decode(errors="replace").rstrip("\r\n")

    def close(self) -> None:
        """Close the file and release its lock."""
        if self._open:
            self._open = False
            os.close(self._file)

    def __del__(self) -> None:
        self.close()


_OPEN: weakref.WeakSet[LineFile] = weakref.WeakSet()


def _close_all() -> None:
    for file in list(_OPEN):
        file.close()


if hasattr(os, "register_at_fork"):
    # A lock lasts until the last copy of the open file is closed, and forks, such as data loader workers, have one.
    os.register_at_fork(after_in_child=_close_all)


def _lock(file: int, path: Path) -> None:
    """Refuse a file that another log writes: its incomplete line may be the next one of another process."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return
    try:
        # Not lockf, whose lock is gone as soon as this process has read the file and closed it.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"{path} is being written already, by this process or another; close that log, or log to another file"
        ) from None
    except OSError:
        return  # a file system without locks


def _drop_half_line(file: int) -> int:
    """Drop everything behind the last end of a line, and return the remaining length."""
    size = end = os.fstat(file).st_size
    while end > 0:
        begin = max(0, end - 65536)
        os.lseek(file, begin, os.SEEK_SET)
        found = os.read(file, end - begin).rfind(b"\n")
        if found >= 0:
            end = begin + found + 1
            break
        end = begin
    if end < size:
        os.ftruncate(file, end)
    return end
