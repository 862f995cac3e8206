import pytest
import torch
from taps.families import build
from torch import nn

import massieu
from massieu.inspection.fields import probe_fields
from massieu.inspection.response import linear_response
from massieu.inspection.sampled_passages import PassageSample
from massieu.models.residual_stream import find_residual_stream
from massieu.taps import tap

pytest.importorskip("pandas")


class Residual(nn.Module):
    """A block of attention alone, without norm."""

    def __init__(self, dim, heads, tied):
        super().__init__()
        self.heads, self.tied = heads, tied
        self.attention = Attention(dim, heads, tied)

    def forward(self, x):
        return x + self.attention(x)


class Attention(nn.Module):
    """Heads with keys that are values: the output map is the transpose of the query map if tied."""

    def __init__(self, dim, heads, tied):
        super().__init__()
        self.heads = heads
        size = dim // heads
        self.query = nn.Parameter(torch.randn(heads, size, dim, dtype=torch.float64) / dim**0.5)
        self.key = nn.Parameter(torch.randn(heads, size, dim, dtype=torch.float64) / dim**0.5)
        other = torch.randn(heads, size, dim, dtype=torch.float64) / dim**0.5
        self.out = self.query if tied else nn.Parameter(other)

    def forward(self, x):
        query, key = (torch.einsum("bnd,hed->bhne", x, weight) for weight in (self.query, self.key))
        mixed = nn.functional.scaled_dot_product_attention(query, key, key, scale=1.0)
        return torch.einsum("bhne,hed->bnd", mixed, self.out)


class Stack(nn.Module):
    def __init__(self, tied, dim=12, heads=3, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(Residual(dim, heads, tied) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def dense(attention, x):
    """Jacobians with frozen keys, log normalizers and their gradients, written out with autograd."""
    key = torch.einsum("nd,hed->hne", x, attention.key)

    def potential(token):
        return torch.einsum("hne,hed,d->hn", key, attention.query, token).logsumexp(-1).sum()

    def update(token):
        score = torch.einsum("hne,hed,d->hn", key, attention.query, token)
        return torch.einsum("hn,hne,hed->d", score.softmax(-1), key, attention.out)

    jacobians = torch.stack([torch.autograd.functional.jacobian(update, token) for token in x])
    slopes = torch.stack([torch.autograd.functional.jacobian(potential, token) for token in x])
    updates = torch.stack([update(token) for token in x])
    rises = torch.stack([potential(token + a) > potential(token) for token, a in zip(x, updates, strict=True)])
    return jacobians, slopes, updates, rises


def probed(tied, tokens=30):
    torch.manual_seed(0)
    model = Stack(tied).eval()
    x = torch.randn(1, tokens, 12, dtype=torch.float64)
    anatomy = find_residual_stream(model, {"x": x})
    content = torch.ones(1, tokens, dtype=torch.bool)
    return model, x, probe_fields(model, {"x": x}, anatomy, content, ["a"]).table.set_index("layer")


def test_a_tied_block_is_a_gradient_field_that_climbs():
    _, _, table = probed(tied=True)
    assert table["field_symmetry"].between(1 - 1e-9, 1 + 1e-9).all()
    assert table["field_positive"].between(1 - 1e-9, 1 + 1e-9).all()
    assert table["ascent_cosine"].between(1 - 1e-9, 1 + 1e-9).all()
    assert (table["ascent_share"] == 1).all()
    assert (table["ascent_control"] < 0.9).all()
    assert table["field_symmetry_control"].between(0.4, 0.65).all()


def test_free_weights_are_not_a_gradient_field():
    _, _, table = probed(tied=False)
    assert table["field_symmetry"].between(0.3, 0.7).all()
    assert table["ascent_cosine"].abs().max() < 0.5


def test_the_figures_are_those_of_jacobians_written_out():
    model, x, table = probed(tied=False, tokens=60)
    with torch.no_grad():
        jacobians, slopes, updates, rises = dense(model.layers[0].attention, x[0])
    symmetric = (jacobians + jacobians.mT) / 2
    eigenvalues = torch.linalg.eigvalsh(symmetric)
    row = table.loc[0]
    assert abs(row["field_symmetry"] - float(symmetric.square().sum() / jacobians.square().sum())) < 0.05
    assert abs(row["field_positive"] - float(eigenvalues.clamp_min(0).sum() / eigenvalues.abs().sum())) < 0.05
    assert abs(row["ascent_cosine"] - float(torch.cosine_similarity(updates, slopes, dim=-1).mean())) < 1e-9
    assert row["ascent_share"] == float(rises.double().mean())


def test_diffuse_attention_follows_the_linear_response():
    torch.manual_seed(0)
    model = Stack(tied=False).eval()
    for layer in model.layers:
        layer.attention.query.data.mul_(0.05)
    table, _ = responses(model, torch.randn(1, 40, 12, dtype=torch.float64), "a")
    assert (table["corollary_r2"] > 0.99).all()
    assert (table["corollary_control"] < 0.5).all()


def responses(model, x, documents, **options):
    """Layers of an experiment on passages, one for each row, and the R² of each head over all their tokens."""
    sample = PassageSample()
    sample.offer({"x": x}, {}, [f"passage {number}" for number in range(len(x))], documents)
    calls = []
    with torch.no_grad(), tap(model, calls.append):
        model(x)
    r2 = []
    for call in calls:
        error = (call.output - linear_response(call, call.key)).square().sum((0, 2, 3))
        r2.append(1 - error / (call.output - call.output.mean((0, 2), keepdim=True)).square().sum((0, 2, 3)))
    return sample.probe(model, find_residual_stream(model, {"x": x[:1]}), **options).table.set_index("layer"), r2


def test_the_linear_response_is_judged_on_the_tokens_of_all_passages():
    torch.manual_seed(0)
    model = Stack(tied=False).eval()
    x = torch.randn(12, 9, 12, dtype=torch.float64) + torch.randn(12, 1, 12, dtype=torch.float64)
    table, expected = responses(model, x, [f"document {number}" for number in range(12)])
    for layer, r2 in enumerate(expected):
        assert abs(table["corollary_r2"][layer] - float(r2.median())) < 1e-9
    assert table["corollary_r2_se"].gt(0).all()


def test_passages_of_one_document_are_one_draw_of_the_linear_response():
    # Every passage stands twice in its document: that says nothing new. One head, so that no median is taken.
    torch.manual_seed(0)
    model = Stack(tied=False, heads=1).eval()
    x = torch.randn(10, 9, 12, dtype=torch.float64) + torch.randn(10, 1, 12, dtype=torch.float64)
    documents = [f"document {number}" for number in range(10)]
    once, _ = responses(model, x, documents)
    twice, _ = responses(model, x.repeat(2, 1, 1), documents * 2)
    alone, _ = responses(model, x.repeat(2, 1, 1), documents * 2, by_passage=True)
    for column in ("corollary_r2", "corollary_r2_se"):
        assert (once[column] - twice[column]).abs().max() < 1e-9
    assert (alone["corollary_r2_se"] < 0.9 * twice["corollary_r2_se"]).all()


def test_a_passage_of_two_documents_has_the_same_document_in_any_order():
    x = torch.randn(1, 9, 12)
    samples = [PassageSample(1), PassageSample(1)]
    for sample, documents in zip(samples, ("ab", "ba"), strict=True):
        for document in documents:
            sample.offer({"x": x}, {}, ["passage"], [document])
    assert samples[0].kept[0].document == samples[1].kept[0].document


@pytest.mark.parametrize(
    "name", ["bert", "gpt2", "llama", "gpt_neox", "t5", "gpt_oss", "albert", "massieu", "torch_encoder"]
)
def test_every_kind_of_model_can_be_probed(name):
    model, inputs = build(name, padding="right") if name not in ("massieu", "torch_encoder") else build(name)
    anatomy = find_residual_stream(model, inputs)
    encoder = inputs.get("attention_mask", torch.ones(2, 24)).bool()
    content = {"encoder": encoder, "decoder": inputs["decoder_attention_mask"].bool() if name == "t5" else encoder}
    fields = probe_fields(model, inputs, anatomy, content, ["a", "b"])
    assert fields.notes == []
    assert len(fields.table) == len(anatomy.blocks)
    figures = fields.table.drop(columns=["stack", "layer"])
    assert figures.notna().all(axis=None)
    shares = ["ascent_share", "entropy_fall_share", "field_positive", "field_symmetry"]
    assert fields.table[shares].ge(-0.2).all(axis=None)
    assert fields.table[shares].le(1.2).all(axis=None)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("gemma2", "its softcap leaves the exponential family"), ("bloom", "its queries and keys could not be seen")],
)
def test_a_block_without_the_tests_says_why(name, reason):
    model, inputs = build(name)
    fields = probe_fields(
        model, inputs, find_residual_stream(model, inputs), torch.ones(2, 24, dtype=torch.bool), ["a", "b"]
    )
    assert len(fields.table) == 0
    assert all(reason in note for note in fields.notes)
    assert len(fields.notes) == 2


