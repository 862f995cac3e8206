"""Attention and its row statistics, against the dense float64 reference and against autograd."""

from __future__ import annotations

import pytest
import torch
from dense import dense
from torch import Tensor
from torch.testing import assert_close

from massieu import RowStatistics, attend, mass_count, row_statistics
from massieu.checks import UserError
from massieu.kernels import dispatch, tiles
from massieu.statistics import probabilities


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def kernel(request, monkeypatch):
    """Everything here holds for both kernels; without a compiler there is one."""
    if request.param == "torch":
        monkeypatch.setattr(dispatch, "loaded", lambda: None)
    elif dispatch.loaded() is None:
        pytest.skip("the compiled kernel was not built, or is switched off")
    return request.param


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def inputs(length: int, *, heads: int = 4, key_heads: int = 4, batch: int = 2, dtype=torch.float32) -> list[Tensor]:
    return [randn(batch, h, length, 32, seed=s, dtype=dtype) for s, h in enumerate((heads, key_heads, key_heads))]


def assert_matches_dense(query: Tensor, key: Tensor, value: Tensor, log_weight: Tensor | None = None, **options):
    """1e-5 relative, plus four roundings of the largest score: what float32 scores cannot beat."""
    expected = dense(query, key, value, log_weight, **options)
    attended = attend(query, key, value, log_weight, **options)
    eps = torch.finfo(torch.float64 if query.dtype == torch.float64 else torch.float32).eps
    relative = 1e-12 if query.dtype == torch.float64 else 1e-5
    floor = 4 * eps * max(1.0, expected.largest_score)
    for name, found in zip(("output", *RowStatistics._fields), (attended.output, *attended.statistics), strict=True):
        whole = getattr(expected, name)
        bound = relative * float(whole.nan_to_num(0.0).abs().max()) if name == "output" else 0.0
        assert_close(
            found.double(), whole, rtol=relative, atol=floor + bound, equal_nan=True, msg=lambda m, n=name: n + m
        )


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "windowed": {"window": 37},
    "causal window": {"causal": True, "window": 100},
    "ragged": {"lengths": True},
    "ragged causal": {"lengths": True, "causal": True},
}


@pytest.fixture(params=OPTIONS.values(), ids=list(OPTIONS))
def options(request):
    return request.param


