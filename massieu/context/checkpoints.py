"""Checkpoints of a training run: one safetensors file that is always whole, in a folder that one run writes to."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from massieu.checks import UserError
from massieu.context.extras import imported
from massieu.context.tasks import Task

__all__ = ["NAME", "Spent", "check_folder", "claimed", "described", "read", "write", "write_text"]

NAME = "checkpoint.safetensors"
FORMAT = "2"  # changes with the names of its tensors
Spent = tuple[float, float]
"""Seconds and CPU seconds of training."""


def described(task: Task) -> dict[str, Any]:
    """A task as JSON takes it: its class and everything it was built with, tasks inside it as well."""
    found: dict[str, Any] = {"class": type(task).__name__}
    for name, value in vars(task).items():
        if not name.startswith("_"):
            plain = described(value) if isinstance(value, Task) else value
            try:
                # As JSON gives it back, where a tuple is a list.
                found[name] = json.loads(json.dumps(plain.tolist() if isinstance(plain, Tensor) else plain))
            except TypeError:
                kind = type(value).__name__
                raise UserError(
                    f"{name} of a task must be numbers, words, tensors or a task, got {kind}; a checkpoint tells"
                    " tasks apart by them, so give what is no part of the task a name that begins with _"
                ) from None
    return found


def check_folder(folder: Path, resume: bool) -> None:
    """One sentence now, rather than at the first checkpoint, unless a run can begin or go on there."""
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
    """Keep other runs out of a folder until the end, however it comes; one sentence where another has it."""
    try:
        import fcntl
    except ImportError:  # on Windows nobody is kept out
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
    """Replace the checkpoint; whoever is killed meanwhile leaves the one before."""
    save = imported("safetensors.torch", "a checkpoint").save
    tensors = {name: value.detach().contiguous() for name, value in state.items()}
    metadata = {"format": FORMAT, "step": str(step), "spent": json.dumps(spent), "identity": json.dumps(identity)}
    _replace(folder / NAME, save(tensors, metadata))


def write_text(path: Path, text: str) -> None:
    """Replace a file of text, whole or not at all."""
    _replace(path, text.encode("utf-8"))


def read(folder: Path, identity: dict[str, Any]) -> tuple[dict[str, Tensor], int, Spent]:
    """Tensors, step and time of the checkpoint; one sentence unless it belongs to this task and recipe."""
    safetensors = imported("safetensors", "a checkpoint")
    try:
        with safetensors.safe_open(folder / NAME, "pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        step, told = int(metadata["step"]), json.loads(metadata["identity"])
        seconds, cpu = map(float, json.loads(metadata["spent"]))
        found = {part: dict(told[part]) for part in ("task", "recipe")}
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
    # Always the same name beside it: a kill leaves one such file at most, which the next write takes for its own.
    place = path.with_name(f".{path.name}.part")
    try:
        with open(place, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # else a power cut may leave the new name with nothing behind it
        os.replace(place, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            place.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _unwritable(path.parent, error) from None
        raise


def _unwritable(folder: Path, error: OSError) -> UserError:
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        return UserError(f"{folder} must be a folder, and there is a file in its place; choose another with --out")
    why = error.strerror or str(error)
    return UserError(f"the folder {folder} cannot be written to: {why}; make room, or choose another with --out")
