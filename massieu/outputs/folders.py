"""Publish the files of a run in a folder: all of them or none, with a manifest of the files that belong together.

Files are written into a hidden staging folder, then a journal with their digests. Once the journal exists, the files
are moved into the folder, stale files of the previous run are removed, and the journal becomes the manifest. A process
killed before the journal leaves the old files; after it, the next reader or writer finishes the moves.
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

__all__ = ["MANIFEST", "check_digest", "check_writable", "in_manifest", "publish", "recover", "replaced_report"]

MANIFEST = "manifest.json"
SCHEMA = "massieu.manifest/1"
PREFIX = ".massieu-"
LOCK = "lock"
PATIENCE = 10.0
"""Seconds to wait for a process that is moving its files."""

ABANDONED = 86_400.0
"""Seconds after which a staging folder without a lock counts as abandoned."""

PAGES = {"inspection": "report.html", "comparison": "comparison.html", "verification": "claims.html"}
"""Page of a run, by the kind of the run."""

TITLES = {"inspection": "report", "comparison": "comparison", "verification": "verdicts"}


@contextlib.contextmanager
def publish(folder: Path, kind: str, about: str = "") -> Iterator[Path]:
    """Yield a staging folder whose files move into ``folder`` at the end; after an error nothing has changed.

    Args:
        folder: destination; files that its manifest does not name stay.
        kind: one of :data:`PAGES`; files of the last run of the same kind are replaced.
        about: subject of the files, such as the name of a model.
    """
    made, done = _missing(folder), False
    try:
        with _reported(folder), _staging(folder) as place:
            yield place / "new"
            _commit(place, folder, kind, about)
            done = True
    finally:
        if not done:
            _remove_empty(made)


def check_writable(folder: Path) -> None:
    """Raise before minutes of work if the folder cannot be written to; recover it from a killed process."""
    made = _missing(folder)
    try:
        with _reported(folder), _staging(folder):
            _read_manifest(folder, strict=True)
    finally:
        _remove_empty(made)


@contextlib.contextmanager
def _reported(folder: Path) -> Iterator[None]:
    """Turn errors of the file system into a sentence."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise UserError(f"the folder {folder} cannot be written to: {why}; choose another with --out") from error


def replaced_report(folder: Path, kind: str) -> str | None:
    """Return a sentence on the report that a run of this kind replaces in a folder; None if there is none."""
    page, run = folder / PAGES[kind], _read_manifest(folder)["runs"].get(kind)
    if run is None and not page.exists():
        return None
    date = datetime.date.fromtimestamp((page if page.exists() else folder / MANIFEST).stat().st_mtime)
    about = f" on {run['about']}" if run is not None and run["about"] else ""
    return f"replaces the {TITLES[kind]} of {date}{about} in {folder}/"


def recover(folder: Path) -> None:
    """Finish the moves of a killed process, and remove abandoned staging folders."""
    with contextlib.suppress(OSError):  # a folder without write permission
        for place in sorted(folder.glob(f"{PREFIX}*")):
            with _abandoned(place, PATIENCE if (place / MANIFEST).exists() else 0.0) as abandoned:
                if abandoned and (place / MANIFEST).exists():
                    _move(place, folder)
                if abandoned:
                    shutil.rmtree(place, ignore_errors=True)


def in_manifest(path: Path) -> bool | None:
    """Return True if the manifest beside a file names it; None if there is no manifest."""
    runs = _read_manifest(path.parent)["runs"].values()
    return any(path.name in run["files"] for run in runs) if runs else None


def check_digest(path: Path) -> Path:
    """Return the path; raise if the file differs from its digest in the manifest beside it."""
    recover(path.parent)
    for run in _read_manifest(path.parent)["runs"].values():
        expected = run["files"].get(path.name)
        if expected is not None and path.exists() and _digest(path) != expected:
            raise UserError(
                f"{path} is not the file that its run has written, by the digest in {MANIFEST}; inspect again, or"
                f" remove {MANIFEST} to read it all the same"
            )
    return path