def with_lengths(options: dict, length: int, batch: int = 2) -> dict:
    return (
        {**options, "lengths": torch.tensor([max(1, length // 3), length][-batch:])}
        if "lengths" in options
        else options
    )


@pytest.mark.parametrize("length", [1, 7, 256, 700])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_attend_agrees_with_the_dense_reference(options, length, key_heads):
    assert_matches_dense(*inputs(length, key_heads=key_heads), **with_lengths(options, length))


def test_attend_agrees_with_the_dense_reference_in_double_precision(options):
    assert_matches_dense(*inputs(300, dtype=torch.float64, key_heads=2), **with_lengths(options, 300))


def test_attend_agrees_with_the_dense_reference_at_four_thousand_atoms(options):
    assert_matches_dense(*inputs(4096, heads=4, key_heads=2, batch=1), **with_lengths(options, 4095, batch=1))


def test_attend_with_a_bias_agrees_with_the_dense_reference_at_four_thousand_atoms():
    assert_matches_dense(*inputs(4096, heads=2, key_heads=2, batch=1), 3 * randn(4096, 4096, seed=5), causal=True)


@pytest.mark.parametrize(
    "shape",
    [(300,), (300, 300), (1, 1, 1, 300), (2, 1, 1, 300), (2, 4, 300, 300), (4, 300, 300), (4, 1, 1), (2, 1, 300, 1)],
)
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("case", ["plain", "ragged causal"])
def test_log_weights_broadcast_like_any_tensor(shape, key_heads, case):
    log_weight = 3 * randn(*shape, seed=5)
    assert_matches_dense(*inputs(300, key_heads=key_heads), log_weight, **with_lengths(OPTIONS[case], 300))


@pytest.mark.parametrize("size", [1.0, 1e2, 1e4])
def test_scores_up_to_ten_thousand_keep_their_statistics(size, options):
    query, key, value = inputs(300)
    query = query * (size / float((query @ key.mT).abs().max() * 32**-0.5))
    assert_matches_dense(query, key, value, **with_lengths(options, 300))


def test_scores_of_ten_thousand_cost_no_accuracy_at_all():
    # A product in float32 alone would round these scores by 1e-3, and near ties between atoms with them.
    query, key, value = inputs(300)
    expected = dense(query, key, value, scale=300.0)
    assert expected.largest_score > 5e3
    attended = attend(query, key, value, scale=300.0)
    assert attended.output.dtype == attended.statistics.entropy.dtype == torch.float32
    assert_close(attended.output.double(), expected.output, rtol=1e-6, atol=1e-6)
    assert_close(attended.statistics.entropy.double(), expected.entropy, rtol=1e-6, atol=1e-6)


def test_a_common_offset_of_ten_thousand_does_not_hurt_the_variance():
    query, key, value = inputs(300)
    query[..., 0], key[..., 0] = 32**0.5, 1e4
    assert float(attend(query, key, value).statistics.log_normalizer.mean()) > 9e3
    assert_matches_dense(query, key, value)


def test_one_hot_rows_have_no_entropy():
    _, key, value = inputs(64)
    found = attend(50 * key, key, value).statistics
    assert_matches_dense(50 * key, key, value)
    assert bool((found.entropy >= 0).all())
    assert float(found.entropy.min()) < 1e-6
    assert float(found.peak.max()) == 1.0


def test_repeated_keys_share_their_weight():
    query, key, value = inputs(64)
    key = key[:, :, :1].expand_as(key)
    assert_matches_dense(query, key, value)
    assert_close(attend(query, key, value).statistics.collision, torch.full((2, 4, 64), 1 / 64))


def test_more_queries_than_tile_rows_and_fewer_than_atoms():
    query, key, value = inputs(700)
    assert_matches_dense(query[:, :, :300], key, value, causal=True)
    assert_matches_dense(query[:, :, :1], key, value, causal=True)


def test_a_row_without_atoms_gives_zero_output_and_nan_statistics():
    query, key, value = (x.requires_grad_() for x in inputs(9))
    log_weight = torch.zeros(9, 9)
    log_weight[2] = -torch.inf
    log_weight[5] = torch.finfo(torch.float32).min
    attended = attend(query, key, value, log_weight)
    empty = torch.tensor([i in (2, 5) for i in range(9)])
    assert bool((attended.output[:, :, empty] == 0).all())
    for field in attended.statistics:
        assert bool(torch.isnan(field[..., empty]).all())
        assert bool(torch.isfinite(field[..., ~empty]).all())
    attended.output.sum().backward()
    assert all(bool(torch.isfinite(x.grad).all()) for x in (query, key, value))
    assert bool((query.grad[:, :, empty] == 0).all())
    assert bool((mass_count(query, key, log_weight)[..., empty] == 0).all())


def test_rows_before_the_first_atom_and_lengths_of_zero_are_empty():
    query, key, value = inputs(9)
    attended = attend(query, key[:, :, :4], value[:, :, :4], causal=True)
    assert bool(torch.isnan(attended.statistics.entropy[:, :, :5]).all())
    assert bool(torch.isfinite(attended.statistics.entropy[:, :, 5:]).all())
    attended = attend(query, key, value, lengths=torch.tensor([0, 9]))
    assert bool((attended.output[0] == 0).all())
    assert bool(torch.isfinite(attended.statistics.entropy[1]).all())


def test_no_atoms_or_no_queries_at_all_are_no_error():
    query, key, value = inputs(3)
    none = attend(query, key[:, :, :0], value[:, :, :0])
    assert bool((none.output == 0).all())
    assert bool(torch.isnan(none.statistics.log_normalizer).all())
    assert attend(query[:, :, :0], key, value).output.shape == (2, 4, 0, 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_accumulated_in_single_precision(dtype, options):
    query, key, value = (x.to(dtype) for x in inputs(300))
    options = with_lengths(options, 300)
    expected = dense(query, key, value, **options)
    attended = attend(query, key, value, **options)
    assert attended.output.dtype == dtype
    assert_close(attended.output.double(), expected.output, rtol=0, atol=torch.finfo(dtype).eps * 4)
    for name, found in attended.statistics._asdict().items():
        assert found.dtype == torch.float32
        assert_close(found.double(), getattr(expected, name), rtol=1e-5, atol=1e-5)


def test_masks_of_half_precision_models_count_as_absent():
    query, key, value = (x.half() for x in inputs(16))
    log_weight = torch.zeros(16, 16, dtype=torch.float16).masked_fill_(
        torch.ones(16, 16, dtype=torch.bool).triu(1), torch.finfo(torch.float16).min
    )
    assert_close(attend(query, key, value, log_weight).output, attend(query, key, value, causal=True).output)
    log_weight[3] = torch.finfo(torch.float16).min
    attended = attend(query, key, value, log_weight)
    assert bool((attended.output[:, :, 3] == 0).all())
    assert bool(torch.isnan(attended.statistics.entropy[:, :, 3]).all())


def test_strided_inputs_give_the_same_numbers():
    query, key, value = inputs(100)
    expected = attend(query, key, value)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value)]
    padded = [torch.stack([x, -x], -1)[..., 0] for x in (query, key, value)]
    for other in (strided, padded):
        assert not other[0].is_contiguous()
        found = attend(*other)
        assert_close(found.output, expected.output, rtol=1e-6, atol=1e-6)
        assert_close(found.statistics.entropy, expected.statistics.entropy, rtol=1e-6, atol=1e-6)


def test_leading_axes_broadcast_in_both_directions():
    query, key, value = randn(5, 1, 6, 8), randn(3, 7, 8, seed=1), randn(3, 7, 2, seed=2)
    found = attend(query, key, value).output
    assert found.shape == (5, 3, 6, 2)
    for i in range(5):
        for j in range(3):
            assert_close(found[i, j], attend(query[i, 0], key[j], value[j]).output)
    assert_close(attend(query[0, 0], key, value).output, found[0])
    # One query axis shared by all keys lies before the axis that distinguishes them.
    assert_close(attend(query[:, 0, None], key[None], value[None]).output, found)


def test_light_statistics_leave_out_what_costs():
    query, key, value = inputs(50)
    full, light = attend(query, key, value), attend(query, key, value, statistics="light")
    assert light.statistics.score_variance is None
    assert light.statistics.collision is None
    assert_close(light.statistics.entropy, full.statistics.entropy)
    none = attend(query, key, value, statistics=None)
    assert none.statistics is None
    assert_close(none.output, full.output)


def test_row_statistics_are_those_of_attend_without_scaling():
    query, key, value = inputs(50)
    attended = attend(query, key, value, scale=1.0, causal=True).statistics
    for found, expected in zip(row_statistics(query, key, causal=True), attended, strict=True):
        assert_close(found, expected)


def test_results_do_not_depend_on_batch_mates():
    query, key, value = inputs(300, batch=6)
    whole = attend(query, key, value, causal=True)
    for i in range(6):
        alone = attend(query[i], key[i], value[i], causal=True)
        assert_close(alone.output, whole.output[i], rtol=1e-6, atol=1e-6)
        assert_close(alone.statistics.score_variance, whole.statistics.score_variance[i], rtol=1e-5, atol=1e-6)


GRADIENTS = {
    "plain": {},
    "causal": {"causal": True},
    "causal window": {"causal": True, "window": 2},
    "windowed": {"window": 2},
    "ragged": {"lengths": torch.tensor([2, 5])},
}


@pytest.mark.parametrize("options", GRADIENTS.values(), ids=list(GRADIENTS))
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("weight_shape", [(5,), (4, 5, 5), (2, 1, 5, 5), (2, 4, 1, 1)], ids=str)
def test_gradients_of_output_and_statistics_pass_gradcheck(options, key_heads, weight_shape):
    query, key, value = (
        randn(2, h, 5, 3, seed=s, dtype=torch.float64).requires_grad_() for s, h in enumerate((4, key_heads, key_heads))
    )
    log_weight = randn(*weight_shape, seed=4, dtype=torch.float64).requires_grad_()

    def function(*tensors):
        attended = attend(*tensors, **options)
        found = attended.statistics
        return attended.output, *found[:4], found.collision

    assert all(x.requires_grad for x in function(query, key, value, log_weight))
    assert torch.autograd.gradcheck(function, (query, key, value, log_weight), fast_mode=True)


@pytest.mark.parametrize("field", ["log_normalizer", "score_mean", "entropy", "score_variance", "collision"])
def test_gradient_of_each_statistic_alone_passes_gradcheck(field):
    query, key = (randn(3, 5, 4, seed=s, dtype=torch.float64).requires_grad_() for s in range(2))
    assert torch.autograd.gradcheck(lambda q, k: getattr(row_statistics(q, k), field), (query, key))


def test_gradients_by_tiles_agree_with_autograd_through_the_dense_matrix():
    tensors = [x.double().requires_grad_() for x in inputs(600, key_heads=2)]
    log_weight = randn(4, 600, 600, dtype=torch.float64).requires_grad_()

    def loss(output, log_normalizer, entropy, variance, collision):
        weights = torch.arange(600, dtype=torch.float64).cos()
        rows = log_normalizer + 2 * entropy - 0.5 * variance + 30 * collision
        return (output.sum(-1) * weights).sum() + (rows * weights.flip(0)).sum()

    attended = attend(*tensors, log_weight, causal=True)
    found = attended.statistics
    ours = loss(attended.output, found.log_normalizer, found.entropy, found.score_variance, found.collision)
    reference = dense(*tensors, log_weight, causal=True)
    theirs = loss(
        reference.output,
        reference.log_normalizer,
        reference.log_normalizer - reference.score_mean,
        reference.score_variance,
        reference.collision,
    )
    wanted = (*tensors, log_weight)
    for mine, other in zip(torch.autograd.grad(ours, wanted), torch.autograd.grad(theirs, wanted), strict=True):
        assert_close(mine, other, rtol=1e-9, atol=1e-10)


def test_gradients_of_huge_scores_are_finite_and_right():
    query, key, value = inputs(300)
    query = (query * 2500).requires_grad_()
    found = attend(query, key, value, causal=True)
    (ours,) = torch.autograd.grad(found.statistics.score_variance.sum() + found.output.sum(), query)
    exact = query.detach().double().requires_grad_()
    reference = dense(exact, key, value, causal=True)
    (theirs,) = torch.autograd.grad(reference.score_variance.sum() + reference.output.sum(), exact)
    assert bool(torch.isfinite(ours).all())
    # Scores near 1e4 are rounded by about 1e-3, and so are their weights.
    assert_close(ours.double(), theirs, rtol=1e-2, atol=1e-2 * float(theirs.abs().max()))


def test_absent_atoms_do_not_overflow_a_large_gradient_of_the_variance():
    query, key, value = inputs(20)
    query.requires_grad_()
    (grad,) = torch.autograd.grad(1e12 * attend(query, key, value, causal=True).statistics.score_variance.sum(), query)
    assert bool(torch.isfinite(grad).all())


@pytest.mark.parametrize("which", [1, 2, 3])
def test_every_entry_of_an_expanded_leaf_has_its_own_gradient(which):
    query, key, value = inputs(6)
    tensors = [query, key, value, randn(2, 4, 6, 6, seed=4)]
    shared = tensors[which][:, :1].expand_as(tensors[which])
    grads = []
    for leaf in (shared.clone(), shared.detach()):
        tensors[which] = leaf.requires_grad_()
        attended = attend(*tensors)
        loss = attended.output.square().sum() + attended.statistics.entropy.sum()
        grads += torch.autograd.grad(loss, leaf)
    assert not torch.allclose(grads[0][:, 0], grads[0][:, 1])
    assert_close(grads[1], grads[0])


def test_gradients_reach_an_expanded_log_weight():
    query, key, value = inputs(10)
    small = randn(1, 1, 1, 10).requires_grad_()
    (through,) = torch.autograd.grad(attend(query, key, value, small.expand(2, 4, 10, 10)).output.sum(), small)
    (direct,) = torch.autograd.grad(attend(query, key, value, small).output.sum(), small)
    assert_close(through, direct)


def test_functional_gradients_work_and_stay_with_tiles(monkeypatch):
    monkeypatch.setattr("massieu.statistics.gradient._dense_backward", None)  # would raise if called
    query, key, value = inputs(10)
    entropy = torch.func.grad(lambda q: attend(q, key, value).statistics.entropy.sum())(query)
    query.requires_grad_()
    (expected,) = torch.autograd.grad(attend(query, key, value).statistics.entropy.sum(), query, create_graph=True)
    assert_close(entropy, expected)


@pytest.mark.parametrize("lengths", [7, torch.tensor([7, 10])], ids=["number", "tensor"])
def test_functional_gradients_work_with_lengths(lengths):
    query, key, value = inputs(10)
    found = torch.func.grad(lambda q: attend(q, key, value, lengths=lengths).output.square().sum())(query)
    counted = torch.func.grad(lambda q: attend(q, key, value, lengths=(q[:, 0, :, 0] < 9).sum(-1)).output.sum())(query)
    leaf = query.clone().requires_grad_()
    (expected,) = torch.autograd.grad(attend(leaf, key, value, lengths=lengths).output.square().sum(), leaf)
    assert_close(found, expected)
    assert_close(counted, torch.func.grad(lambda q: attend(q, key, value).output.sum())(query))


def test_mass_counts_are_constants_inside_of_functional_gradients():
    query, key, _ = inputs(10)
    expected = mass_count(query, key, lengths=7)
    found, seen = torch.func.grad(lambda q: (q.sum(), mass_count(q, key, lengths=7)), has_aux=True)(query)
    assert torch.equal(seen, expected)
    assert_close(found, torch.ones_like(query))
    leaf = query.clone().requires_grad_()
    assert not mass_count(leaf, key).requires_grad
    with pytest.raises(RuntimeError, match="vmap"):
        torch.func.vmap(lambda q: mass_count(q, key[0]))(query)


@pytest.mark.parametrize("options", GRADIENTS.values(), ids=list(GRADIENTS))
def test_second_derivatives_of_output_and_statistics_pass_gradgradcheck(options):
    query, key, value = (
        randn(2, h, 5, 3, seed=s, dtype=torch.float64).requires_grad_() for s, h in enumerate((4, 2, 2))
    )
    log_weight = randn(2, 1, 1, 5, seed=4, dtype=torch.float64).requires_grad_()

    def function(*tensors):
        attended = attend(*tensors, **options)
        return attended.output, *attended.statistics[:4], attended.statistics.collision

    assert torch.autograd.gradgradcheck(function, (query, key, value, log_weight), fast_mode=True)


def test_second_derivatives_are_right_when_keys_values_and_loss_depend_on_one_tensor():
    states = randn(6, 3, dtype=torch.float64).requires_grad_()

    def ours(x):
        output, found = attend(x, x.sin(), x.cos(), causal=True)
        return (output.square().sum(-1) * found.entropy).sum()

    def dense_form(x):
        found = dense(x[None, None], x.sin()[None, None], x.cos()[None, None], causal=True)
        return (found.output.square().sum(-1) * (found.log_normalizer - found.score_mean)).sum()

    hessians = [torch.autograd.functional.hessian(f, states.detach()) for f in (ours, dense_form)]
    assert_close(*hessians, rtol=1e-9, atol=1e-10)


def test_the_hessian_of_the_log_normalizer_is_the_fisher_matrix():
    keys, query = randn(7, 4, dtype=torch.float64), randn(4, seed=1, dtype=torch.float64)
    hessian = torch.autograd.functional.hessian(lambda q: row_statistics(q[None], keys).log_normalizer.sum(), query)
    weight = torch.softmax(keys @ query, 0)
    mean = weight @ keys
    assert_close(hessian, (weight[:, None] * (keys - mean)).mT @ (keys - mean))


def test_a_boolean_mask_is_true_where_the_atom_is_present():
    query, key, value = inputs(20)
    mask = randn(2, 1, 20, 20, seed=6) > 0
    mask[..., 0] = True
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)
    assert_close(attend(query, key, value, mask).output, expected)


def test_a_wide_mask_with_narrow_inputs_hides_and_does_not_spoil():
    query, key, value = inputs(3)
    mask = torch.tensor([0.0, 0.0, torch.finfo(torch.float32).min], dtype=torch.float64)
    assert_close(
        attend(query, key, value, mask).statistics.entropy, row_statistics(query, key[:, :, :2], scale=32**-0.5).entropy
    )


def test_gradients_come_back_in_the_dtype_of_each_input():
    query, key, value = (x.bfloat16().requires_grad_() for x in inputs(10))
    log_weight = randn(10, 10).requires_grad_()
    attend(query, key, value, log_weight).output.float().square().sum().backward()
    assert [x.grad.dtype for x in (query, value, log_weight)] == [torch.bfloat16, torch.bfloat16, torch.float32]


def test_lengths_may_be_one_number_and_a_batch_may_be_empty():
    query, key, value = (x[0, 0] for x in inputs(6))
    assert_close(attend(query, key, value, lengths=2).output, attend(query, key[:2], value[:2]).output)
    nothing = torch.zeros(0, 2, 3, 4)
    assert attend(nothing, nothing, nothing, lengths=torch.zeros(0).long()).output.shape == (0, 2, 3, 4)


@pytest.mark.parametrize("lead", [(0, 4), (2, 0), (0,)])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"lengths": 2}, {"sink": 0.5}, {"log_weight": torch.zeros(6)}]
)
def test_an_empty_batch_may_share_its_keys(lead, options):
    query, key = torch.zeros(*lead, 6, 3, requires_grad=True), torch.ones(6, 3, requires_grad=True)
    found = attend(query, key, key, **options)
    assert found.output.shape == (*lead, 6, 3)
    assert found.statistics.entropy.shape == (*lead, 6)
    assert mass_count(query, key, **options).shape == (*lead, 6)
    to_query, to_key = torch.autograd.grad(found.output.sum(), (query, key))
    assert to_query.shape == query.shape
    assert torch.equal(to_key, torch.zeros(6, 3))


