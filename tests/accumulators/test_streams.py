"""Sums that merge give what all values at once give."""

import torch
from torch.testing import assert_close

from massieu.accumulators.streams import Extremes, Means, Shares


def documents(number: int = 6) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 5 + 7 * i, generator=generator).double() + i for i in range(number)]


def test_the_mean_is_the_mean_of_all_rows():
    means = Means((3,))
    for i, rows in enumerate(documents()):
        means.add(i, rows.sum(-1), torch.tensor(rows.shape[-1]))
    assert_close(means.mean(), torch.cat(documents(), -1).mean(-1))


def test_the_standard_error_is_the_spread_of_the_mean_over_new_documents():
    generator = torch.Generator().manual_seed(1)

    def sample() -> Means:
        means = Means((1,))
        for i in range(40):
            rows = torch.randn(1, generator=generator) + 0.1 * torch.randn(
                int(5 + 20 * torch.rand(1, generator=generator))
            )
            means.add(i, rows.sum()[None], torch.tensor([len(rows)]))
        return means

    drawn = [sample() for _ in range(300)]
    spread = torch.stack([means.mean() for means in drawn]).std()
    said = torch.stack([means.standard_error() for means in drawn]).mean()
    assert abs(said / spread - 1) < 0.15
    # Rows taken as independent would claim far too much.
    naive = 1.0 / (40 * 15) ** 0.5
    assert naive < 0.5 * spread


def test_a_document_in_parts_in_any_order_counts_once():
    whole, parts = Means((3,)), Means((3,))
    for i, rows in enumerate(documents()):
        whole.add(i, rows.sum(-1), torch.tensor(rows.shape[-1]))
    for begin in (0, 4):
        for i, rows in enumerate(documents()):
            own = rows[:, :4] if begin == 0 else rows[:, 4:]
            parts.add(i, own.sum(-1), torch.tensor(own.shape[-1]), parts=2)
    assert parts.documents == whole.documents
    assert_close(parts.standard_error(), whole.standard_error())


def test_a_document_that_stays_open_is_counted_when_all_is_closed():
    means = Means((1,))
    means.add(0, torch.tensor([2.0]), torch.tensor([1]), parts=2)
    assert means.documents == 0
    means.close()
    assert means.documents == 1
    assert means.mean().item() == 2.0


def test_streams_that_are_merged_give_what_one_stream_gives():
    one, first, second = Means((3,)), Means((3,)), Means((3,))
    extremes = [Extremes.none((3,)) for _ in range(3)]
    shares = [Shares((3,)) for _ in range(3)]
    for i, rows in enumerate(documents()):
        for which in (0, 1 + i % 2):
            (one, first, second)[which].add(i, rows.sum(-1), torch.tensor(rows.shape[-1]))
            extremes[which].add(rows)
            shares[which].add(rows.sigmoid())
    first.merge(second)
    extremes[1].merge(extremes[2])
    shares[1].merge(shares[2])
    assert_close(first.mean(), one.mean())
    assert_close(first.standard_error(), one.standard_error())
    assert_close(extremes[1].largest, extremes[0].largest)
    assert_close(extremes[1].smallest, torch.cat(documents(), -1).amin(-1))
    assert_close(shares[1].median(), shares[0].median())


def test_standard_errors_of_large_means_do_not_cancel():
    small, large = Means((1,)), Means((1,))
    for i, rows in enumerate(documents()):
        rows = rows[:1] * 1e-6
        small.add(i, rows.sum(-1), torch.tensor(rows.shape[-1]))
        large.add(i, rows.sum(-1) + 1e3 * rows.shape[-1], torch.tensor(rows.shape[-1]))
    assert_close(large.standard_error(), small.standard_error(), rtol=1e-4, atol=0)


def test_an_open_document_survives_a_merge():
    first, second = Means((1,)), Means((1,))
    second.add(7, torch.tensor([2.0]), torch.tensor([1]), parts=2)
    first.merge(second)
    first.add(7, torch.tensor([4.0]), torch.tensor([1]), parts=2)
    assert first.documents == 1
    assert first.mean().item() == 3.0


def test_a_single_document_has_no_standard_error():
    means = Means((1,))
    means.add(0, torch.tensor([1.0]), torch.tensor([1]))
    assert means.standard_error().isnan().all()


def test_nothing_seen_is_nan():
    assert Means((2,)).mean().isnan().all()
    assert Shares((2,)).median().isnan().all()


def test_the_median_of_shares_is_right_to_one_part_in_a_hundred_and_its_side_of_an_edge_exactly():
    generator = torch.Generator().manual_seed(0)
    for power in (1.0, 4.0, 12.0):
        values = torch.rand(5, 1001, generator=generator).double() ** power
        shares = Shares((5,))
        shares.add(values)
        middle = values.median(-1).values
        assert_close(shares.median(), middle, rtol=0.012, atol=0)
        for edge in (1 / 2, 1 / 8, 1 / 32):
            assert shares.exceeds(edge).tolist() == (middle > edge).tolist()


def test_a_share_on_an_edge_does_not_exceed_it():
    for edge in (1 / 2, 1 / 8, 1 / 32):
        shares = Shares((1,))
        shares.add(torch.tensor([[edge]]))
        assert not shares.exceeds(edge).item()
        shares.add(torch.tensor([[edge * 1.02, edge * 1.02]]))
        assert shares.exceeds(edge).item()


def test_nan_counts_nowhere():
    shares, extremes = Shares((1,)), Extremes.none((1,))
    values = torch.tensor([[torch.nan, 0.25, torch.nan]])
    shares.add(values)
    extremes.add(values)
    assert shares.counts.sum() == 1
    assert extremes.largest.item() == extremes.smallest.item() == 0.25
