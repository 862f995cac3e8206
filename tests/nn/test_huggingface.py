"""Logits equal those of Hugging Face models whose weights are copied across."""

import pytest
import torch
from torch.testing import assert_close

from massieu.nn import Transformer


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


def words(*shape: int) -> torch.Tensor:
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(0))


def test_logits_equal_those_of_gpt2(transformers):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50,
        n_positions=32,
        n_embd=24,
        n_layer=3,
        n_head=4,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    theirs = transformers.GPT2LMHeadModel(config).eval()
    ours = Transformer(
        24, 3, 4, vocabulary=50, max_length=32, positions="learned", activation="gelu_tanh", tie_embedding=True
    ).eval()
    state = {"embedding.weight": theirs.transformer.wte.weight, "positions.weight": theirs.transformer.wpe.weight}
    state |= {f"norm.{name}": value for name, value in theirs.transformer.ln_f.state_dict().items()}
    for layer, block in enumerate(theirs.transformer.h):
        for name, module in (("attention_norm", block.ln_1), ("feed_forward_norm", block.ln_2)):
            state |= {f"blocks.{layer}.{name}.{key}": value for key, value in module.state_dict().items()}
        weights, biases = block.attn.c_attn.weight.chunk(3, 1), block.attn.c_attn.bias.chunk(3)
        maps = {f"attention.{n}_proj": (w, b) for n, w, b in zip("qkv", weights, biases, strict=True)}
        maps["attention.out_proj"] = (block.attn.c_proj.weight, block.attn.c_proj.bias)
        maps["feed_forward.up"] = (block.mlp.c_fc.weight, block.mlp.c_fc.bias)
        maps["feed_forward.down"] = (block.mlp.c_proj.weight, block.mlp.c_proj.bias)
        for name, (weight, bias) in maps.items():
            state |= {f"blocks.{layer}.{name}.weight": weight.T, f"blocks.{layer}.{name}.bias": bias}
    ours.load_state_dict(state)
    tokens = words(2, 20)
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert float(expected.std()) > 1
        assert_close(ours(tokens), expected, rtol=0, atol=1e-5)
        mask = torch.arange(20) < torch.tensor([[20], [11]])
        expected = theirs(tokens, attention_mask=mask.long()).logits
        assert_close(ours(tokens, lengths=torch.tensor([20, 11])), expected, rtol=0, atol=1e-5)
    greedy = theirs.generate(tokens[:, :5], max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(ours.generate(tokens[:, :5], 6, temperature=0), greedy)


def test_logits_equal_those_of_llama(transformers):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        initializer_range=0.3,
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    ours = Transformer(
        32,
        2,
        4,
        vocabulary=50,
        num_key_heads=2,
        hidden_dim=40,
        activation="swiglu",
        norm="rms",
        bias=False,
        tie_embedding=False,
    )
    renamed = [
        ("model.layers.", "blocks."),
        ("model.embed_tokens", "embedding"),
        ("model.norm", "norm"),
        ("lm_head", "head"),
        ("self_attn.o_proj", "attention.out_proj"),
        ("self_attn", "attention"),
        ("input_layernorm", "attention_norm"),
        ("post_attention_layernorm", "feed_forward_norm"),
        ("mlp.gate_proj", "feed_forward.gate"),
        ("mlp.up_proj", "feed_forward.up"),
        ("mlp.down_proj", "feed_forward.down"),
    ]
    state = {}
    for name, value in theirs.state_dict().items():
        for old, new in renamed:
            name = name.replace(old, new)
        state[name] = value
    ours.load_state_dict(state)
    with torch.no_grad():
        expected = theirs(words(2, 20)).logits
        assert float(expected.std()) > 1
        assert_close(ours(words(2, 20)), expected, rtol=0, atol=2e-5)
