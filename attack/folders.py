"""Hostile model folders: broken and forged configurations, weights, indices and tokenizers, links, pipes, odd names.

Each case damages a copy of the embedded model and inspects it. Whatever the damage: one sentence and exit code 2 or 3,
or the values of the intact model; no code of the folder runs, and nothing half-written stays.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attack.children import Ended, complaint, run, warm_up

__all__ = ["COUNT", "attack"]

TEXT = "Call me Ishmael. Some years ago, never mind how long precisely.\n\nIt was a dark night.\n"
TOLERANCE = 1e-4
"""Nats by which entropies may differ: eager and fused attention round differently."""

CONTROL = ("\x1b[2J", "\x07bell", "a\rb", "\x9b31m", "\u202egnp", "[bold]b[/]", "=cmd|' /C calc'!A0")
NUMBERS: tuple[Any, ...] = (
    0,
    -1,
    1.5,
    2**70,
    -(2**70),
    10**11,
    math.inf,
    math.nan,
    "five",
    None,
    True,
    [],
    {},
    [[4]],
    "\x1b[2J",
)
SIZES = ("n_head", "n_layer", "n_embd", "vocab_size", "n_positions", "n_inner")
REFUSED, SAME, EITHER, TOLD, ANY = "refused", "same", "either", "told", "any"
"""Endings: a sentence; the values of the intact model; one of both; also a word on what is not finite; any ending."""

HARMS: list[tuple[Callable[[Case], None], str]] = []


@dataclass
class Case:
    """A copy of the embedded model that a case may damage.

    Attributes:
        place: folder for everything of the case.
        folder: the model.
        random: the choices of the case.
        canary: a file that only code from the model folder would make.
    """

    place: Path
    folder: Path
    random: random.Random
    canary: Path

    @property
    def weights(self) -> Path:
        """File of the weights."""
        return self.folder / "model.safetensors"

    def config(self, **changes: Any) -> None:
        """Change entries of config.json."""
        self.edit("config.json", lambda content: {**content, **changes})

    def edit(self, file: str, change: Callable[[Any], Any]) -> None:
        """Change a JSON file."""
        content = json.loads((self.folder / file).read_text())
        (self.folder / file).write_text(json.dumps(change(content)))

    def tensors(self, change: Callable[[dict[str, Any]], dict[str, Any]], file: str = "model.safetensors") -> None:
        """Change the tensors of the weight file."""
        from safetensors.torch import load_file, save_file

        save_file(change(load_file(self.weights)), self.folder / file, {"format": "pt"})

    def shards(self, change: Callable[[dict[str, str]], Any] = lambda found: found) -> None:
        """Cut the weights into two files, and change the map of their index."""
        from safetensors.torch import load_file, save_file

        every = load_file(self.weights)
        self.weights.unlink()
        where = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(sorted(every))}
        for file in sorted({*where.values()}):
            save_file(
                {name: every[name] for name in where if where[name] == file}, self.folder / file, {"format": "pt"}
            )
        index = {"metadata": {}, "weight_map": change(where)}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index))

    def pickle(self, file: str) -> None:
        """Write a pickle that makes the canary when it is read."""
        canary = str(self.canary)

        class Evil:
            def __reduce__(self) -> tuple[Any, ...]:
                return os.mkdir, (canary,)

        (self.folder / file).write_bytes(pickle.dumps(Evil()))

    def code(self, file: str) -> None:
        """Write a module that makes the canary when it is imported."""
        (self.folder / file).write_text(f"import os\nos.mkdir({str(self.canary)!r})\n")


def harm(ending: str) -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
    """Register a kind of damage."""

    def add(damage: Callable[[Case], None]) -> Callable[[Case], None]:
        HARMS.append((damage, ending))
        return damage

    return add


def attack(seed: int, count: int) -> Iterator[str | None]:
    """Run the cases: every kind of damage once, then again with other random choices."""
    warm_up()
    from massieu import assets

    with tempfile.TemporaryDirectory() as home:
        text = Path(home, "text.txt")
        text.write_text(TEXT)
        intact = run(["inspect", str(assets.MODEL), "--text", str(text), "--heads-only", "--json"], Path(home))
        expected = _entropies(intact)
        if not expected:
            raise RuntimeError(f"the intact model cannot be inspected: {intact.err}")
        for number in range(count):
            place = Path(home, str(number))
            place.mkdir()
            broken = _broken(seed, number, place, text, expected)
            shutil.rmtree(place, ignore_errors=True)
            yield broken


def _broken(seed: int, number: int, place: Path, text: Path, expected: list[float]) -> str | None:
    from massieu import assets

    choices = random.Random(f"{seed}-{number}")
    damage, ending = HARMS[number % len(HARMS)]
    case = Case(
        place, place / choices.choice(["model", "a b", "[red]x[/]", "mod\u00e9l", "-x"]), choices, place / "canary"
    )
    shutil.copytree(assets.MODEL, case.folder)
    damage(case)
    out = place / "out"
    save = ["--out", str(out)] if ending == REFUSED or choices.random() < 0.2 else []
    ended = run(["inspect", "--text", str(text), "--heads-only", "--json", *save, "--", str(case.folder)], place)
    why = complaint(ended) or _wrong(ended, ending, expected) or _left(case, ended, out)
    return None if why is None else f"{damage.__name__} (case {number} of seed {seed}) {why}"


def _entropies(ended: Ended) -> list[float]:
    return [head["entropy"] for head in json.loads(ended.out)["heads"]] if ended.code == 0 else []


def _wrong(ended: Ended, ending: str, expected: list[float]) -> str | None:
    """Return the failure of an ending, or None."""
    if ended.code in (2, 3):
        return f"was refused ({ended.err.strip().splitlines()[-1][:300]})" if ending == SAME else None
    if ending == REFUSED:
        return "was not refused"
    told = ending == TOLD and any(word in ended.out for word in ("not finite", "non-finite", "overflow", "not used"))
    found = _entropies(ended)
    pairs = zip(found, expected, strict=False)
    same = len(found) == len(expected) and all(one is not None and abs(one - other) < TOLERANCE for one, other in pairs)
    return None if same or told or ending == ANY else "gave other values than the intact model, without a warning"


def _left(case: Case, ended: Ended, out: Path) -> str | None:
    """Return leftover files, in words, or None."""
    if case.canary.exists():
        return "ran code of the folder"
    if ended.code != 0 and out.exists():
        return f"failed and left {sorted(path.name for path in out.iterdir())}"
    strange = [path.name for path in case.place.iterdir() if path.name.startswith(".massieu")]
    return f"left {strange[0]}" if strange else None


def _instead(case: Case, path: Path) -> None:
    """Replace a path by an empty file, folder or link, or remove it."""
    kind = case.random.choice(["nothing", "folder", "pipe", "loop", "dangling", "empty"])
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind in ("loop", "dangling"):
        path.symlink_to(path if kind == "loop" else "nowhere")
    elif kind == "empty":
        path.touch()


# Configurations.


@harm(REFUSED)
def no_heads(case: Case) -> None:
    case.config(n_head=0)


@harm(EITHER)
def a_size_that_is_none(case: Case) -> None:
    case.config(**{case.random.choice(SIZES): case.random.choice(NUMBERS)})


@harm(EITHER)
def two_sizes_that_are_none(case: Case) -> None:
    case.config(**{name: case.random.choice(NUMBERS) for name in case.random.sample(SIZES, 2)})


@harm(REFUSED)
def heads_that_do_not_divide(case: Case) -> None:
    case.config(n_head=case.random.choice([3, 5, 7, 129, -4]))


@harm(REFUSED)
def more_layers_than_files(case: Case) -> None:
    case.config(n_layer=case.random.choice([6, 999, 10**6, 10**9]))


@harm(TOLD)
def fewer_layers_than_files(case: Case) -> None:
    case.config(n_layer=case.random.choice([1, 2, 4]))


@harm(REFUSED)
def unknown_model_type(case: Case) -> None:
    case.config(model_type=case.random.choice(["gpt99", "", "../x", "gpt2 ", *CONTROL, "x" * 100_000]))


@harm(REFUSED)
def model_type_that_is_no_name(case: Case) -> None:
    case.config(model_type=case.random.choice([3, ["gpt2"], {"a": 1}, True, 1.5]))


@harm(REFUSED)
def no_model_type(case: Case) -> None:
    case.edit("config.json", lambda content: {name: own for name, own in content.items() if name != "model_type"})


@harm(REFUSED)
def another_model_type(case: Case) -> None:
    case.config(model_type=case.random.choice(["bert", "llama", "t5", "opt", "gpt_neo", "vit", "mamba", "whisper"]))


@harm(REFUSED)
def configuration_that_is_not_one(case: Case) -> None:
    contents = [
        b"",
        b"[]",
        b"3",
        b"\0",
        b"{",
        b"\xff\xfe{}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"null",
        b'{"n_head": ',
    ]
    (case.folder / "config.json").write_bytes(case.random.choice(contents))


@harm(REFUSED)
def number_of_many_digits(case: Case) -> None:
    (case.folder / "config.json").write_text('{"model_type": "gpt2", "n_head": %s}' % ("9" * 100_000))


@harm(EITHER)
def entry_nested_deep(case: Case) -> None:
    deep = "[" * case.random.choice([900, 50_000]) + "]" * 900
    content = (case.folder / "config.json").read_text().rstrip().removesuffix("}")
    (case.folder / "config.json").write_text(f'{content}, "more": {deep}}}')


@harm(REFUSED)
def no_configuration(case: Case) -> None:
    path = case.folder / "config.json"
    path.unlink()
    _instead(case, path)


@harm(EITHER)
def code_of_the_model(case: Case) -> None:
    case.code("modeling_evil.py")
    case.code("configuration_evil.py")
    case.config(
        model_type=case.random.choice(["gpt2", "evil"]),
        auto_map={"AutoConfig": "configuration_evil.Evil", "AutoModel": "modeling_evil.Evil"},
    )


@harm(EITHER)
def code_of_the_tokenizer(case: Case) -> None:
    case.code("tokenization_evil.py")
    mapped = {"auto_map": {"AutoTokenizer": ["tokenization_evil.Evil", "tokenization_evil.Evil"]}}
    case.edit("tokenizer_config.json", lambda content: {**content, **mapped, "tokenizer_class": "Evil"})


@harm(REFUSED)
def activation_that_does_not_exist(case: Case) -> None:
    case.config(activation_function=case.random.choice(["nosuch", "__import__('os')", "x" * 10**6, 3, None, *CONTROL]))


@harm(EITHER)
def names_with_control_characters(case: Case) -> None:
    sign = case.random.choice(CONTROL)
    case.config(_name_or_path=sign, architectures=[sign], transformers_version=sign, custom=sign)


@harm(EITHER)
def attention_of_another_kind(case: Case) -> None:
    kinds = ["flash_attention_2", "flex_attention", "nosuch", "eager", "kernels-community/evil", 3, {"": "x"}]
    case.config(**{case.random.choice(["attn_implementation", "_attn_implementation"]): case.random.choice(kinds)})


@harm(EITHER)
def quantized_in_an_unknown_way(case: Case) -> None:
    ways = [{"quant_method": "gptq"}, {"quant_method": "nosuch"}, {"quant_method": "bitsandbytes"}, {}, [], "x", 3]
    case.config(quantization_config=case.random.choice(ways))


@harm(EITHER)
def dtype_that_does_not_exist(case: Case) -> None:
    case.config(
        **{case.random.choice(["dtype", "torch_dtype"]): case.random.choice(["float99", "nn.Linear", 3, [], "auto"])}
    )


@harm(REFUSED)
def weights_named_by_the_configuration(case: Case) -> None:
    case.pickle("evil.bin")
    names = ["evil.bin", "../outside.safetensors", "/etc/passwd", "\0", 3, "a\\b.safetensors"]
    case.config(transformers_weights=case.random.choice(names))


@harm(EITHER)
def labels_without_end(case: Case) -> None:
    case.config(num_labels=case.random.choice([10**9, -1, "x", 2**70]))


@harm(EITHER)
def tokens_beyond_the_vocabulary(case: Case) -> None:
    case.config(
        **{case.random.choice(["pad_token_id", "bos_token_id"]): case.random.choice([10**9, -5, "x", [3], 2**70])}
    )


@harm(REFUSED)
def vocabulary_that_does_not_fit(case: Case) -> None:
    case.config(vocab_size=case.random.choice([2047, 2049, 4000, 1]))


@harm(EITHER)
def model_of_two_halves(case: Case) -> None:
    case.config(is_encoder_decoder=True, decoder_start_token_id=case.random.choice([0, -1, "x", 10**9]))


@harm(EITHER)
def other_outputs(case: Case) -> None:
    name = case.random.choice(["return_dict", "use_return_dict", "torchscript", "output_attentions", "use_cache"])
    case.config(**{name: case.random.choice([True, False, "x", None])}, output_hidden_states=True)


@harm(ANY)
def norm_with_an_odd_constant(case: Case) -> None:
    case.config(layer_norm_epsilon=case.random.choice([math.nan, -1, math.inf, "x", None, 0]))


@harm(EITHER)
def dropout_that_is_no_chance(case: Case) -> None:
    case.config(
        attn_pdrop=case.random.choice([math.nan, 2.0, -1, "x", None]), resid_pdrop=case.random.choice([0.1, 1.0])
    )


@harm(EITHER)
def odd_options(case: Case) -> None:
    options = {
        "pruned_heads": {"0": [0, 1, 2, 3]},
        "problem_type": "x",
        "chunk_size_feed_forward": -3,
        "gradient_checkpointing": True,
        "id2label": {"x": "y"},
        "add_cross_attention": True,
        "reorder_and_upcast_attn": True,
        "tie_word_embeddings": "x",
        "max_position_embeddings": 0,
    }
    name = case.random.choice(sorted(options))
    case.config(**{name: options[name]})


# Weights.


@harm(REFUSED)
def weights_that_are_none(case: Case) -> None:
    contents = [b"", b"\0" * 8, b"\x08" * 100, b"PK\x03\x04" + b"\0" * 99, case.random.randbytes(5000)]
    case.weights.write_bytes(case.random.choice(contents))


@harm(REFUSED)
def weights_cut_short(case: Case) -> None:
    content = case.weights.read_bytes()
    case.weights.write_bytes(content[: case.random.randrange(len(content))])


@harm(REFUSED)
def weights_with_more_behind(case: Case) -> None:
    case.weights.write_bytes(case.weights.read_bytes() + case.random.randbytes(case.random.choice([1, 8, 4096])))


@harm(REFUSED)
def header_that_lies(case: Case) -> None:
    headers = [
        {"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}},
        {"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}},
        {
            "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
            "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        },
        {"a": 3},
        [],
    ]
    head = json.dumps(case.random.choice(headers)).encode()
    size = case.random.choice([len(head), 2**63, 2**31, 0])
    case.weights.write_bytes(struct.pack("<Q", size) + head + b"\0" * 4)


@harm(REFUSED)
def header_nested_deep(case: Case) -> None:
    head = b'{"a":' * 50_000 + b"}" * 50_000
    case.weights.write_bytes(struct.pack("<Q", len(head)) + head)


@harm(REFUSED)
def tensor_missing(case: Case) -> None:
    def change(found: dict[str, Any]) -> dict[str, Any]:
        lost = case.random.choice(sorted(name for name in found if not name.endswith("lm_head.weight")))
        return {name: own for name, own in found.items() if name != lost}

    case.tensors(change)


@harm(REFUSED)
def block_missing(case: Case) -> None:
    case.tensors(lambda found: {name: own for name, own in found.items() if ".h.3." not in name})


@harm(REFUSED)
def no_tensor_at_all(case: Case) -> None:
    case.tensors(lambda found: {})


@harm(REFUSED)
def unknown_prefix(case: Case) -> None:
    prefix = case.random.choice(["net.", "a.b.c.", "\x1b[2J", "transformer.transformer.", "\u202e"])
    case.tensors(lambda found: {prefix + name: own for name, own in found.items()})


@harm(SAME)
def prefix_of_a_wrapper(case: Case) -> None:
    prefix = case.random.choice(["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
    case.tensors(lambda found: {prefix + name: own for name, own in found.items()})


@harm(REFUSED)
def both_with_and_without_a_prefix(case: Case) -> None:
    case.tensors(lambda found: {**found, **{f"module.{name}": own + 1 for name, own in found.items()}})


@harm(REFUSED)
def tensor_of_another_shape(case: Case) -> None:
    def change(found: dict[str, Any]) -> dict[str, Any]:
        name = case.random.choice(sorted(found))
        shapes = [lambda x: x[:-1], lambda x: x[None], lambda x: x[..., :0], lambda x: x.flatten()[:1].clone()]
        return {**found, name: case.random.choice(shapes)(found[name]).contiguous()}

    case.tensors(change)


@harm(TOLD)
def numbers_that_are_not_finite(case: Case) -> None:
    def change(found: dict[str, Any]) -> dict[str, Any]:
        name = case.random.choice(sorted(found))
        own = found[name].clone()
        own.view(-1)[case.random.randrange(own.numel())] = case.random.choice([math.nan, math.inf, -math.inf])
        return {**found, name: own}

    case.tensors(change)


@harm(ANY)
def numbers_too_large(case: Case) -> None:
    name = case.random.choice(
        ["transformer.h.2.attn.c_attn.weight", "transformer.wte.weight", "transformer.h.0.ln_1.bias"]
    )
    case.tensors(lambda found: {key: own.float() * (1e38 if key == name else 1) for key, own in found.items()})


@harm(SAME)
def tensors_of_another_width(case: Case) -> None:
    import torch

    dtype = case.random.choice([torch.float32, torch.float64])
    case.tensors(lambda found: {name: own.to(dtype) for name, own in found.items()})


@harm(ANY)
def tensors_of_whole_numbers(case: Case) -> None:
    import torch

    dtype = case.random.choice([torch.int8, torch.bool, torch.int64, torch.float8_e4m3fn])
    case.tensors(lambda found: {name: own.to(dtype) for name, own in found.items()})


@harm(SAME)
def more_tensors(case: Case) -> None:
    import torch

    sign = case.random.choice([*CONTROL, "x" * 10_000, "", "a.b", "h.0"])
    case.tensors(lambda found: {**found, f"more{sign}": torch.ones(2)})


@harm(REFUSED)
def more_tensors_in_a_block(case: Case) -> None:
    import torch

    sign = case.random.choice([*CONTROL[:5], "lora_A"])
    case.tensors(lambda found: {**found, f"transformer.h.0.attn.{sign}.weight": torch.ones(2)})


# Files of weights.


@harm(SAME)
def weights_in_two_files(case: Case) -> None:
    case.shards()


@harm(REFUSED)
def index_that_names_a_pickle(case: Case) -> None:
    file = case.random.choice(["pytorch_model.bin", "evil.pt", "model.safetensors.bin", "evil.pkl"])
    case.pickle(file)
    case.shards(lambda found: {name: file if "wte" in name else own for name, own in found.items()})


@harm(REFUSED)
def pickle_with_the_name_of_weights(case: Case) -> None:
    case.pickle("evil.safetensors")
    case.shards(lambda found: {name: "evil.safetensors" if "wte" in name else own for name, own in found.items()})


@harm(REFUSED)
def index_that_names_another_place(case: Case) -> None:
    shutil.copy(case.weights, case.place / "outside.safetensors")
    (case.folder / "sub").mkdir()
    shutil.copy(case.weights, case.folder / "sub" / "inside.safetensors")
    places = ["../outside.safetensors", str(case.place / "outside.safetensors"), "sub/inside.safetensors"]
    places += ["sub/../../outside.safetensors", "..", ".", "", "x" * 300 + ".safetensors", "\0.safetensors", *CONTROL]
    place = case.random.choice(places)
    case.shards(lambda found: dict.fromkeys(found, place))


@harm(REFUSED)
def index_that_is_none(case: Case) -> None:
    maps = [[], 3, None, {}, {"a": 3}, {"a": ["part-0.safetensors"]}, {"a": None}]
    case.shards(lambda found: case.random.choice(maps))


@harm(REFUSED)
def index_that_cannot_be_read(case: Case) -> None:
    case.shards()
    contents = [b"", b"[" * 100_000, b'{"weight_map":' * 100_000, b"\xff", b"{}", b"[]", b'{"weight_map": {"a": "b"']
    (case.folder / "model.safetensors.index.json").write_bytes(case.random.choice(contents))


@harm(REFUSED)
def shard_missing(case: Case) -> None:
    case.shards()
    path = case.folder / "part-1.safetensors"
    path.unlink()
    _instead(case, path)


@harm(EITHER)
def index_that_mixes_up_its_files(case: Case) -> None:
    files = ["part-0.safetensors", "part-1.safetensors"]
    case.shards(lambda found: {name: case.random.choice(files) for name in found})


@harm(REFUSED)
def tensor_in_two_files(case: Case) -> None:
    case.shards()
    shutil.copy(case.folder / "part-0.safetensors", case.folder / "part-2.safetensors")
    case.edit(
        "model.safetensors.index.json",
        lambda content: {"weight_map": {**content["weight_map"], "more": "part-2.safetensors"}},
    )


@harm(REFUSED)
def weights_elsewhere(case: Case) -> None:
    target = case.place / "outside.safetensors"
    shutil.move(case.weights, target)
    where = [
        target,
        Path("../outside.safetensors"),
        Path("/dev/zero"),
        Path("/etc/passwd"),
        case.weights,
        Path("nowhere"),
    ]
    case.weights.symlink_to(case.random.choice(where))


@harm(REFUSED)
def weights_that_are_no_file(case: Case) -> None:
    case.weights.unlink()
    _instead(case, case.weights)


@harm(REFUSED)
def weights_as_a_pickle(case: Case) -> None:
    case.weights.unlink()
    case.pickle(case.random.choice(["pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.ckpt"]))


@harm(SAME)
def pickles_beside_the_weights(case: Case) -> None:
    for file in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "tokenizer.pkl", "scheduler.pt"):
        case.pickle(file)


@harm(REFUSED)
def weights_of_another_library(case: Case) -> None:
    case.weights.unlink()
    (
        case.folder / case.random.choice(["tf_model.h5", "flax_model.msgpack", "model.onnx", "x.gguf", "a\x1b[2J.gguf"])
    ).write_bytes(b"GGUF")


@harm(REFUSED)
def adapter(case: Case) -> None:
    case.pickle("adapter_model.bin")
    (case.folder / "adapter_config.json").write_text('{"base_model_name_or_path": "gpt2", "peft_type": "LORA"}')


# Tokenizers and other files.


@harm(REFUSED)
def tokenizer_that_is_none(case: Case) -> None:
    contents = [
        b"",
        b"{}",
        b"[]",
        b"\0",
        b'{"model": 3}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\xff\xfe",
        b'{"model":',
    ]
    (case.folder / "tokenizer.json").write_bytes(case.random.choice(contents))


@harm(EITHER)
def tokenizer_without_its_rules(case: Case) -> None:
    (case.folder / "tokenizer.json").unlink()
    classes = ["GPT2Tokenizer", "BertTokenizer", "PreTrainedTokenizerFast", "T5Tokenizer", "Nosuch", "\x1b[2J", 3, None]
    case.edit("tokenizer_config.json", lambda content: {**content, "tokenizer_class": case.random.choice(classes)})


@harm(EITHER)
def tokenizer_of_an_odd_length(case: Case) -> None:
    lengths = [0, -1, 1, "x", None, math.nan, math.inf, 1e30, True, [256]]
    case.edit("tokenizer_config.json", lambda content: {**content, "model_max_length": case.random.choice(lengths)})


@harm(EITHER)
def tokenizer_with_odd_tokens(case: Case) -> None:
    tokens = [3, None, {"content": 3}, "", "\x1b[2J", "x" * 10**6, ["a"], {"content": "a", "__type": "AddedToken"}]
    name = case.random.choice(["bos_token", "eos_token", "pad_token", "unk_token", "additional_special_tokens"])
    case.edit("tokenizer_config.json", lambda content: {**content, name: case.random.choice(tokens)})


@harm(REFUSED)
def tokenizer_with_more_words_than_the_model(case: Case) -> None:
    def change(content: Any) -> Any:
        vocabulary = content["model"]["vocab"]
        content["model"]["vocab"] = {word: number + (number > 10) * 5000 for word, number in vocabulary.items()}
        return content

    case.edit("tokenizer.json", change)


@harm(REFUSED)
def tokenizer_without_words(case: Case) -> None:
    def change(content: Any) -> Any:
        content["model"] |= {"vocab": {}, "merges": []}
        return content

    case.edit("tokenizer.json", change)


@harm(REFUSED)
def tokenizer_that_panics(case: Case) -> None:
    odd = {"type": "Precompiled", "precompiled_charsmap": case.random.choice(["AAAA", "", "gICA"])}
    case.edit("tokenizer.json", lambda content: {**content, "normalizer": odd})


@harm(REFUSED)
def tokenizer_that_fails_at_a_word(case: Case) -> None:
    rules = {"type": "WordLevel", "vocab": {"Call": 0, "me": 1, "It": 2}, "unk_token": "[UNK]"}
    case.edit("tokenizer.json", lambda content: {**content, "model": rules})


@harm(EITHER)
def other_files_that_are_broken(case: Case) -> None:
    for file in ("generation_config.json", "special_tokens_map.json", "added_tokens.json", "preprocessor_config.json"):
        contents = [b"", b"{", b"[" * 100_000, b"\xff", b'{"a": 1e999}']
        (case.folder / file).write_bytes(case.random.choice(contents))
    (case.folder / "chat_template.jinja").write_text("{% for i in range(10**12) %}{{ i }}{% endfor %}")


@harm(REFUSED)
def folder_without_anything(case: Case) -> None:
    shutil.rmtree(case.folder)
    _instead(case, case.folder)


@harm(SAME)
def folder_behind_a_link(case: Case) -> None:
    hidden = case.place / "elsewhere"
    case.folder.rename(hidden)
    case.folder.symlink_to(hidden)


COUNT = len(HARMS)