@pytest.mark.parametrize("which", ["query", "key", "value", "log_weight", "sink", "lengths"])
def test_tensors_of_zeros_without_memory_are_read_as_zeros(which):
    query, key, value = (x[:, :2].clone() for x in inputs(6))
    arguments = {"query": query, "key": key, "value": value, "log_weight": randn(6, 6), "sink": randn(2)}
    arguments |= {"lengths": torch.tensor([6, 4])}
    zeros = torch.zeros_like(arguments[which])
    expected = attend(**arguments | {which: zeros})
    nothing = torch._efficientzerotensor(zeros.shape, dtype=zeros.dtype)
    found = attend(**arguments | {which: nothing})
    assert torch.equal(found.output, expected.output)
    assert_close(found.statistics, expected.statistics, equal_nan=True)
    counts = [
        mass_count(**{k: v for k, v in (arguments | {which: x}).items() if k != "value"}) for x in (zeros, nothing)
    ]
    assert torch.equal(*counts)


@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_a_functional_gradient_at_zeros_without_memory_is_that_at_zeros(which):
    arguments = dict(zip(("query", "key", "value"), (x[:, :2].clone() for x in inputs(6)), strict=True))
    zeros = torch.zeros_like(arguments[which])
    nothing = torch._efficientzerotensor(zeros.shape, dtype=zeros.dtype)
    gradient = torch.func.grad(lambda x: attend(**arguments | {which: x}).output.square().sum())
    assert torch.equal(gradient(nothing), gradient(zeros))