def _commit(place: Path, folder: Path, kind: str, about: str) -> None:
    """Write the journal, which makes the change final, and execute it."""
    new = place / "new"
    names = _names(new)
    for name in names:
        if (folder / name).is_dir():
            raise IsADirectoryError(errno.EISDIR, f"there is a folder called {name}")
    manifest = _read_manifest(folder, strict=True)
    manifest["runs"][kind] = {"about": about, "files": {name.as_posix(): _digest(new / name) for name in names}}
    made = _missing(*(folder / name.parent for name in names))
    draft = place / "draft"
    draft.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    os.replace(draft, place / MANIFEST)
    try:
        _move(place, folder)
    except BaseException:
        if (place / MANIFEST).exists():
            (place / MANIFEST).unlink()
            _move_back(place, folder, names)
            _remove_empty(made)
        raise


def _move(place: Path, folder: Path) -> None:
    """Execute the journal; moves made before a kill are not repeated."""
    new, old = place / "new", place / "old"
    after = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
    for stale in [*_stale(_read_manifest(folder), after, folder)]:
        _move_file(folder / stale, old / stale)
    for name in _names(new):
        if (folder / name).exists():
            _move_file(folder / name, old / name)
        _move_file(new / name, folder / name)
    os.replace(place / MANIFEST, folder / MANIFEST)
    _remove_empty([parent for name in _names(old) for parent in (folder / name).parents if folder in parent.parents])


def _move_back(place: Path, folder: Path, names: list[Path]) -> None:
    """Undo the moves: remove new files and restore those that they replaced."""
    for name in names:
        if not (place / "new" / name).exists():
            (folder / name).unlink(missing_ok=True)
    for name in _names(place / "old"):
        _move_file(place / "old" / name, folder / name)


def _stale(before: dict[str, Any], after: dict[str, Any], folder: Path) -> Iterator[str]:
    """Yield unchanged files of previous runs that the new runs do not have."""
    kept = {name for run in after["runs"].values() for name in run["files"]}
    for run in before["runs"].values():
        for name, digest in run["files"].items():
            path = folder / name
            if name not in kept and path.is_file() and _digest(path) == digest:  # a user may have changed it
                yield name


@contextlib.contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """Yield a hidden staging folder, locked while this process uses it."""
    folder.mkdir(parents=True, exist_ok=True)
    recover(folder)
    place, lock = _new_staging(folder)
    try:
        with lock:
            (place / "new").mkdir()
            yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _new_staging(folder: Path) -> tuple[Path, IO[bytes]]:
    """Return a new staging folder and its lock; before it is locked another process may remove it as abandoned."""
    while True:
        place = Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder))
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as stack:
            lock = stack.enter_context(open(place / LOCK, "ab"))
            if _lock(lock) is not False and (place / LOCK).exists():
                stack.pop_all()
                return place, lock


@contextlib.contextmanager
def _abandoned(place: Path, patience: float) -> Iterator[bool]:
    """Yield True if no process uses a staging folder; inside, no other process does."""
    end = time.monotonic() + patience
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(open(place / LOCK, "ab"))  # missing after an early kill
        except OSError:
            yield _is_old(place)
            return
        free = _lock(lock)
        while free is False and time.monotonic() < end:
            time.sleep(0.01)
            free = _lock(lock)
        yield _is_old(place) if free is None else free and place.exists()


def _lock(file: IO[bytes]) -> bool | None:
    """Lock a file for this process; return False if another process has the lock, None if locks are not supported."""
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


def _read_manifest(folder: Path, *, strict: bool = False) -> dict[str, Any]:
    """Return the manifest of a folder, empty if there is none; if ``strict``, raise at a file that is no manifest."""
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
    """Return True if an entry of a manifest names files below its folder, with their digests."""
    if not isinstance(run["about"], str):
        return False
    for name, digest in run["files"].items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not isinstance(digest, str):
            return False
    return True


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _move_file(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(source, target)


def _names(folder: Path) -> list[Path]:
    """Return the files below a folder, relative to it."""
    return [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]


def _missing(*folders: Path) -> list[Path]:
    """Return the folders and their parents that do not exist, the innermost first."""
    every = {path for folder in folders for path in (folder, *folder.parents)}
    return sorted((path for path in every if not path.exists()), key=lambda path: -len(path.parts))


def _remove_empty(folders: list[Path]) -> None:
    """Remove the folders that exist and are empty."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()
