"""Publish the files of a run in a folder: all of them or none, with a manifest that says which belong together.

Files are written into a hidden folder first. Once a journal with their digests is there, they belong into the folder:
they are moved, files of the run before that are not written again are removed, and the journal becomes the manifest.
A process that is killed before the journal leaves the old files; one that is killed after it leaves moves that the
next reader or writer finishes.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

from massieu.checks import UserError

__all__ = ["MANIFEST", "check_writable", "is_listed", "replaced", "settle", "verified", "written_together"]

MANIFEST = "manifest.json"
SCHEMA = "massieu.manifest/1"
PREFIX = ".massieu-"
LOCK = "lock"
PATIENCE = 10.0
"""Seconds to wait for a process that moves its files at the moment."""

ABANDONED = 86_400.0
"""Seconds after which a hidden folder without a lock belongs to no process any more."""

PAGES = {"inspection": "report.html", "comparison": "comparison.html", "verification": "claims.html"}
"""The page that a run publishes, by its kind."""

TITLES = {"inspection": "report", "comparison": "comparison", "verification": "verdicts"}


@contextlib.contextmanager
def written_together(folder: Path, kind: str, about: str = "") -> Iterator[Path]:
    """A place to write files that move into ``folder`` when all are there; otherwise everything is as it was before.

    Args:
        folder: where; files there that the manifest does not name stay.
        kind: one of :data:`PAGES`; files of the last run of the same kind are replaced.
        about: what the files are about, such as the name of a model.
    """
    made, done = _absent(folder), False
    try:
        with _staged(folder) as place:
            yield place / "new"
            _publish(place, folder, kind, about)
            done = True
    except OSError as error:
        why = error.strerror or str(error)
        raise UserError(f"the folder {folder} cannot be written to: {why}; choose another with --out") from error
    finally:
        if not done:
            _remove(made)


def check_writable(folder: Path) -> None:
    """One sentence now, rather than after minutes of work, if nothing can be written there.

    What a killed process left in the folder is finished or removed.
    """
    made = _absent(folder)
    try:
        with _staged(folder):
            _read_manifest(folder, strict=True)
    except OSError as error:
        why = error.strerror or str(error)
        raise UserError(f"the folder {folder} cannot be written to: {why}; choose another with --out") from error
    finally:
        _remove(made)


def replaced(folder: Path, kind: str) -> str | None:
    """What a run of this kind replaces in a folder, as a sentence; None if nothing."""
    page, run = folder / PAGES[kind], _read_manifest(folder)["runs"].get(kind)
    if run is None and not page.exists():
        return None
    date = datetime.date.fromtimestamp((page if page.exists() else folder / MANIFEST).stat().st_mtime)
    about = f" on {run['about']}" if run is not None and run["about"] else ""
    return f"replaces the {TITLES[kind]} of {date}{about} in {folder}/"


def settle(folder: Path) -> None:
    """Finish what a killed process began to publish, and remove what it left besides."""
    with contextlib.suppress(OSError):  # a folder in which nothing can be written
        for place in sorted(folder.glob(f"{PREFIX}*")):
            with _taken(place, PATIENCE if _journal(place).exists() else 0.0) as taken:
                if taken and _journal(place).exists():
                    _move(place, folder)
                if taken:
                    shutil.rmtree(place, ignore_errors=True)


def is_listed(path: Path) -> bool | None:
    """Whether the manifest beside a file names it; None if there is no manifest."""
    runs = _read_manifest(path.parent)["runs"].values()
    return any(path.name in run["files"] for run in runs) if runs else None


def verified(path: Path) -> Path:
    """A published file, once it was compared with the manifest beside it, if there is one."""
    settle(path.parent)
    for run in _read_manifest(path.parent)["runs"].values():
        expected = run["files"].get(path.name)
        if expected is not None and path.exists() and _digest(path) != expected:
            raise UserError(
                f"{path} is not the file that its run has written, by the digest in {MANIFEST}; inspect again, or"
                f" remove {MANIFEST} to read it all the same"
            )
    return path


def _publish(place: Path, folder: Path, kind: str, about: str) -> None:
    """Write the journal, which decides, and do what it says."""
    new = place / "new"
    names = _names(new)
    for name in names:
        if (folder / name).is_dir():
            raise IsADirectoryError(errno.EISDIR, f"there is a folder called {name}")
    manifest = _read_manifest(folder, strict=True)
    manifest["runs"][kind] = {"about": about, "files": {name.as_posix(): _digest(new / name) for name in names}}
    made = _absent(*(folder / name.parent for name in names))
    draft = place / "draft"
    draft.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    os.replace(draft, _journal(place))
    try:
        _move(place, folder)
    except BaseException:
        if _journal(place).exists():
            _journal(place).unlink()
            _move_back(place, folder, names)
            _remove(made)
        raise


def _move(place: Path, folder: Path) -> None:
    """Do what the journal says; what was done before a kill is not done again."""
    new, old = place / "new", place / "old"
    after = json.loads(_journal(place).read_text(encoding="utf-8"))
    for stale in [*_stale(_read_manifest(folder), after, folder)]:
        _put(folder / stale, old / stale)
    for name in _names(new):
        if (folder / name).exists():
            _put(folder / name, old / name)
        _put(new / name, folder / name)
    os.replace(_journal(place), folder / MANIFEST)
    _remove([parent for name in _names(old) for parent in (folder / name).parents if folder in parent.parents])


def _move_back(place: Path, folder: Path, names: list[Path]) -> None:
    """Undo what was moved: new files go, and those that they replaced come back."""
    for name in names:
        if not (place / "new" / name).exists():
            (folder / name).unlink(missing_ok=True)
    for name in _names(place / "old"):
        _put(place / "old" / name, folder / name)


def _stale(before: dict[str, Any], after: dict[str, Any], folder: Path) -> Iterator[str]:
    """Files of the runs before which are as they were written, and which the new runs do not have."""
    kept = {name for run in after["runs"].values() for name in run["files"]}
    for run in before["runs"].values():
        for name, digest in run["files"].items():
            path = folder / name
            if name not in kept and path.is_file() and _digest(path) == digest:  # a user may have changed it
                yield name


@contextlib.contextmanager
def _staged(folder: Path) -> Iterator[Path]:
    """A hidden folder in another one, locked while this process uses it."""
    folder.mkdir(parents=True, exist_ok=True)
    settle(folder)
    place, lock = _claimed(folder)
    try:
        with lock:
            (place / "new").mkdir()
            yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _claimed(folder: Path) -> tuple[Path, IO[bytes]]:
    """A new hidden folder and its lock; until it is locked, another process may remove it as one that was left."""
    while True:
        place = Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder))
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as stack:
            lock = stack.enter_context(open(place / LOCK, "ab"))
            if _lock(lock) is not False and (place / LOCK).exists():
                stack.pop_all()
                return place, lock


@contextlib.contextmanager
def _taken(place: Path, patience: float) -> Iterator[bool]:
    """Whether no process uses a hidden folder any more; inside, no other process takes it."""
    end = time.monotonic() + patience
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(open(place / LOCK, "ab"))  # a kill may come before there is one
        except OSError:
            yield _is_old(place)
            return
        free = _lock(lock)
        while free is False and time.monotonic() < end:
            time.sleep(0.01)
            free = _lock(lock)
        yield _is_old(place) if free is None else free and place.exists()


def _lock(file: IO[bytes]) -> bool | None:
    """Lock a file for this process; False if another one has it, None if the system cannot tell."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # Windows, or a file system without locks
        return None
    return True