def test_incoming_gradients_of_zeros_without_memory_are_read_as_zeros():
    query, key, value = (x[:, :2].clone().requires_grad_() for x in inputs(6))
    found = attend(query, key, value)
    nothing = [torch._efficientzerotensor(x.shape) for x in (found.output, found.statistics.entropy)]
    assert nothing[0]._is_zerotensor()
    for outputs, coming in ((found.output, nothing[0]), (found.statistics.entropy, nothing[1])):
        gradients = torch.autograd.grad(outputs, (query, key), coming, retain_graph=True)
        assert not any(bool(x.any()) for x in gradients)


def test_perplexity_and_effective_atoms_follow_from_the_row():
    query, key, value = inputs(50)
    found = attend(0 * query, key, value).statistics
    assert_close(found.perplexity, torch.full((2, 4, 50), 50.0))
    assert_close(found.effective_atoms, torch.full((2, 4, 50), 50.0))
    with pytest.raises(UserError, match="effective_atoms needs full statistics, got light ones; pass"):
        _ = attend(query, key, value, statistics="light").statistics.effective_atoms


def test_no_tensor_of_size_queries_times_atoms_is_ever_made():
    length, largest = 2000, 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (list, tuple)) else [out]:
                if isinstance(tensor, Tensor):
                    largest = max(largest, tensor.untyped_storage().nbytes())
            return out

    query, key, value = (x.requires_grad_() for x in inputs(length, heads=2, key_heads=1, batch=1))
    with Watch():
        attended = attend(query, key, value, causal=True)
        (attended.output.sum() + attended.statistics.entropy.sum()).backward()
        mass_count(query, key)
        # Many leading entries that share one set of keys.
        row_statistics(torch.zeros(20_000, 1, 4), torch.zeros(256, 4))
        mass_count(torch.zeros(20_000, 1, 4), torch.zeros(256, 4))
    assert largest <= 3 * tiles.TILE_BYTES < length * length * 4


