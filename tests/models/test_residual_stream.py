import pytest
import torch
from taps.families import NAMES, build
from torch import nn
from torch.testing import assert_close

from massieu.models.module_calls import block_input, hidden_tensors
from massieu.models.residual_stream import find_residual_stream

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # DeBERTa, when it is imported

POST_NORM = {
    "bert",
    "roberta",
    "distilbert",
    "albert",
    "bart",
    "marian",
    "mpnet",
    "deberta_v2",
    "torch_encoder",
    "torch_transformer",
}
PARALLEL = {"gpt_neox", "gptj", "falcon", "falcon_alibi"}
NORMED_UPDATE = {"gemma2", "gemma3"}
BLOCKLESS = {"multihead"}


def rebuild(model, inputs, blocks):
    """Output of each call of a block, and the output rebuilt from its sublayers."""
    modules = dict(model.named_modules())
    pairs, hooks, numbers, seen, start = [], [], {}, {}, {}

    def enter(name):
        def hook(module, args, kwargs):
            numbers[name] = numbers.get(name, -1) + 1
            seen.clear()
            start[name] = block_input(args, kwargs)[1].clone()

        return hook

    def see(path):
        return lambda module, args, output: seen.setdefault(path, []).append(next(hidden_tensors(output)).clone())

    def leave(name):
        def hook(module, args, output):
            block = next(block for block in blocks if (block.name, block.number) == (name, numbers[name]))
            state = start[name]
            for sublayer in block.sublayers:
                state = state + sublayer.factor * seen[sublayer.update.path][sublayer.update.call].view(state.shape)
                if sublayer.stream_norm is not None:
                    state = modules[f"{name}.{sublayer.stream_norm.path}"](state)
            pairs.append((state, next(hidden_tensors(output))))

        return hook

    for name in {block.name for block in blocks}:
        paths = {sublayer.update.path for block in blocks if block.name == name for sublayer in block.sublayers}
        hooks.append(modules[name].register_forward_pre_hook(enter(name), with_kwargs=True))
        hooks += [modules[f"{name}.{path}"].register_forward_hook(see(path)) for path in paths]
        hooks.append(modules[name].register_forward_hook(leave(name)))
    # The fused path of torch's own encoder goes around the modules inside it.
    torch.backends.mha.set_fastpath_enabled(False)
    with torch.no_grad():
        model(**inputs)
    torch.backends.mha.set_fastpath_enabled(True)
    for hook in hooks:
        hook.remove()
    return pairs


@pytest.mark.parametrize("name", [name for name in NAMES if name not in BLOCKLESS])
def test_the_blocks_of_every_family_are_the_sums_of_their_updates(name):
    model, inputs = build(name)
    stream = find_residual_stream(model, inputs)
    assert stream.notes == ()
    pairs = rebuild(model, inputs, stream.blocks)
    assert len(pairs) == len(stream.blocks) >= 2
    for rebuilt, output in pairs:
        assert_close(rebuilt, output, rtol=1e-5, atol=1e-5)
    for block in stream.blocks:
        kinds = [sublayer.kind for sublayer in block.sublayers]
        crosses = block.stack == "decoder" and {other.stack for other in stream.blocks} == {"encoder", "decoder"}
        assert kinds == (["attention", "cross", "mlp"] if crosses else ["attention", "mlp"])
        assert block.parallel == (name in PARALLEL)
        assert all((sublayer.stream_norm is not None) == (name in POST_NORM) for sublayer in block.sublayers)
        assert all(("norm" in sublayer.update.path) == (name in NORMED_UPDATE) for sublayer in block.sublayers)


def test_layers_are_numbered_as_the_calls_of_one_shared_block():
    model, inputs = build("albert")
    blocks = find_residual_stream(model, inputs).blocks
    assert [(block.number, block.layer, block.stack) for block in blocks] == [(0, 0, "encoder"), (1, 1, "encoder")]
    assert len({block.name for block in blocks}) == 1


def test_stacks_of_an_encoder_decoder_are_kept_apart():
    model, inputs = build("t5")
    blocks = find_residual_stream(model, inputs).blocks
    assert [(block.stack, block.layer) for block in blocks] == [
        ("encoder", 0),
        ("encoder", 1),
        ("decoder", 0),
        ("decoder", 1),
    ]


def test_a_residual_multiplier_is_found():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GraniteConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        residual_multiplier=0.22,
    )
    model = transformers.GraniteModel(config).eval()
    for block in find_residual_stream(model, {"input_ids": torch.arange(3, 27).view(2, 12)}).blocks:
        assert [round(sublayer.factor, 6) for sublayer in block.sublayers] == [0.22, 0.22]


@pytest.mark.parametrize("name", ["bert", "llama", "gpt_neox"])
def test_blocks_are_read_in_half_precision(name):
    model, inputs = build(name)
    expected = find_residual_stream(model, inputs)
    assert find_residual_stream(model.bfloat16(), inputs).blocks == expected.blocks


class Odd(nn.Module):
    """Attention whose output is not added to anything."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return torch.sigmoid(x) * self.attention(x, x, x)[0]


def test_a_block_that_is_not_a_sum_is_reported_and_left_empty():
    torch.manual_seed(0)
    model = nn.Sequential(Odd(), Odd()).eval()
    model.forward = lambda x: nn.Sequential.forward(model, x)
    stream = find_residual_stream(model, {"x": torch.randn(2, 5, 8)})
    assert [block.sublayers for block in stream.blocks] == [(), ()]
    assert stream.notes[0] == (
        "block 0 could not be read: no output of a module was found again as a summand of the stream; its columns are empty"
    )


def test_a_model_without_blocks_says_so():
    model, inputs = build("multihead")
    assert find_residual_stream(model, inputs).notes == (
        "no block was found: a block is an element of a ModuleList that contains an attention module",
    )
