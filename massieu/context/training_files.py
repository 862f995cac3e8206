"""Files of a training run: checkpoints in one safetensors file, written atomically, in a folder with one writer."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from massieu.checks import UserError, optional_package
from massieu.context.tasks import Task

__all__ = ["NAME", "Spent", "check_folder", "claimed", "described", "read", "write", "write_text"]

NAME = "checkpoint.safetensors"
FORMAT = "3"  # changes with the names of its tensors and of the recipe
Spent = tuple[float, float]
"""Seconds and CPU seconds of training."""


def described(task: Task) -> dict[str, Any]:
    """Return class and arguments of a task for JSON, tasks inside it included."""
    found: dict[str, Any] = {"class": type(task).__name__}
    for name, value in vars(task).items():
        if not name.startswith("_"):
            plain = described(value) if isinstance(value, Task) else value
            try:
                # As read from JSON, where a tuple is a list.
                found[name] = json.loads(json.dumps(plain.tolist() if isinstance(plain, Tensor) else plain))
            except TypeError:
                kind = type(value).__name__
                raise UserError(
                    f"{name} of a task must be numbers, words, tensors or a task, got {kind}; a checkpoint identifies"
                    " tasks by them, so begin the names of other attributes with _"
                ) from None
    return found


def check_folder(folder: Path, resume: bool) -> None:
    """Raise before training unless a run can begin or resume in the folder."""
    if resume and not (folder / NAME).exists():
        raise UserError(f"there is no {NAME} in {folder} to resume from; start without --resume")
    if not resume and (folder / NAME).exists():
        raise UserError(f"{folder} holds a {NAME} already; go on with --resume, or choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _unwritable(folder, error) from None


@contextlib.contextmanager
def claimed(folder: Path | None) -> Iterator[None]:
    """Lock a folder against other runs; raise if another run has locked it."""
    try:
        import fcntl
    except ImportError:  # no locks on Windows
        fcntl = None  # type: ignore[assignment]
    if folder is None or fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UserError(
            f"another run is writing to {folder}; wait until it has ended, or choose another folder"
        ) from None
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        os.close(handle)


def write(folder: Path, state: dict[str, Tensor], step: int, spent: Spent, identity: dict[str, Any]) -> None:
    """Replace the checkpoint atomically: an interrupted write leaves the old file."""
    save = optional_package("safetensors.torch", "a checkpoint", "verify").save
    tensors = {name: value.detach().contiguous() for name, value in state.items()}
    metadata = {"format": FORMAT, "step": str(step), "spent": json.dumps(spent), "identity": json.dumps(identity)}
    _replace(folder / NAME, save(tensors, metadata))


def write_text(path: Path, text: str) -> None:
    """Replace a file of text atomically."""
    _replace(path, text.encode("utf-8"))


def read(folder: Path, identity: dict[str, Any]) -> tuple[dict[str, Tensor], int, Spent]:
    """Return tensors, step and time of the checkpoint; raise unless it belongs to this task and recipe."""
    safetensors = optional_package("safetensors", "a checkpoint", "verify")
    try:
        with safetensors.safe_open(folder / NAME, "pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        step, stored = int(metadata["step"]), json.loads(metadata["identity"])
        seconds, cpu = map(float, json.loads(metadata["spent"]))
        found = {part: dict(stored[part]) for part in ("task", "recipe")}
        whole = metadata["format"] == FORMAT
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError, OSError):
        whole = False
    if not whole:
        raise UserError(
            f"{folder / NAME} is no whole checkpoint of this massieu learn; delete it, and start without --resume"
        )
    for part in found:
        for name in dict.fromkeys([*identity[part], *found[part]]):
            theirs, ours = found[part].get(name), identity[part].get(name)
            if theirs != ours:
                raise UserError(
                    f"the checkpoint in {folder} is of another {part}, with {name} {theirs}, got {ours};"
                    " resume with the same, or choose another folder"
                )
    return state, step, (seconds, cpu)


def _replace(path: Path, content: bytes) -> None:
    # One fixed name: a kill leaves one such file at most, and the next write replaces it.
    temporary = path.with_name(f".{path.name}.part")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # else a power cut may leave the new name of an empty file
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _unwritable(path.parent, error) from None
        raise


def _unwritable(folder: Path, error: OSError) -> UserError:
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        return UserError(f"{folder} must be a folder, and there is a file in its place; choose another with --out")
    reason = error.strerror or str(error)
    return UserError(f"the folder {folder} cannot be written to: {reason}; make room, or choose another with --out")