def _is_old(place: Path) -> bool:
    try:
        return time.time() - place.stat().st_mtime > ABANDONED
    except OSError:
        return False


def _journal(place: Path) -> Path:
    return place / MANIFEST


def _read_manifest(folder: Path, *, strict: bool = False) -> dict[str, Any]:
    """The manifest of a folder, empty if there is none; strict, a file of that name that is no manifest is refused."""
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if content["schema"] == SCHEMA and all(_is_run(run) for run in content["runs"].values()):
            return {"schema": SCHEMA, "runs": dict(content["runs"])}
    except FileNotFoundError:
        return {"schema": SCHEMA, "runs": {}}
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        pass
    if strict:
        raise UserError(f"{folder / MANIFEST} is no manifest of massieu and would be replaced; choose another folder")
    return {"schema": SCHEMA, "runs": {}}


def _is_run(run: Any) -> bool:
    """Whether an entry of a manifest names files below its folder, with their digests."""
    if not isinstance(run["about"], str):
        return False
    for name, digest in run["files"].items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not isinstance(digest, str):
            return False
    return True


def _digest(path: Path) -> str:
    """SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _put(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(source, target)


def _names(folder: Path) -> list[Path]:
    """Files below a folder, relative to it."""
    return [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]


def _absent(*folders: Path) -> list[Path]:
    """Those of the folders and the folders around them that do not exist, the innermost first."""
    every = {path for folder in folders for path in (folder, *folder.parents)}
    return sorted((path for path in every if not path.exists()), key=lambda path: -len(path.parts))


def _remove(folders: list[Path]) -> None:
    """Remove folders that are there and empty."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()
