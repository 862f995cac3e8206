"""Training gives the same weights and the same random numbers with and without a watch, to the last bit."""

from __future__ import annotations

import contextlib
import copy
import random

import pytest
import torch
from torch import nn
from torch.nn import functional

import massieu
from massieu.taps import sources

WORDS, TOKENS = 40, 12


def batches(count: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(WORDS, (2, TOKENS), generator=generator) for _ in range(count)]


def gpt2(**options) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    size = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "bos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, eos_token_id=0, use_cache=False, **options))


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    size = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    size |= {"num_key_value_heads": 2, "intermediate_size": 24, "use_cache": False, "attention_dropout": 0.1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**size))


class Encoder(nn.Module):
    """Layers of torch, with dropout and with a norm that keeps running means."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        tokens = self.encoder(self.embedding(ids))
        return self.head(self.norm(tokens.flatten(0, 1)).unflatten(0, ids.shape))


class Dropping(Encoder):
    """Draws random numbers of Python, too, and only a part of it is compiled."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * (1 + random.random())


def own() -> nn.Module:
    return massieu.nn.Transformer(16, num_layers=2, num_heads=2, vocabulary=WORDS)


def logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    found = model(ids)
    return getattr(found, "logits", found)


def train(
    build,
    watched: bool,
    *,
    checkpoint: bool | None = None,
    autocast: bool = False,
    accumulate: int = 1,
    compiled: str | None = None,
    every: int = 1,
):
    """Weights, buffers and random numbers after a few steps, and the readings."""
    torch.manual_seed(0)
    random.seed(0)
    model = build().train()
    if checkpoint is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpoint})
    used = model
    if compiled in ("wrapped", "outside"):
        used = torch.compile(model, backend="aot_eager")
    elif compiled == "itself":
        model.compile(backend="aot_eager")
    elif compiled == "part":
        model.encoder.layers[0].compile(backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen = model if compiled == "outside" else used
    with massieu.watch(seen, every=every) if watched else contextlib.nullcontext() as found:
        for number, ids in enumerate(batches(4 * accumulate)):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                scores = logits(used, ids)
            functional.cross_entropy(scores.float().flatten(0, 1), ids.flatten()).backward()
            if number % accumulate == accumulate - 1:
                optimizer.step()
                optimizer.zero_grad()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return state, torch.random.get_rng_state(), random.getstate(), found.readings if watched else []


def assert_same(build, **options) -> list:
    plain, numbers, python, _ = train(build, False, **options)
    state, own_numbers, own_python, readings = train(build, True, **options)
    assert all(torch.equal(plain[name], value) for name, value in state.items())
    assert torch.equal(numbers, own_numbers)
    assert python == own_python
    assert [reading.step for reading in readings] == list(range(0, 4, options.get("every", 1)))
    assert sources._OBSERVERS == []
    assert torch._C._len_torch_function_stack() == 0
    return readings


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("build", [gpt2, llama, Encoder, own])
def test_a_plain_loop(build, every):
    assert_same(build, every=every)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_are_read_once(reentrant):
    plain = assert_same(gpt2)
    readings = assert_same(gpt2, checkpoint=reentrant)
    # Dropout is drawn again in the same way, so the values are those of the loop that keeps everything.
    for reading, other in zip(readings, plain, strict=True):
        assert reading.places == other.places
        for name, values in reading.heads.items():
            assert torch.equal(values.nan_to_num(), other.heads[name].nan_to_num()), name


@pytest.mark.parametrize("build", [gpt2, Encoder])
def test_autocast(build):
    readings = assert_same(build, autocast=True)
    assert bool(readings[0].heads["entropy"].isfinite().all())


@pytest.mark.parametrize("build", [gpt2, own])
def test_accumulated_gradients_are_one_step(build):
    assert_same(build, accumulate=3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("build", "compiled", "autocast"),
    [
        (Encoder, "wrapped", False),
        (Encoder, "wrapped", True),
        (Encoder, "itself", False),
        (Dropping, "part", True),
        (gpt2, "outside", False),
    ],
)
def test_a_compiled_model_is_read_beside_its_own_pass(build, compiled, autocast):
    readings = assert_same(build, compiled=compiled, autocast=autocast)
    assert len(readings[0].places) == 2
    torch.compiler.reset()
    plain = train(build, True, autocast=autocast)[3]
    for name in ("entropy", "token_cosine"):
        table, other = ({**reading.heads, **reading.layers}[name] for reading in (readings[0], plain[0]))
        torch.testing.assert_close(table, other)


def test_a_copy_of_a_watched_model_is_not_watched(tmp_path):
    model = own()
    with massieu.watch(model, every=1) as watched:
        twin = copy.deepcopy(model)
        torch.save(model, tmp_path / "model.pt")
        stored = torch.load(tmp_path / "model.pt", weights_only=False)
        for other in (twin, stored):
            other(batches(1)[0])
        assert watched.readings == []
        model(batches(1)[0])
        assert len(watched.readings) == 1
