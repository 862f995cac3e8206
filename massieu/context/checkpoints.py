"""Checkpoints of a training run: one safetensors file that is always whole."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from massieu.context.extras import imported
from massieu.context.tasks import Task

__all__ = ["NAME", "check_folder", "described", "read", "write", "write_text"]

NAME = "checkpoint.safetensors"


def described(task: Task) -> dict[str, Any]:
    """A task as JSON takes it: its class and everything it was built with."""
    public = {name: value for name, value in vars(task).items() if not name.startswith("_")}
    values = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in public.items()}
    # As JSON gives it back, where a tuple is a list.
    found: dict[str, Any] = json.loads(json.dumps({"class": type(task).__name__, **values}, default=str))
    return found


def check_folder(folder: Path, resume: bool) -> None:
    """One sentence now, rather than at the first checkpoint, unless a run can begin or go on there."""
    if resume and not (folder / NAME).exists():
        raise ValueError(f"there is no {NAME} in {folder} to resume from; start without --resume")
    if not resume and (folder / NAME).exists():
        raise ValueError(f"{folder} holds a {NAME} already; go on with --resume, or choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = error.strerror or str(error)
        raise ValueError(f"the folder {folder} cannot be written to: {why}; choose another with --out") from None


def write(folder: Path, state: dict[str, Tensor], step: int, identity: dict[str, Any]) -> None:
    """Replace the checkpoint; whoever is killed meanwhile leaves the one before."""
    save = imported("safetensors.torch", "a checkpoint").save_file
    tensors = {name: value.detach().contiguous() for name, value in state.items()}
    metadata = {"step": str(step), "identity": json.dumps(identity)}
    _replace(folder / NAME, lambda place: save(tensors, place, metadata))


def write_text(path: Path, text: str) -> None:
    """Replace a file of text, whole or not at all."""
    _replace(path, lambda place: Path(place).write_text(text, encoding="utf-8"))


def read(folder: Path, identity: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    """Tensors and step of the checkpoint; one sentence unless it belongs to this task and recipe."""
    safetensors = imported("safetensors", "a checkpoint")
    try:
        with safetensors.safe_open(folder / NAME, "pt") as file:
            metadata = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        step, told = int(metadata["step"]), json.loads(metadata["identity"])
        found = {part: dict(told[part]) for part in ("task", "recipe")}
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError, OSError):
        raise ValueError(
            f"{folder / NAME} is no whole checkpoint of massieu learn; delete it, and start without --resume"
        ) from None
    for part in found:
        for name in dict.fromkeys([*identity[part], *found[part]]):
            theirs, ours = found[part].get(name), identity[part].get(name)
            if theirs != ours:
                raise ValueError(
                    f"the checkpoint in {folder} is of another {part}, with {name} {theirs}, got {ours};"
                    " resume with the same, or choose another folder"
                )
    return state, step


def _replace(path: Path, write_to: Callable[[str], object]) -> None:
    # Always the same name beside it: a kill leaves one such file at most, which the next write takes for its own.
    place = path.with_name(f".{path.name}.part")
    try:
        write_to(str(place))
        os.replace(place, path)
    except BaseException:
        place.unlink(missing_ok=True)
        raise
