"""Models by name: a folder, an installed package that carries a checkpoint, or a Hugging Face id."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from massieu.checks import UserError, check_choice, optional_package
from massieu.models.loaded_weights import check_weights, unwrapping
from massieu.models.tokenization import has_words
from massieu.models.weight_files import INDEX, SINGLE, StoredWeights, check_shard_names, stored_tensors

__all__ = ["Loaded", "load"]

PATIENCE = 10.0  # seconds for an answer of the network
LARGER = 2
"""Largest ratio of the parameters of a model to those in its files: heads may be missing, not whole blocks."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


class Loaded(NamedTuple):
    """A model with its tokenizer.

    Attributes:
        model: the model, in evaluation mode.
        tokenizer: its tokenizer; None if it has none, or none that can be loaded.
        name: name of the model.
        revision: commit of a Hugging Face id.
        notes: sentences on what was repaired or ignored when the model was loaded.
        tokenizer_fault: sentence on a tokenizer that could not be loaded; None if it was, or if there is none.
    """

    model: nn.Module
    tokenizer: Any | None
    name: str
    revision: str | None
    notes: list[str]
    tokenizer_fault: str | None = None


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
    """Load a model and its tokenizer; all errors are :class:`~massieu.checks.UserError`.

    Args:
        name: a folder with ``config.json``, the name of an installed package that carries one, or a Hugging Face id.
        dtype: "auto" (float32 for any file, since statistics of rounded scores are no better than the scores), or the
            name of a dtype.
        device: device of the model, as torch names it.
        device_map: for a model that is larger than one device, a placement by accelerate: "auto", or a device for each
            part by its name; then ``device`` does not matter. Parts on "disk" are read when needed, which is enough
            for the statistics of attention (``experiments="heads"``).
        revision: branch, tag or commit of a Hugging Face id.
        trust_remote_code: whether code that comes with the model may run.
        offline: never use the network.
    """
    transformers = optional_package("transformers", "a model by name", "inspect")
    check_choice(dtype, "dtype", ("auto", *DTYPES))
    folder = _folder(name)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": offline}
    if revision is not None:
        options["revision"] = revision
    spread = _spread(device_map)
    if not offline and folder is None and not _hub_answers(name, revision):
        options["local_files_only"] = True  # use the cache at once, not after a dozen attempts
    with _quiet(transformers):
        if folder is None:
            snapshot, place = _fetched(name, options), name
            options["revision"] = revision = snapshot.name
        else:
            snapshot, place = folder, str(folder)
        stored = stored_tensors(name, snapshot)
        _check_size(transformers, name, snapshot, trust_remote_code, stored)
        spread["dtype"] = DTYPES.get(dtype, torch.float32)
        model, notes = _model(transformers, name, place, options | spread, stored)
        tokenizer, fault = _tokenizer(transformers, name, place, snapshot, options)
    if device_map is None:
        model = _moved(model, device)
    return Loaded(model.eval(), tokenizer, name, revision, notes, fault)


