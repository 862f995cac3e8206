"""Attention that visits blocks only, against dense masked attention."""

import pytest
import torch

from massieu import attend
from massieu.patterns import (
    bigbird,
    causal,
    fixed,
    from_mask,
    full,
    global_window,
    powers_of_two,
    sparse_attend,
    sparse_plan,
    star_ring,
    strided,
    window,
)

PATTERNS = [
    window(3),
    window(3, causal=True),
    star_ring(),
    strided(12)[0],
    strided(12)[1],
    fixed(12)[1],
    global_window(2, 3),
    bigbird(1, 2, 3),
    powers_of_two(causal=True),
    causal(),
    full(),
]


def tensors(*lead, length=150, dim=8, dtype=torch.float64, key_heads=None):
    generator = torch.Generator().manual_seed(0)
    shapes = [lead, *([(*lead[:-1], key_heads)] * 2 if key_heads else [lead] * 2)]
    return [torch.randn(*shape, length, dim, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
@pytest.mark.parametrize("block", [16, 64])
def test_outputs_statistics_and_gradients_are_those_of_the_mask(pattern, block):
    given = tensors(2, 3)
    plan = sparse_plan(pattern, 150, block=block)
    found, expected = sparse_attend(*given, plan), attend(*given, pattern.mask(150))
    assert torch.allclose(found.output, expected.output, atol=1e-12)
    for name, own, other in zip(found.statistics._fields, found.statistics, expected.statistics, strict=True):
        assert torch.allclose(own, other, atol=1e-10), name
    weights = torch.randn(found.output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def loss(attended):
        rows = attended.statistics
        return (weights * attended.output).sum() + rows.entropy.sum() + rows.score_variance.square().sum()

    for own, other in zip(
        torch.autograd.grad(loss(found), given), torch.autograd.grad(loss(expected), given), strict=True
    ):
        assert torch.allclose(own, other, atol=1e-10)


def test_another_pattern_gives_another_output():
    given = tensors(2, 3)
    assert not torch.allclose(
        sparse_attend(*given, window(3)).output, attend(*given, window(4).mask(150)).output, atol=1e-3
    )


def test_in_single_precision_it_is_as_near_to_the_truth_as_dense_attention():
    given = tensors(1, 4, length=600, dim=32, dtype=torch.float32)
    pattern = bigbird(4, 2, 3)
    truth = attend(*(each.double() for each in given), pattern.mask(600)).output
    assert (sparse_attend(*given, pattern).output - truth).abs().max() < 1e-6
    output = sparse_attend(*given, pattern, statistics=None).output
    for own, other in zip(
        torch.autograd.grad(output.square().sum(), given),
        torch.autograd.grad(attend(*given, pattern.mask(600)).output.square().sum(), given),
        strict=True,
    ):
        assert (own - other).abs().max() < 1e-6 * (1 + other.abs().max())


def test_grouped_heads_sinks_scales_and_levels_go_through():
    query, key, value = tensors(2, 4, key_heads=2)
    sink = torch.tensor([0.1, 0.2, -1.0, 3.0], dtype=torch.float64)
    found = sparse_attend(query, key, value, star_ring(), scale=0.3, sink=sink, statistics="light")
    expected = attend(query, key, value, star_ring().mask(150), scale=0.3, sink=sink, statistics="light")
    assert torch.allclose(found.output, expected.output, atol=1e-12)
    assert torch.allclose(found.statistics.entropy, expected.statistics.entropy, atol=1e-12)
    assert found.statistics.collision is None
    assert sparse_attend(query, key, value, star_ring(), statistics=None).statistics is None


@pytest.mark.parametrize("pattern", [window(3), fixed(50)[0], star_ring()], ids=repr)
@pytest.mark.parametrize(
    "lead", [((2, 3), (3,), (3,)), ((3,), (), ()), ((3,), (2, 3), (2, 3)), ((2, 3), (1, 3), ()), ((2, 4), (2,), (2,))]
)
def test_leading_axes_broadcast_as_in_dense_attention(pattern, lead):
    query, key, value = (tensors(*each)[number] for number, each in enumerate(lead))
    found, expected = sparse_attend(query, key, value, pattern), attend(query, key, value, pattern.mask(150))
    assert found.output.shape == expected.output.shape
    assert torch.allclose(found.output, expected.output, atol=1e-12)
    assert torch.allclose(found.statistics.entropy, expected.statistics.entropy, atol=1e-12)


def test_rows_that_see_nothing_are_zero_as_in_dense_attention():
    mask = window(1).mask(20)
    mask[7] = False
    query, key, value = tensors(length=20)
    found = sparse_attend(query, key, value, from_mask(mask, self_loops=False))
    assert (found.output[7] == 0).all()
    assert found.statistics.entropy[7].isnan()
    assert torch.allclose(found.output, attend(query, key, value, mask).output, atol=1e-12)


@pytest.mark.parametrize(
    ("pattern", "most"),
    [(window(16), 4), (strided(64)[1], 2), (fixed(64)[0], 1), (global_window(16, 2), 4), (full(), 1), (causal(), 2.1)],
    ids=repr,
)
def test_a_plan_visits_every_connection_once_and_few_others(pattern, most):
    plan = sparse_plan(pattern, 2048 if pattern.density(1024) < 0.5 else 512)
    assert plan.connections <= plan.visited <= most * plan.connections
    rows = torch.cat([tiles.queries.reshape(-1) for tiles in plan.tiles])
    assert torch.equal(rows.sort().values, torch.arange(plan.length))
    assert repr(plan).startswith(f"SparsePlan(length={plan.length}, connections={plan.connections}")


@pytest.mark.parametrize(
    ("word", "call"),
    [
        ("length", lambda q: sparse_plan(window(1))),
        ("9 tokens", lambda q: sparse_plan(window(1).at(9), 12)),
        ("Schedule", lambda q: sparse_attend(q, q, q, strided(2))),
        ("block", lambda q: sparse_plan(window(1), 9, block=0)),
        ("as many tokens", lambda q: sparse_attend(q, q[:-1], q, window(1))),
        ("query", lambda q: sparse_attend(q[0], q, q, window(1))),
        ("key", lambda q: sparse_attend(q, [1.0], q, window(1))),
        ("broadcast", lambda q: sparse_attend(q.expand(2, 9, 4), *[q.expand(3, 9, 4)] * 2, window(1))),
    ],
)
def test_bad_input_is_refused(word, call):
    with pytest.raises(ValueError, match=word):
        call(torch.zeros(9, 4))
