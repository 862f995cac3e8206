"""Counts and digests add up in any order, and a sample of hashes tells whether two texts are the same."""

from __future__ import annotations

import hashlib

import pytest

from massieu.corpus.document_counts import SKETCHED, DocumentCounts
from massieu.inspection.partial_result import Coverage


def counted(numbers) -> DocumentCounts:
    counts = DocumentCounts()
    counts.add(hashlib.sha256(str(number).encode()).hexdigest() for number in numbers)
    return counts


def test_digests_add_up_in_any_order_and_count_repetitions():
    whole, first, second = counted(range(30)), counted(range(20, 30)), counted(range(20))
    first.merge(second)
    assert first == whole
    assert (
        whole.sha256 == f"{sum(int(hashlib.sha256(str(n).encode()).hexdigest(), 16) for n in range(30)) % 2**256:064x}"
    )
    assert counted([*range(30), 3]).sha256 != whole.sha256
    assert counted(range(29)).sha256 != whole.sha256


@pytest.mark.parametrize(
    ("first", "second", "share"),
    [
        (range(100), range(100, 200), 0),
        (range(100), range(90, 200), 0.1),
        (range(100), range(100), 1),
        (range(20_000), range(20_000), 1),
        (range(20_000), range(15_000, 35_000), 0.25),
        (range(20_000), range(500), 1),  # the smaller one lies inside
        (range(20_000), range(20_000, 20_500), 0),
        ((), range(9), 0),
    ],
)
def test_the_share_of_common_documents_is_found(first, second, share):
    one, other = counted(first), counted(second)
    assert len(one.sketch) == min(len(first), SKETCHED)
    # Of about a thousand draws; where all are kept there is nothing to estimate.
    error = 0.05 if 0 < share < 1 and max(len(first), len(second)) > SKETCHED else 0
    assert one.shared(other) == other.shared(one)
    assert one.shared(other).share == pytest.approx(share, abs=error + 1e-12)
    assert one.shared(other).whole == (max(len(first), len(second)) < SKETCHED)


def test_a_share_is_known_only_if_enough_documents_were_compared():
    large = counted(range(100_000))
    inside, outside = counted(range(50)), counted(range(100_000, 100_050))
    for small in (inside, outside):
        assert large.shared(small).compared < 30
        assert not large.shared(small).known
    assert large.shared(counted(range(10_000))).known
    assert inside.shared(outside).known  # all of them are kept
    assert DocumentCounts().shared(inside).known
    assert not DocumentCounts().shared(large).known  # as of any small run


def test_a_module_that_ran_anywhere_is_not_idle():
    one = Coverage(["a", "b", "c"], {"a"}, {"a"}, {"c"}, {"x"})
    other = Coverage(["a", "b", "c"], {"a", "b"}, {"a", "b", "c"}, {"c"}, {"x", "y"})
    empty = Coverage()
    assert one.sentence == "observed 1 of 3 attention modules; c without softmax; 2 did not run"
    assert one.missing == ["b"]
    for each in (empty, other):
        one.merge(each)
    assert one == other
    empty.merge(other)
    assert empty == other
    assert (one.sentence, one.missing) == ("observed 2 of 3 attention modules; c without softmax", [])
