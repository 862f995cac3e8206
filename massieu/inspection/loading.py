"""Models by name: a folder, an installed package that carries a checkpoint, or a Hugging Face id."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from massieu.checks import UserError, pip_install

__all__ = ["Loaded", "load"]

PATIENCE = 10.0  # seconds for the network to say anything
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


class Loaded(NamedTuple):
    """A model, its tokenizer if it has one, and what it goes by."""

    model: nn.Module
    tokenizer: Any | None
    name: str
    revision: str | None


def load(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    device_map: str | Mapping[str, Any] | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    offline: bool = False,
) -> Loaded:
    """Load a model and its tokenizer; whatever goes wrong is one sentence.

    Args:
        name: a folder with ``config.json``, the name of an installed package that carries one, or a Hugging Face id.
        dtype: "auto" (float32, whatever the file holds: statistics of rounded scores are no better than the scores),
            or the name of a dtype.
        device: where the model goes, as torch names it.
        device_map: for a model that is larger than one device, how accelerate spreads its parts: "auto", or a device
            for each part by its name; then ``device`` does not matter. Parts on "disk" are read when they are needed,
            which is enough for the statistics of attention (``experiments="heads"``).
        revision: branch, tag or commit of a Hugging Face id.
        trust_remote_code: whether code that comes with the model may run.
        offline: never ask the network.
    """
    try:
        import transformers
    except ImportError:
        raise UserError(
            f"models by name need the package transformers, which is not installed; {pip_install('inspect')}"
        ) from None
    if dtype != "auto" and dtype not in DTYPES:
        raise UserError(f"dtype must be auto or one of {', '.join(DTYPES)}, got {dtype}; auto means float32")
    place = _place(name)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": offline}
    if revision is not None:
        options["revision"] = revision
    spread: dict[str, Any] = {}
    if device_map is not None:
        if importlib.util.find_spec("accelerate") is None:
            raise UserError("device_map needs the package accelerate, which is not installed; pip install accelerate")
        spread["device_map"] = device_map if isinstance(device_map, str) else dict(device_map)
    if not offline and not Path(place).is_dir() and not _hub_answers(name, revision):
        options["local_files_only"] = True  # what was fetched before, at once and not after a dozen attempts
    hub = logging.getLogger("huggingface_hub")
    level = hub.level
    hub.setLevel(logging.CRITICAL)  # it would tell every attempt to reach a network that is not there
    quiet = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.disable_progress_bar()
    try:
        model = _model(transformers, name, place, DTYPES.get(dtype, torch.float32), options | spread)
        tokenizer = _tokenizer(transformers, place, options)
    finally:
        transformers.logging.set_verbosity(quiet)
        hub.setLevel(level)
        if bars:
            transformers.logging.enable_progress_bar()
    try:
        model = model if spread else model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {device} cannot take the model ({_sentence(error)}); try --device cpu") from error
    found = getattr(model.config, "_commit_hash", None)
    return Loaded(model.eval(), tokenizer, name, found or revision)


def _hub_answers(name: str, revision: str | None) -> bool:
    """Whether the network says anything about an id, asked once."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        HfApi().model_info(name, revision=revision, timeout=PATIENCE)
    except Exception as error:  # of the network, of any library below
        return isinstance(error, (HfHubHTTPError, HFValidationError))  # it says no: the loader finds the words
    return True


def _place(name: str) -> str:
    """Where the checkpoint lies: a folder, or the id as it is."""
    if not name.strip():
        raise UserError("MODEL must be a folder, an installed package or a Hugging Face id, got an empty name")
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"{name} must hold a config.json, and there is none; pass the folder of a saved model")
        _check_weights(name, folder)
        return str(folder)
    if folder.is_file():
        raise UserError(f"MODEL must be a folder, got the file {name}; pass the folder that holds its config.json")
    carried = _carried(name)
    if carried is not None:
        _check_weights(name, carried)
        return str(carried)
    return name


def _carried(name: str) -> Path | None:
    """The checkpoint folder inside an installed package, if that is what the name is."""
    try:
        files = importlib.metadata.files(name) or []
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None
    for file in sorted(files, key=lambda file: len(file.parts)):
        if file.name == "config.json":
            path = Path(str(file.locate()))
            try:
                if "model_type" in json.loads(path.read_text(encoding="utf-8")):
                    return path.parent
            except (OSError, ValueError):
                continue
    raise UserError(f"the installed package {name} carries no checkpoint: no config.json in it names a model_type")


def _check_weights(name: str, folder: Path) -> None:
    """One sentence for a checkpoint of pickles or without weights: torch would run what is in a pickle."""
    files = [file.name for file in folder.iterdir()]
    if any(file.endswith((".safetensors", ".safetensors.index.json")) for file in files):
        return
    pickles = sorted(file for file in files if file.endswith((".bin", ".pt", ".pth", ".ckpt")))
    if pickles:
        raise UserError(
            f"{name} has its weights only as a pickle ({pickles[0]}), which may run code when it is read;"
            " convert it with save_pretrained, which writes safetensors"
        )
    raise UserError(f"{name} must hold weights in safetensors files, and there are none; save the model there again")


def _model(transformers: Any, name: str, place: str, dtype: torch.dtype, options: dict[str, Any]) -> nn.Module:
    from safetensors import SafetensorError

    try:
        model: nn.Module = transformers.AutoModel.from_pretrained(place, use_safetensors=True, dtype=dtype, **options)
    except SafetensorError as error:
        raise UserError(
            f"the weights of {name} cannot be read ({_sentence(error)}); the file is damaged, fetch or save it again"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError) as error:
        raise UserError(_why_not(name, place, error)) from error
    return model


def _why_not(name: str, place: str, error: Exception) -> str:
    text = str(error)
    if "trust_remote_code" in text:
        return f"{name} needs code of its own to run; read that code, then pass --trust-remote-code if you trust it"
    if Path(place).is_dir():
        if "size mismatch" in text or "ignore_mismatched_sizes" in text:
            return f"the weights in {name} do not fit its config.json; save the model there again"
        return f"{name} cannot be loaded ({_sentence(error)}); pass the folder of a saved transformers model"
    if "safetensors" in text:
        return (
            f"{name} has no weights in safetensors, and a pickle may run code when it is read;"
            " convert it with save_pretrained, which writes safetensors"
        )
    return (
        f"there is no folder, no installed package and no reachable Hugging Face model called {name};"
        " check the name, or the network if it is an id"
    )


def _tokenizer(transformers: Any, place: str, options: dict[str, Any]) -> Any | None:
    """The tokenizer of the checkpoint; None where there is none, as for images."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, **options)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError):
        return None
    # Some kinds are made up without any file, and know no word.
    return tokenizer if getattr(tokenizer, "vocab_size", 1) else None


def _sentence(error: BaseException) -> str:
    """The first sentence of an error, on one line."""
    text = " ".join(str(error).split()).strip() or type(error).__name__
    return text.split(". ")[0].rstrip(".")[:160]