def test_grouped_keys_are_never_copied():
    from massieu.kernels import arrange

    query, key, value = inputs(64, heads=8, key_heads=2)
    mask = torch.zeros(2, 1, 1, 64).expand(2, 8, 64, 64)
    rows = arrange(query, key, value, mask, sink=None, scale=1.0, causal=False, window=None, lengths=None).inputs
    assert rows.key.data_ptr() == key.data_ptr()
    assert rows.value.data_ptr() == value.data_ptr()
    assert rows.log_weight.numel() == 2 * 64
    assert rows.log_weight.data_ptr() == mask.data_ptr()
    expanded = key[:, :1].expand(2, 8, 64, 32)
    rows = arrange(
        query, expanded, expanded, None, sink=None, scale=1.0, causal=False, window=None, lengths=None
    ).inputs
    assert rows.key.shape == (2, 64, 32)
    assert rows.key.data_ptr() == key.data_ptr()


@pytest.mark.parametrize("mass", [0.1, 0.5, 0.9, 0.999, 1.0])
def test_mass_count_is_the_size_of_the_smallest_set_with_the_mass(mass, options):
    query, key, value = (x.double() for x in inputs(300, key_heads=2))
    options = with_lengths(options, 300)
    probability = dense(2 * query, key, value, **options).probability
    held = probability.sort(-1, descending=True).values.cumsum(-1)
    expected = (held < mass * (1 - 1e-14)).sum(-1) + 1
    found = mass_count(2 * query, key, mass=mass, **options)
    assert found.dtype == torch.int64
    present = (probability > 0).sum(-1)
    assert bool((found <= present).all())
    # All of the mass: atoms lighter than rounding do not count.
    assert torch.equal(found, expected) if mass < 1 else bool((held.gather(-1, found[..., None] - 1) > 1 - 1e-13).all())


