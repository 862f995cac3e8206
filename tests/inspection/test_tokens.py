import pytest
import torch

from massieu.inspection.tokens import COMPARED, Tokens


def test_choices_do_not_depend_on_the_batch_or_the_side_of_the_padding():
    alone = Tokens.of(torch.ones(1, 30, dtype=torch.bool), ["a"])
    content = torch.zeros(2, 50, dtype=torch.bool)
    content[0, :9] = True
    content[1, 20:] = True
    batched = Tokens.of(content, ["b", "a"])
    second = batched.sequence == 1
    assert torch.equal(batched.hashes[second], alone.hashes)
    assert torch.equal(batched.permutation[second] - 9, alone.permutation)
    mine = [(int(i) - 9, int(j) - 9) for i, j in zip(*batched.pairs, strict=True) if i >= 9]
    assert mine == [(int(i), int(j)) for i, j in zip(*alone.pairs, strict=True)]


def test_pairs_are_of_different_tokens_of_one_sequence():
    tokens = Tokens.of(torch.ones(3, 40, dtype=torch.bool), ["a", "b", "c"])
    first, second = tokens.pairs
    assert len(first) == 2 * 3 * 39
    assert bool((first != second).all())
    assert torch.equal(tokens.sequence[first], tokens.sequence[second])


def test_special_tokens_come_after_the_content_and_padding_not_at_all():
    content = torch.tensor([[False, True, True, False, False]])
    present = torch.tensor([[True, True, True, True, False]])
    tokens = Tokens.of(content, ["a"], present)
    assert tokens.index.tolist() == [1, 2, 0, 3]
    assert tokens.num_content == 2


def test_documents_fall_into_two_halves_by_their_content():
    keys = [f"text {number}" for number in range(200)]
    first, second = Tokens.of(torch.ones(200, 1, dtype=torch.bool), keys).halves
    assert len(first) + len(second) == 200
    assert 70 < len(first) < 130


def test_passages_of_one_document_stay_together():
    keys, documents = range(200), [f"document {number // 10}" for number in range(200)]
    tokens = Tokens.of(torch.ones(200, 2, dtype=torch.bool), keys, documents=documents)
    halves = [{documents[row] for row in tokens.row[half].tolist()} for half in tokens.halves]
    assert not halves[0] & halves[1]
    assert len(halves[0] | halves[1]) == 20
    assert all(len(set(tokens.group[begin : begin + 10].tolist())) == 1 for begin in range(0, 200, 10))
    assert len(set(tokens.group.tolist())) > 4
    assert tokens.pair_group.tolist() == tokens.group[tokens.sequence[tokens.pairs[0]]].tolist()


def test_at_most_some_tokens_of_a_sequence_are_compared():
    content = torch.ones(2, 100, dtype=torch.bool)
    content[1, 3:] = False
    chosen, filled = Tokens.of(content, ["a", "b"]).compared
    assert chosen.shape == (2, COMPARED)
    assert filled.sum(1).tolist() == [COMPARED, 3]
    assert len(chosen[0].unique()) == COMPARED
    assert sorted(chosen[1, :3].tolist()) == [100, 101, 102]


@pytest.mark.parametrize(
    ("content", "keys", "present", "message"),
    [
        (
            torch.ones(2, 3),
            ["a", "b"],
            None,
            "the content mask must be boolean of shape \\(batch, tokens\\), got torch.float32",
        ),
        (torch.ones(2, 3, dtype=torch.bool), ["a"], None, "expected one key for each of 2 rows, got 1"),
        (
            torch.ones(1, 3, dtype=torch.bool),
            ["a"],
            torch.ones(1, 4),
            "present must have the shape \\(1, 3\\) of content, got \\(1, 4\\)",
        ),
    ],
)
def test_masks_that_do_not_fit_are_refused(content, keys, present, message):
    with pytest.raises(ValueError, match=message):
        Tokens.of(content, keys, present)