def test_the_sample_is_the_same_for_any_batches_and_padding():
    model, inputs = build("bert", padding="right")
    mask = inputs["attention_mask"]
    anatomy = find_residual_stream(model, inputs)
    one, two = PassageSample(2), PassageSample(2)
    one.offer(inputs, {"encoder": mask.bool()}, ["a", "b"])
    for row, key in ((1, "b"), (0, "a")):
        length = int(mask[row].sum())
        single = {name: value[row : row + 1, :length] for name, value in inputs.items()}
        part = PassageSample(2)
        part.offer(single, mask[row : row + 1, :length].bool(), [key])
        two.merge(part)
    first, second = one.probe(model, anatomy).table, two.probe(model, anatomy).table
    assert (first.drop(columns="stack") - second.drop(columns="stack")).abs().max(axis=None) < 1e-5


def test_a_model_without_masks_counts_all_tokens():
    model, inputs = build("vit")
    sample = PassageSample(1)
    sample.offer(inputs, {}, ["b", "a"])
    sample.offer(inputs, {}, ["c", "d"])
    assert len(sample.keys) == 1
    assert len(sample.probe(model, find_residual_stream(model, inputs)).table) == 2


def test_long_passages_are_cut():
    model = massieu.nn.Transformer(8, 1, 2, vocabulary=9)
    sample = PassageSample(1)
    sample.offer({"inputs": torch.randint(9, (2, 300))}, torch.ones(2, 300, dtype=torch.bool), ["a", "b"])
    (passage,) = sample._kept.values()
    assert passage.inputs["inputs"].shape == passage.content[""].shape == (1, 128)
    assert len(sample.probe(model, find_residual_stream(model, passage.inputs)).table) == 1