def _spread(device_map: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments of transformers that spread a model over devices; none for one device."""
    if device_map is None:
        return {}
    if importlib.util.find_spec("accelerate") is None:
        raise UserError("device_map needs the package accelerate, which is not installed; pip install accelerate")
    return {"device_map": device_map if isinstance(device_map, str) else dict(device_map)}


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Turn off progress bars and messages of libraries: notes and errors replace them."""
    hub = logging.getLogger("huggingface_hub")
    level, verbosity = hub.level, transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    hub.setLevel(logging.CRITICAL)  # it logs every attempt to reach a missing network
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        hub.setLevel(level)
        if bars:
            transformers.logging.enable_progress_bar()


def _moved(model: nn.Module, device: str) -> nn.Module:
    try:
        if torch.device(device).type == "meta":
            raise UserError("device meta holds no numbers, so nothing could be measured; try --device cpu")
        return model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {device} cannot take the model ({_sentence(error)}); try --device cpu") from error


def _hub_answers(name: str, revision: str | None) -> bool:
    """Return whether the network answers a single request for an id."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        HfApi().model_info(name, revision=revision, timeout=PATIENCE)
    except Exception as error:  # of the network, of any library below
        return isinstance(error, (HfHubHTTPError, HFValidationError))  # a refusal, which loading explains
    return True


def _fetched(name: str, options: Mapping[str, Any]) -> Path:
    """Fetch the configuration and the weights of a Hugging Face id, and return the folder in the cache."""
    from transformers.utils.hub import cached_file

    how = {key: value for key, value in options.items() if key != "trust_remote_code"}

    def fetch(file: str) -> Path | None:
        found = cached_file(name, file, **how, _raise_exceptions_for_missing_entries=False)
        return None if found is None else Path(found)

    try:
        config = fetch("config.json")
        adapter = fetch("adapter_config.json")
        # The names in an index are checked before their files are fetched.
        index = None if config is None or fetch(SINGLE) is not None else fetch(INDEX)
        for shard in () if index is None else check_shard_names(name, index):
            fetch(shard)
    except UserError:
        raise
    except Exception as error:  # of the network, of the disk, of any library below
        raise UserError(_why_not(name, name, error)) from error
    if config is None and adapter is None:
        raise UserError(_why_not(name, name, OSError("no config.json")))
    return (config or adapter or Path()).parent


def _folder(name: str) -> Path | None:
    """Folder of the checkpoint on this machine; None for a Hugging Face id."""
    if not name.strip() or not name.isprintable():
        shown = "an empty name" if not name.strip() else repr(name)[:80]
        raise UserError(f"MODEL must be a folder, an installed package or a Hugging Face id, got {shown}")
    try:
        folder = Path(name).expanduser()
        is_folder, is_file = folder.is_dir(), folder.is_file()
        if is_folder:
            _check_content(name, folder)
    except (OSError, RuntimeError) as error:  # too long, no such user, unreadable
        raise UserError(f"MODEL must be a folder that can be read, got {name[:80]} ({_sentence(error)})") from None
    if is_file:
        if folder.suffix == ".gguf":
            raise UserError(_gguf_advice(name, str(folder.parent), folder.name))
        raise UserError(f"MODEL must be a folder, got the file {name}; pass the folder that holds its config.json")
    return folder if is_folder else _package_folder(name)


def _check_content(name: str, folder: Path) -> None:
    """Raise for a folder that is no saved model of transformers."""
    packed = sorted(file.name for file in folder.iterdir() if file.suffix == ".gguf")
    if packed and not any(folder.glob("*.safetensors")):
        raise UserError(_gguf_advice(name, name, packed[0]))
    if not (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file():
        raise UserError(f"{name} must hold a config.json, and there is none; pass the folder of a saved model")


def _gguf_advice(name: str, folder: str, file: str) -> str:
    how = f"from_pretrained({folder!r}, gguf_file={file!r})"
    return (
        f"{name} holds weights as GGUF, which transformers converts in Python with the packages gguf and accelerate:"
        f" model = transformers.AutoModel.{how}; tokenizer = transformers.AutoTokenizer.{how}; then"
        " massieu.inspect_model(model, texts, tokenizer=tokenizer)"
    )


def _package_folder(name: str) -> Path | None:
    """Folder of the checkpoint inside an installed package; None if there is no such package."""
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


def _model(
    transformers: Any, name: str, place: str, options: dict[str, Any], stored: StoredWeights
) -> tuple[nn.Module, list[str]]:
    """The model, and notes on its weights."""
    mapping, notes = unwrapping(stored.sizes)
    how = {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True, **options}
    if mapping:
        how["key_mapping"] = mapping
    with _one_sentence(name, place):
        model, report = transformers.AutoModel.from_pretrained(place, **how)
    return model, [*notes, *check_weights(name, model, report)]


def _check_size(transformers: Any, name: str, folder: Path, trusted: bool, stored: StoredWeights) -> None:
    """Raise for a model much larger than its files, before memory is allocated for missing weights."""
    if stored.config.get("quantization_config") is not None or (trusted and "auto_map" in stored.config):
        return  # several weights in one element; code of its own
    with _one_sentence(name, str(folder)), torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trusted)
        model = transformers.AutoModel.from_config(config, trust_remote_code=trusted)
    wanted, held = sum(parameter.numel() for parameter in model.parameters()), sum(stored.sizes.values())
    if wanted > LARGER * held:
        raise UserError(
            f"the config.json of {name} describes a model of {wanted:,} parameters, but the files hold {held:,};"
            " correct model_type and sizes in it, or save the model there again"
        )


@contextlib.contextmanager
def _one_sentence(name: str, place: str) -> Iterator[None]:
    """Turn any error of transformers into one sentence: files of a model can break it anywhere."""
    try:
        yield
    except Exception as error:
        raise UserError(_why_not(name, place, error)) from error


def _why_not(name: str, place: str, error: Exception) -> str:
    text = str(error)
    if "trust_remote_code" in text:
        return f"{name} needs code of its own to run; read that code, then pass --trust-remote-code if you trust it"
    if Path(place).is_dir():
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


def _tokenizer(
    transformers: Any, name: str, place: str, folder: Path, options: dict[str, Any]
) -> tuple[Any | None, str | None]:
    """The tokenizer of the checkpoint, None without one, as for images; and its fault as a sentence."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, **options)
        if has_words(tokenizer):
            return tokenizer, None
        fault = "knows no word (are its files missing?)"
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # files of a model can break it anywhere; a panic of Rust is no Exception
        fault = f"cannot be loaded ({_sentence(error)})"
    if not any(folder.glob("*token*")):
        return None, None  # transformers tried to make up one without any file
    return None, f"{name} has a tokenizer, but its tokenizer {fault}; save it there again"


def _sentence(error: BaseException) -> str:
    """The first sentence of an error, on one line."""
    text = " ".join(str(error).split()).strip()
    known = isinstance(error, (OSError, ValueError, RuntimeError)) and text
    text = text if known else f"{type(error).__name__}: {text}" if text else type(error).__name__
    return "".join(sign if sign.isprintable() else "?" for sign in text.split(". ")[0].rstrip(".")[:160])
