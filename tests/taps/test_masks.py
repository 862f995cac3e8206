"""A mask said in words hides exactly what the mask hides."""

import pytest
import torch
from torch.testing import assert_close

from massieu.taps.masks import Visible, add_bias, read_mask


def seen(visible, queries, atoms):
    """The mask that the words mean."""
    whole = torch.zeros(2, 1, queries, atoms, dtype=torch.bool)
    whole[..., : visible.atoms] = filled(visible, queries, atoms if visible.atoms is None else visible.atoms)
    return whole


def filled(visible, queries, atoms):
    distance = torch.arange(queries)[:, None] + atoms - queries - torch.arange(atoms)
    found = torch.ones(queries, atoms, dtype=torch.bool)
    if visible.causal:
        found &= distance >= 0
    if visible.window is not None:
        found &= distance.abs() < visible.window
    return found if visible.log_weight is None else found & visible.log_weight


def causal(queries, atoms):
    return torch.ones(queries, atoms, dtype=torch.bool).tril(atoms - queries)


@pytest.mark.parametrize(("queries", "atoms"), [(1, 1), (1, 6), (5, 5), (3, 7), (7, 3)])
def test_every_mask_keeps_its_meaning(queries, atoms):
    generator = torch.Generator().manual_seed(0)
    for trial in range(60):
        keys = torch.rand(2, 1, 1, atoms, generator=generator) < (0.2, 0.7, 2.0)[trial % 3]
        band = causal(queries, atoms) if trial % 2 else torch.ones(queries, atoms, dtype=torch.bool)
        if trial % 5 == 0:
            band = band & ~causal(queries, atoms).tril(atoms - queries - 2)
        mask = keys & band
        if trial % 7 == 0:
            mask = torch.rand(2, 1, queries, atoms, generator=generator) < 0.5
        assert torch.equal(seen(read_mask(mask, queries, atoms), queries, atoms).expand_as(mask), mask)
        rows = read_mask(mask, queries, atoms).rows
        assert torch.equal(mask.any(-1)[:, 0], torch.ones(2, queries, dtype=torch.bool) if rows is None else rows)
        low = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        assert torch.equal(seen(read_mask(low, queries, atoms), queries, atoms).expand_as(mask), mask)


def test_plain_masks_are_only_words():
    assert read_mask(None, 5, 5) == Visible()
    assert read_mask(torch.ones(2, 1, 5, 5, dtype=torch.bool), 5, 5) == Visible()
    assert read_mask(causal(5, 5), 5, 5) == Visible(None, True, None)
    assert read_mask(causal(3, 5)[None, None].expand(2, 4, 3, 5), 3, 5) == Visible(None, True, None)
    assert read_mask(causal(5, 5) & ~causal(5, 5).tril(-3), 5, 5) == Visible(None, True, 3)
    low = torch.zeros(5, 5).masked_fill(~causal(5, 5), -torch.inf)
    assert read_mask(low, 5, 5) == Visible(None, True, None)


def test_the_empty_part_of_a_cache_is_left_out():
    mask = torch.zeros(1, 1, 3, 9, dtype=torch.bool)
    mask[..., :5] = causal(3, 5)
    assert read_mask(mask, 3, 9) == Visible(None, True, None, 5)
    assert read_mask(mask[..., -1:, :], 1, 9) == Visible(None, False, None, 5)


def test_a_mask_of_keys_is_one_row():
    keys = torch.tensor([[True, True, False], [True, True, True]])[:, None, None]
    visible = read_mask(keys.expand(2, 1, 3, 3).clone(), 3, 3)
    assert torch.equal(visible.log_weight, keys)
    assert visible[1:] == (False, None, None, None)


def test_a_bias_stays_and_absent_atoms_become_minus_infinity():
    bias = torch.randn(1, 2, 3, 3)
    bias[0, 0, 0, 2] = torch.finfo(torch.float32).min
    found = read_mask(bias, 3, 3).log_weight
    assert found[0, 0, 0, 2] == -torch.inf
    assert_close(found[0, 1], bias[0, 1])
    half = torch.full((3, 3), 0.25, dtype=torch.float16).fill_diagonal_(torch.finfo(torch.float16).min)
    assert torch.isinf(read_mask(half, 3, 3).log_weight).sum() == 3
    bias[0, :, 1] = -torch.inf
    assert read_mask(bias, 3, 3).rows.tolist() == [[True, False, True]]


def test_a_mask_that_changes_in_place_is_read_again():
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    assert read_mask(mask, 4, 4) == Visible()
    mask[..., 0] = False
    assert read_mask(mask, 4, 4).log_weight is not None


def test_a_bias_is_added_to_a_mask():
    bias, keys = torch.randn(1, 2, 3, 3), torch.tensor([True, True, False])[None, None, None]
    assert add_bias(Visible(keys, True), None) == Visible(keys, True)
    assert add_bias(Visible(keys, True), torch.zeros(1)) == Visible(keys, True)
    found = add_bias(Visible(keys, True), bias)
    assert torch.equal(found.log_weight, bias.masked_fill(~keys, -torch.inf))
    assert found.causal
    assert_close(add_bias(Visible(bias), bias).log_weight, 2 * bias)


def test_a_mask_of_whole_numbers_is_refused():
    with pytest.raises(TypeError, match="must be boolean or floating, got torch.int64; convert it with .bool()"):
        read_mask(torch.ones(3, 3, dtype=torch.long), 3, 3)
