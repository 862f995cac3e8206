"""Columns from sampled rows weigh every row of the text alike, whatever the length of its passage."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("transformers")
from attention_calls import call_of

from massieu import assets
from massieu.accumulators.streams import Shares
from massieu.corpus.passages import given_batches
from massieu.inspection import inspect_model
from massieu.inspection.heads import FEWEST_ATOMS, HeadStatistics
from massieu.inspection.quantities import QUANTITIES
from massieu.models.loading import load
from massieu.taps.call_statistics import sampled_positions

EDGES = (1 / 2, 1 / 8, 1 / 32)
LENGTHS = [35 + 5 * (number % 3) for number in range(24)] + [230, 240, 250, 245, 235, 250]


@pytest.fixture(scope="module")
def inspections():
    """The embedded model on documents of 35 to 250 tokens: with sampled rows, and with all rows."""
    loaded = load(str(assets.MODEL))
    ids = [token for text in assets.documents() for token in loaded.tokenizer(text)["input_ids"]]
    begins = [sum(LENGTHS[:number]) for number in range(len(LENGTHS))]
    inputs = [{"input_ids": torch.tensor([ids[i : i + n]])} for i, n in zip(begins, LENGTHS, strict=True)]
    return [inspect_model(loaded.model, inputs=inputs, experiments="heads", rows=rows) for rows in (32, None)]


@pytest.mark.parametrize("column", ["mass90", "score_range"])
def test_sampled_columns_agree_with_all_rows_within_their_standard_error(inspections, column):
    sampled, every = (found.heads for found in inspections)
    assert ((sampled[column] - every[column]).abs() <= every[f"{column}_se"]).all()
    assert (sampled[column] / every[column] - 1).abs().max() < 0.05


def test_as_many_rows_lie_above_the_edges_of_classes_for_sampled_as_for_all_rows_up_to_chance(inspections):
    partials = [found.partial.heads.layers for found in inspections]
    positions = (sampled_positions(torch.tensor([length]), 32) for length in LENGTHS)
    looked_at = sum(int((own >= FEWEST_ATOMS - 1).sum()) for own in positions)
    chance = 3 / (2 * looked_at**0.5)  # three standard errors of a share of independent rows
    for edge in EDGES:
        bins = round(-Shares.PER_HALVING * math.log2(edge))
        for place in partials[0]:
            above = [each[place].shares.counts for each in partials]
            some, every = (counts[:, :bins].sum(-1) / counts.sum(-1) for counts in above)
            assert (some - every).abs().max() < chance
    assert all(found.heads.head_class.notna().all() for found in inspections)


def test_the_length_beside_a_class_is_the_mean_number_of_keys_of_the_rows_behind_it(inspections):
    sampled, every = (found.heads for found in inspections)
    keys = [seen for length in LENGTHS for seen in range(1, length + 1) if seen >= FEWEST_ATOMS]
    right = sum(keys) / len(keys)
    assert every.class_length.tolist() == pytest.approx([right] * len(every))
    assert sampled.class_length.tolist() == pytest.approx([right] * len(every), rel=0.03)
    assert "keys" in QUANTITIES["class_length"].explanation
    assert "class_length" in QUANTITIES["head_class"].explanation


def test_a_head_without_a_class_has_no_length_beside_it():
    heads = HeadStatistics(None)
    (batch,) = given_batches([{"input_ids": torch.ones(1, 8)}])
    heads.receive(call_of(torch.zeros(1, 1, 8, 2), torch.zeros(1, 1, 8, 2)), batch)
    assert heads.table().class_length.isna().all()


def test_a_sampled_row_stands_for_the_rows_of_its_head_that_are_not_broken():
    # One head has broken rows in the long sequence: its short sequence weighs more than in the other head.
    query, key = torch.zeros(1, 2, 400, 2), torch.zeros(1, 2, 400, 2)
    query[0, 1, 100:] = torch.nan
    some, every = HeadStatistics(16), HeadStatistics(None)
    for heads in (some, every):
        for given, length in ((query, 400), (query[:, :, :50], 50)):
            (batch,) = given_batches([{"input_ids": torch.ones(1, length)}])
            heads.receive(call_of(given, key[:, :, :length]), batch)
    assert every.table().rows.tolist() == [450, 150]
    assert some.table().mass90.tolist() == pytest.approx(every.table().mass90.tolist(), rel=1e-6)


def test_the_median_share_is_rounded_up_by_at_most_the_step_that_its_description_names():
    step = 2 ** (1 / Shares.PER_HALVING)
    assert f"{step - 1:.1%}".replace("%", " %") in QUANTITIES["mass90_share"].explanation
    values = torch.rand(64, 1001, generator=torch.Generator().manual_seed(0)).double() ** 3
    shares = Shares((64,))
    shares.add(values)
    rounded = shares.median() / values.median(-1).values
    assert rounded.min() >= 1 - 1e-9
    assert rounded.max() <= step


def test_weighted_shares_merge_to_the_same_counts_in_any_order():
    generator = torch.Generator().manual_seed(0)
    added = [(torch.rand(2, 32, generator=generator), torch.tensor([[length / 32], [(length - 3) / 29]]))
             for length in range(33, 333)]  # fmt: skip
    forward, backward = Shares((2,)), Shares((2,))
    for (values, weight), (others, other) in zip(added, added[::-1], strict=True):
        forward.add(values, weight)
        backward.add(others, other)
    assert torch.equal(forward.counts.sum(-1), backward.counts.sum(-1))
    assert torch.equal(forward.counts, backward.counts)