def test_mass_count_of_equal_weights_is_the_share_of_atoms():
    for atoms in (1, 3, 10, 100, 1000):
        found = mass_count(torch.zeros(1, 4), torch.zeros(atoms, 4))
        assert int(found) == -(-9 * atoms // 10)
    # In floating point 0.07 * 100 and 0.14 * 50 exceed seven.
    assert int(mass_count(torch.zeros(1, 4), torch.zeros(100, 4), mass=0.07)) == 7
    assert int(mass_count(torch.zeros(1, 4).double(), torch.zeros(50, 4).double(), mass=0.14)) == 7


def test_probabilities_of_an_empty_row_are_zero():
    scores = torch.zeros(2, 3)
    log_weight = torch.tensor([[0.0, 0.0, -torch.inf], [-torch.inf] * 3])
    assert_close(probabilities(scores, log_weight), torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]))


Q, K, V = torch.zeros(2, 4, 5, 8), torch.zeros(2, 4, 7, 8), torch.zeros(2, 4, 7, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((Q[0, 0, 0], K, V), "query must"),
        ((Q, K[..., :6], V), "query and key must have the same last axis, got 8 and 6; project"),
        ((Q, K, V[:, :, :6]), "key and value must have the same number of atoms, got 7 and 6; give"),
        ((Q[:, :3], K, V), r"leading axes that broadcast, got \(2, 3\) and \(2, 4\); insert"),
        ((Q, K, V[:, :3]), r"key and value must have leading axes that broadcast, got \(2, 4\) and \(2, 3\)"),
        ((Q.long(), K, V), "query must"),
        ((Q, K.numpy(), V), "key must"),
        (
            (Q, K.double(), V),
            "must share one dtype, got query torch.float32, key torch.float64, value torch.float32; convert",
        ),
        ((Q, K, V, torch.zeros(5, 6)), "log_weight must"),
        ((Q, K, V, torch.zeros(1, 1, 1, 1, 1, 7)), "log_weight must"),
        ((Q, K, V, torch.ones(5, 7).long()), r"got torch.int64; for a mask of zeros and ones pass mask.bool"),
        ((Q, K, V, [0.0] * 7), "log_weight must"),
        ((None, K, V), "query must"),
        ((Q, K, None), "value must"),
        ((Q, K, V[0, 0, 0]), "value must"),
        ((Q, K, V, torch.full((7,), -1.0).log()), "got nan or plus infinity; a nan is often the logarithm"),
        ((Q, K, V, torch.full((7,), torch.inf)), "log_weight must"),
        ((Q.to(torch.complex64), K, V), "query must"),
    ],
)
def test_bad_tensors_are_refused(arguments, message):
    with pytest.raises(UserError, match=message) as caught:
        attend(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": float("nan")}, "scale must"),
        ({"scale": torch.ones(4)}, "scale must"),
        ({"causal": torch.ones(5, 7)}, "causal must"),
        ({"window": 0}, "window must"),
        ({"sink": torch.inf}, "sink must"),
        ({"sink": "0"}, "sink must"),
        ({"lengths": torch.tensor([3.0, 4.0])}, "lengths must"),
        ({"lengths": torch.tensor([3, 8])}, "lengths must"),
        ({"lengths": torch.tensor([3, 4, 5])}, r"match the leading axes \(2, 4\) from the left, got \(3,\)"),
        ({"statistics": "all"}, "statistics must"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(UserError, match=message) as caught:
        attend(Q, K, V, **options)
    assert "\n" not in str(caught.value)


def test_a_mass_outside_its_range_is_refused():
    with pytest.raises(UserError, match="mass must"):
        mass_count(Q, K, mass=1.5)
    with pytest.raises(UserError, match="got Tensor"):
        mass_count(Q, K, mass=torch.zeros(5, 7))


def test_a_call_in_inference_mode_does_not_spoil_later_calls():
    query, key, value = inputs(40)
    with torch.inference_mode():
        inside = attend(query, key, value).output
    query.requires_grad_()
    outside = attend(query, key, value).output
    assert_close(outside.detach(), inside)
    outside.sum().backward()
    assert bool(torch.isfinite(query.grad).all())


def test_default_device_and_dtype_of_torch_do_not_matter(kernel):
    query, key, value = inputs(20)
    expected, count = attend(query, key, value, torch.zeros(20)), mass_count(query, key)
    dispatch_loaded = dispatch.loaded
    if kernel == "compiled":
        dispatch_loaded.cache_clear()  # the check at load runs inside too
    bias = torch.zeros(20)
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            found = attend(query, key, value, bias)
            assert torch.equal(mass_count(query, key), count)
            assert (dispatch.loaded() is None) == (kernel == "torch")
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found.output, expected.output)
    assert torch.equal(found.statistics.entropy, expected.statistics.entropy)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own, at its first dual tensor
def test_forward_mode_and_vmap_are_refused_and_never_ignored():
    query, key, value = inputs(5)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        attend(torch.autograd.forward_ad.make_dual(query, query), key, value)
    with pytest.raises(RuntimeError, match="vmap"):
        torch.func.vmap(lambda q: attend(q, key[0], value[0]).output)(query)


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FC00001, 0x7F800001])
def test_nan_is_never_hidden(bits):
    query, key, value = inputs(20)
    query.view(torch.int32)[0, 0, 3, 2] = bits
    query.requires_grad_()
    value.requires_grad_()
    found = attend(query, key, value)
    to_query, to_value = torch.autograd.grad(found.output.sum(), (query, value))
    for part in (found.output[0, 0], to_query[0, 0], found.statistics.peak[0, 0, :, None]):
        assert bool(part[3].isnan().all())
        assert not bool(part[[*range(3), *range(4, 20)]].isnan().any())
    assert bool(to_value[0, 0].isnan().all())
    assert mass_count(query, key)[0, 0, 3] == 0


def test_log_weights_of_another_device_are_refused():
    query, key, value = inputs(5)
    with pytest.raises(UserError, match="log_weight must"):
        attend(query, key, value, torch.zeros(5, device="meta"))
