"""Stack of selective shifts, against a version with Python's integers and known values."""

import itertools

import pytest
import torch

from massieu.checks import UserError
from massieu.universal import selective_shift, shift_stack


@pytest.mark.parametrize(
    ("grid", "dim", "length", "needed", "gap", "largest", "layers"),
    [
        (3, 1, 2, 6, 4, 770, 4),
        (4, 1, 3, 12, 21, 131_499, 5),
        (3, 2, 2, 72, 64, 852_056, 10),
        (3, 2, 3, 252, 136, 112_120_064, 10),
    ],
)
def test_identifiers_gaps_and_layers_have_known_values(grid, dim, length, needed, gap, largest, layers):
    stack = shift_stack(grid, dim, length)
    assert stack.identifiers.numel() == stack.distinct == needed
    assert (stack.gap, stack.largest, stack.layers) == (gap, largest, layers)
    assert stack.consistent


def test_the_stack_agrees_with_the_formula_of_the_proof():
    # l_j' = l_j + n^d (l_{j-1}' - l_j), with l_T for l_0', then the shift by the last of them.
    stack = shift_stack(4, 1, 3)
    for row, found in zip(stack.sequences.tolist(), stack.identifiers.tolist(), strict=True):
        before, shifted = row[-1], []
        for number in row:
            before = number + 4 * (before - number)
            shifted.append(before)
        assert found == [number + 3 * 4**4 * before for number in shifted]


def test_with_repeated_tokens_only_sets_have_different_identifiers():
    stack = shift_stack(4, 1, 3, duplicates=True)
    found = {}
    for row, identifiers in zip(stack.sequences.tolist(), stack.identifiers.tolist(), strict=True):
        for token, identifier in zip(row, identifiers, strict=True):
            found.setdefault((token, frozenset(row)), set()).add(identifier)
    assert all(len(each) == 1 for each in found.values())
    assert stack.distinct == len(found) < sum(len(set(row)) for row in stack.sequences.tolist())


def test_a_shift_is_that_of_a_hardmax_layer():
    numbers = torch.tensor(list(itertools.product(range(3), repeat=3)))
    values = numbers.double()
    # Attention with a large factor: softmax is hardmax on whole numbers.
    high, low = ((1e4 * sign * values).softmax(-1) for sign in (1, -1))
    reach = ((high - low) * values).sum(-1, keepdim=True)
    assert torch.equal(selective_shift(numbers, 1, 5).double(), values + 5 * reach * (values == 1))


@pytest.mark.parametrize(
    ("word", "call"),
    [
        ("identifiers", lambda: shift_stack(3, 2, 8)),
        ("cells", lambda: shift_stack(2, 1, 3)),
        ("grid", lambda: shift_stack(0, 1, 3)),
        ("numbers", lambda: selective_shift(torch.zeros(3), 0, 1)),
    ],
)
def test_bad_input_is_refused(word, call):
    with pytest.raises(UserError, match=word):
        call()
