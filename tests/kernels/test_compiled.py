"""Every build of the compiled kernel that this machine runs, against the dense float64 reference."""

from __future__ import annotations

import pytest
import torch
from agreement import (
    BUILDS,
    DIFFERENTIABLE,
    NOT_BUILT,
    assert_backward_agrees,
    assert_forward_agrees,
    built,
    count_excess,
    excess,
    forward_excess,
    gradients,
    randn,
    serving,
    threads,
)
from dense import dense
from torch import Tensor
from torch.testing import assert_close

from massieu import Attended, RowStatistics, attend, kernels, mass_count, row_statistics
from massieu.kernels import dispatch
from massieu.kernels.compiled import LIBRARY, Library

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason=NOT_BUILT)


@pytest.fixture(params=BUILDS, autouse=True)
def build(request):
    """Each build in its turn serves every call of a test; what served before serves again afterwards."""
    if built(request.param) is None:
        pytest.skip(f"this processor does not run the {request.param} build")
    with serving(request.param):
        yield request.param


def inputs(
    queries: int = 40, atoms: int = 150, *, batch: int = 2, heads: int = 4, key_heads: int = 2, dim: int = 24, **more
) -> list[Tensor]:
    value_dim = more.get("value_dim", dim)
    shapes = [(batch, heads, queries, dim), (batch, key_heads, atoms, dim), (batch, key_heads, atoms, value_dim)]
    return [randn(*shape, seed=i, dtype=more.get("dtype", torch.float32)) for i, shape in enumerate(shapes)]


def same(first: Attended, second: Attended) -> bool:
    """True if all numbers agree to the last bit; nan equals nan."""
    pairs = zip((first.output, *first.statistics), (second.output, *second.statistics), strict=True)
    return all(torch.equal(a.nan_to_num(-7.0), b.nan_to_num(-7.0)) for a, b in pairs)


def test_the_selected_build_serves(build):
    assert kernels.backend() == f"compiled {build}"


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "windowed": {"window": 37},
    "causal window": {"causal": True, "window": 60},
    "narrow window": {"causal": True, "window": 1},
    "ragged": {"lengths": torch.tensor([3, 150])},
    "ragged causal": {"lengths": torch.tensor([149, 131]), "causal": True},
    "ragged heads": {"lengths": torch.tensor([[150, 1, 20, 129], [0, 130, 128, 127]]), "causal": True},
    "ragged window": {"lengths": torch.tensor([0, 100]), "window": 20},
    "sink": {"sink": torch.tensor([0.5, -2.0, 3.0, -torch.inf])},
    "sink, all": {"sink": randn(2, 4), "causal": True, "window": 50, "lengths": torch.tensor([0, 140])},
}


@pytest.fixture(params=OPTIONS.values(), ids=list(OPTIONS))
def options(request):
    return request.param


def test_output_and_statistics_agree_with_the_dense_reference(options):
    assert_forward_agrees(*inputs(), **options)
    assert_forward_agrees(*inputs(150), **options)


@pytest.mark.parametrize("key_heads", [1, 4])
def test_heads_that_share_keys_agree_with_the_dense_reference(key_heads, options):
    assert_forward_agrees(*inputs(3, key_heads=key_heads), **options)
    assert_forward_agrees(*inputs(97, key_heads=key_heads), **options)


@pytest.mark.parametrize("dim", [1, 7, 8, 24, 33, 64, 80, 128, 256, 300])
def test_any_dim_goes_with_any_dim_of_values(dim):
    for value_dim in (1, 8, 17, 80):
        assert_forward_agrees(*inputs(21, 140, dim=dim, value_dim=value_dim), causal=True)
    assert_forward_agrees(*inputs(1, 9, dim=dim, value_dim=dim))


@pytest.mark.parametrize("queries", [1, 2, 3, 15, 16, 17, 47, 49, 191, 193])
def test_any_number_of_queries_goes_with_any_number_of_atoms(queries):
    for atoms in (1, 2, 127, 128, 129, 255, 257, 1000):
        tensors = inputs(queries, atoms, batch=1, heads=2, dim=8)
        assert_forward_agrees(*tensors)
        assert_forward_agrees(*tensors, causal=True, window=130)


def test_one_query_with_a_cache_agrees_with_the_dense_reference():
    assert_forward_agrees(*inputs(1, 1), causal=True)
    assert_forward_agrees(*inputs(1, 700, key_heads=1), causal=True, window=300)


def peaked(size: float) -> list[Tensor]:
    _, key, value = inputs(150, key_heads=4)
    return [size * key, key, value]


HARD = {
    "peaked": peaked(20.0),
    "one hot": peaked(60.0),
    "repeated keys": [x[:, :, :1].expand_as(x) if i == 1 else x for i, x in enumerate(inputs(150))],
    "no scores": [0 * x if i == 0 else x for i, x in enumerate(inputs(150))],
    "tiny": [1e-20 * x for x in inputs(150)],
}


@pytest.mark.parametrize("tensors", HARD.values(), ids=list(HARD))
def test_hard_rows_agree_with_the_dense_reference(tensors, options):
    found = assert_forward_agrees(*tensors, **options).statistics
    assert not bool((found.entropy < 0).any())
    assert not bool((found.peak > 1).any())


@pytest.mark.parametrize("size", [9e2, 1e4, 1e6])
def test_huge_scores_agree_with_the_dense_reference(size, options):
    query, key, value = inputs(150)
    scores = query @ key.repeat_interleave(2, 1).mT * 24**-0.5
    assert_forward_agrees(query * (size / float(scores.abs().max())), key, value, **options)


def test_a_common_offset_of_ten_thousand_leaves_the_variance_alone(options):
    query, key, value = inputs(150)
    query[..., 0], key[..., 0] = 24**0.5, 1e4
    assert_forward_agrees(query, key, value, **options)


WEIGHTS = [
    (150,),
    (40, 150),
    (40, 1),
    (1, 1, 150),
    (4, 1, 1),
    (4, 40, 150),
    (2, 1, 1, 150),
    (2, 1, 40, 1),
    (2, 4, 40, 150),
]


@pytest.mark.parametrize("shape", WEIGHTS, ids=str)
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_log_weights_of_any_shape_agree_with_the_dense_reference(shape, key_heads):
    log_weight = 3 * randn(*shape, seed=5)
    tensors = inputs(key_heads=key_heads)
    assert_forward_agrees(*tensors, log_weight)
    log_weight[log_weight < -2.5] = -torch.inf
    assert_forward_agrees(*tensors, log_weight, lengths=torch.tensor([0, 140]), causal=True, sink=randn(4, seed=6))


def test_log_weights_of_any_layout_agree_with_the_dense_reference():
    log_weight = 3 * randn(150, 40, 4, 2, seed=5).permute(3, 2, 1, 0)
    assert_forward_agrees(*inputs(), log_weight)
    assert_forward_agrees(*inputs(), (3 * randn(2, 4, 80, 450))[:, :, ::2, ::3])
    assert_forward_agrees(*inputs(), (3 * randn(2, 1, 1, 150)).expand(2, 4, 40, 150))
    assert_forward_agrees(*inputs(), (3 * randn(40, 150)).double())
    assert_forward_agrees(*inputs(), (3 * randn(40, 150)).half())


def test_huge_log_weights_and_sinks_agree_with_the_dense_reference():
    assert_forward_agrees(*inputs(), 1e4 * randn(40, 150, seed=5))
    assert_forward_agrees(*inputs(), sink=torch.tensor([1e4, -1e4, 30.0, 0.0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_agree_with_the_dense_reference(dtype, options):
    for dim in (1, 24, 33, 64):
        attended = assert_forward_agrees(*inputs(dim=dim, dtype=dtype), **options)
        assert attended.output.dtype == dtype
        assert attended.statistics.entropy.dtype == torch.promote_types(dtype, torch.float32)


def test_a_half_precision_output_is_rounded_to_nearest():
    query, key, value = inputs(dtype=torch.bfloat16)
    exact = attend(query.float(), key.float(), value.float()).output
    found = attend(query, key, value).output
    # The two sums may differ in their last bit, and then fall on two sides of a tie: hardly ever.
    assert float((found == exact.bfloat16()).float().mean()) > 0.999


def test_row_statistics_need_no_values(options):
    query, key, value = inputs()
    expected = attend(query, key, value, scale=0.3, **options).statistics
    found = row_statistics(query, key, scale=0.3, **options)
    for name, mine, other in zip(RowStatistics._fields, found, expected, strict=True):
        assert torch.equal(mine.nan_to_num(-7.0), other.nan_to_num(-7.0)), name


# Threads and batch mates


def pass_through(tensors: list[Tensor], **options) -> tuple[Attended, list[Tensor]]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    attended = attend(*leaves, **options)
    return attended, gradients(attended, leaves)


@pytest.mark.parametrize("batch", [1, 3, 11])
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_one_and_two_threads_give_the_same_bits(batch, size):
    query, key, value = inputs(130, 300, batch=batch, key_heads=1)
    options = {"causal": True, "sink": randn(4), "log_weight": randn(4, 1, 300)}
    found = []
    for number in (1, 2):
        with threads(number):
            found.append((*pass_through([size * query, key, value], **options), mass_count(query, key)))
    (one, one_grads, one_count), (two, two_grads, two_count) = found
    assert same(one, two)
    assert all(torch.equal(a, b) for a, b in zip(one_grads, two_grads, strict=True))
    assert torch.equal(one_count, two_count)


def test_threads_of_torch_are_those_of_the_kernel(monkeypatch, build):
    calls = []
    forward = Library._call
    monkeypatch.setattr(Library, "_call", lambda *a: calls.append(a[2].rows.threads) or forward(*a))
    for number in (1, 2):
        with threads(number):
            attend(*inputs())
    assert calls == [1, 2]


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 30}], ids=str)
def test_what_the_batch_mates_hold_changes_no_bit(options):
    tensors = inputs(70, 150, batch=3)
    attended, grads = pass_through(tensors, **options)
    # Huge scores make a mate's entry double precision; nan and infinity must stay with it too.
    for factor in (0.0, 1e5, torch.inf, torch.nan):
        others = [torch.cat([x[:1] * factor, x[1:2], -x[2:] * factor]) for x in tensors]
        changed, changed_grads = pass_through(others, **options)
        assert torch.equal(attended.output[1], changed.output[1])
        for mine, other in zip(attended.statistics, changed.statistics, strict=True):
            assert torch.equal(mine[1], other[1])
        for mine, other in zip(grads, changed_grads, strict=True):
            assert torch.equal(mine[1], other[1])


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_an_entry_alone_gives_the_same_bits_as_in_a_batch(key_heads):
    tensors = inputs(70, 150, batch=6, key_heads=key_heads)
    tensors[0][2] *= 1e4
    whole = attend(*tensors, causal=True)
    for i in range(6):
        alone = attend(*(x[i : i + 1] for x in tensors), causal=True)
        assert torch.equal(alone.output[0], whole.output[i])
        for mine, other in zip(alone.statistics, whole.statistics, strict=True):
            assert torch.equal(mine[0], other[i])


def test_the_gradient_of_an_entry_alone_is_that_in_a_batch_up_to_the_order_of_its_sums():
    tensors = [x.requires_grad_() for x in inputs(200, 150, batch=5, key_heads=1)]
    whole = torch.autograd.grad(attend(*tensors).output.square().sum(), tensors)
    for i in range(5):
        alone = [x[i : i + 1].detach().requires_grad_() for x in tensors]
        for mine, other in zip(torch.autograd.grad(attend(*alone).output.square().sum(), alone), whole, strict=True):
            assert excess(mine[0], other[i].double(), 0.0, 1e-6 * float(other[i].abs().max())) <= 1.0


# Gradients


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_gradients_agree_with_autograd_through_the_dense_reference(key_heads, options):
    assert_backward_agrees(inputs(key_heads=key_heads), **options)
    assert_backward_agrees(inputs(150, key_heads=key_heads, value_dim=17), **options)


@pytest.mark.parametrize("names", [(name,) for name in DIFFERENTIABLE] + [DIFFERENTIABLE[1:]], ids="+".join)
def test_gradients_of_a_part_agree_with_autograd_through_the_dense_reference(names):
    assert_backward_agrees(inputs(150), names=names, causal=True)


@pytest.mark.parametrize("dim", [1, 7, 8, 33, 64, 80, 128, 256, 300])
def test_gradients_of_any_dim_agree_with_autograd_through_the_dense_reference(dim):
    assert_backward_agrees(inputs(21, 140, dim=dim, value_dim=17), causal=True)
    assert_backward_agrees(inputs(1, 9, dim=dim))
    assert_backward_agrees(inputs(2, 130, batch=9, dim=dim))


@pytest.mark.parametrize("shape", WEIGHTS, ids=str)
@pytest.mark.parametrize("key_heads", [1, 4])
def test_gradients_with_log_weights_agree_with_autograd_through_the_dense_reference(shape, key_heads):
    log_weight = 2 * randn(*shape, seed=5)
    log_weight[log_weight < -2] = -torch.inf
    assert_backward_agrees(inputs(key_heads=key_heads), log_weight, causal=True, sink=randn(4, seed=6))


@pytest.mark.parametrize("shape", WEIGHTS, ids=str)
@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_log_weights_agree_with_autograd_through_the_dense_reference(shape, key_heads, dtype, monkeypatch):
    monkeypatch.setattr(dispatch, "FEWEST_SETS", 0)  # the compiled kernel, however few sets of log weights there are
    log_weight = 2 * randn(*shape, seed=5, dtype=dtype)
    log_weight[log_weight < -2] = -torch.inf
    leaves = [x.requires_grad_() for x in (*inputs(key_heads=key_heads, dtype=dtype), log_weight)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    options = {"causal": True, "lengths": torch.tensor([0, 140]), "sink": randn(4, seed=6)}
    expected = gradients(dense(*exact, **options), exact)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    for number in (1, 2):
        with threads(number):
            found = gradients(attend(*leaves, **options), leaves)
        for mine, other in zip(found, expected, strict=True):
            assert excess(mine, other, 10 * tolerance, tolerance * float(other.abs().max())) <= 1.0


@pytest.mark.parametrize("shape", [(3, 1, 1, 300), (3, 4, 1, 300), (1, 4, 130, 1), (3, 1, 130, 300)], ids=str)
def test_gradients_of_log_weights_have_the_same_bits_on_one_and_two_threads(shape, monkeypatch):
    monkeypatch.setattr(dispatch, "FEWEST_SETS", 0)
    leaves = [x.requires_grad_() for x in (*inputs(130, 300, batch=3, key_heads=2), randn(*shape, seed=5))]
    found = []
    for number in (1, 2):
        with threads(number):
            found.append(gradients(attend(*leaves, causal=True), leaves))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_gradients_in_other_precisions_agree_with_autograd_through_the_dense_reference(dtype, options):
    options = {**options, "sink": options["sink"].to(dtype)} if "sink" in options else options
    assert_backward_agrees(inputs(dtype=dtype), **options)
    assert_backward_agrees(inputs(150, dtype=dtype, dim=33, value_dim=5), **options)


def test_gradients_of_huge_scores_agree_with_autograd_through_the_dense_reference():
    query, key, value = inputs(150)
    assert_backward_agrees([2500 * query, key, value], causal=True, names=("output", "log_normalizer", "score_mean"))


def test_gradients_in_double_precision_pass_gradcheck(options):
    tensors = [randn(2, h, 5, 3, seed=i, dtype=torch.float64).requires_grad_() for i, h in enumerate((4, 2, 2))]
    options = {**options, "lengths": torch.tensor([0, 4])} if "lengths" in options else options

    def function(*leaves):
        attended = attend(*leaves, **options)
        found = (attended.output, *attended.statistics[:4], attended.statistics.collision)
        return tuple(x.nan_to_num(0.0) for x in found)

    assert torch.autograd.gradcheck(function, tensors, fast_mode=True)


# Mass counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_mass_counts_agree_with_sorting(dtype, options):
    slack = 1e-13 if dtype == torch.float64 else 1e-5
    for queries, size in ((1, 1.0), (3, 3.0), (40, 1.0), (40, 0.0), (40, 1e4)):
        query, key, value = inputs(queries, dtype=dtype)
        expected = dense(size * query, key, value, **options)
        for mass in (0.1, 0.9, 1.0):
            found = mass_count(size * query, key, mass=mass, **options)
            assert count_excess(found, expected, mass, slack) <= 1.0


@pytest.mark.parametrize("shape", WEIGHTS, ids=str)
def test_mass_counts_with_log_weights_agree_with_sorting(shape):
    log_weight = 3 * randn(*shape, seed=5)
    log_weight[log_weight < -2.5] = -torch.inf
    query, key, value = inputs()
    assert count_excess(mass_count(query, key, log_weight), dense(query, key, value, log_weight), 0.9, 1e-5) <= 1.0


@pytest.mark.parametrize("atoms", [1, 2, 10, 30, 100, 128, 1000, 10000])
def test_equal_weights_count_as_many_atoms_as_the_mass_says(atoms):
    for percent in (7, 10, 25, 50, 55, 90, 100):  # 0.07 * 100 is a little more than 7
        found = mass_count(torch.zeros(1, 3, 4), randn(1, atoms, 4), mass=percent / 100)
        assert bool((found == -(-percent * atoms // 100)).all())


# Retrieval


def retrieve(query: Tensor, key: Tensor, value: Tensor | None, log_weight: Tensor | None = None, **options) -> Attended:
    rest = {"scale": query.shape[-1] ** -0.5, "causal": False, "window": None, "lengths": None, "sink": None} | options
    rows = kernels.arrange(query, key, value, log_weight, **rest)
    found = kernels.retrieve(rows.inputs, 2)
    output = None if found.output is None else rows.restore(found.output, tail=2)
    return Attended(output, RowStatistics(*(rows.restore(x, tail=1) for x in found.statistics)))


@pytest.mark.parametrize("queries", [1, 2, 3, 17, 128])
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("case", ["plain", "sink", "ragged", "log weights", "everything"])
def test_retrieval_agrees_with_the_dense_reference(queries, number, case):
    query, key, value = inputs(queries, 1237, batch=2, heads=2, key_heads=1, dim=20, value_dim=9)
    options = {} if case in ("plain", "log weights") else {"sink": torch.tensor([1.0, 4.0])}
    if case in ("ragged", "everything"):
        options["lengths"] = torch.tensor([1, 1200])
    log_weight = 3 * randn(2, 1, 1237, seed=5) if case in ("log weights", "everything") else None
    if case == "everything":
        log_weight[0, 0, :600] = -torch.inf
        options["window"] = 900
    with threads(number):
        found = retrieve(query, key, value, log_weight, **options)
    worst = forward_excess(found, dense(query, key, value, log_weight, **options))
    assert max(worst.values()) <= 1.0, worst


@pytest.mark.parametrize("queries", [1, 2, 3, 17, 128])
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_retrieval_on_two_threads_is_that_on_one_up_to_the_order_of_its_sums(queries, size):
    query, key, value = inputs(queries, 5003, batch=1, heads=1, key_heads=1)
    found = []
    for number in (1, 2):
        with threads(number):
            found.append(retrieve(size * query, key, value, sink=2.0))
    (one, one_found), (two, two_found) = found
    assert excess(one, two.double(), 1e-6, 1e-6) <= 1.0
    for name, mine, other in zip(RowStatistics._fields, one_found, two_found, strict=True):
        assert excess(mine, other.double(), 1e-6, 1e-6) <= 1.0, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_retrieval_in_other_precisions_agrees_with_the_dense_reference(dtype):
    query, key, value = inputs(5, 1237, batch=1, heads=1, key_heads=1, dtype=dtype)
    with threads(2):
        found = retrieve(query, key, value)
    worst = forward_excess(Attended(found.output.to(dtype), found.statistics), dense(query, key, value))
    assert max(worst.values()) <= 1.0, worst


def best(query: Tensor, key: Tensor, log_weight: Tensor | None = None, *, top: int, **options) -> kernels.Best:
    rest = {"scale": 0.3, "causal": False, "window": None, "lengths": None, "sink": None} | options
    rows = kernels.arrange(query, key, None, log_weight, **rest)
    return kernels.Best(*(rows.restore(x, tail=2) for x in kernels.retrieve(rows.inputs, 2, top).best))


@pytest.mark.parametrize("queries", [1, 3, 17, 128])
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_the_best_atoms_are_those_of_a_sorted_row(queries, number, size):
    query, key, _ = inputs(queries, 1237, batch=2, heads=2, key_heads=1, dim=20)
    key[:, :, 700:] = key[:, :, :537].clone()  # ties, in other tiles and on other threads
    log_weight = torch.zeros(1237).masked_fill(torch.arange(1237) % 7 == 0, -torch.inf)
    with threads(number):
        found = best(query, key, log_weight, top=9, scale=size / 16, lengths=torch.tensor([1237, 5]), sink=50.0)
    scores = (query.double() @ key[:, :, :700].double().mT) * (size / 16)
    scores = torch.cat([scores, scores[..., :537]], -1) + log_weight  # ties to the last bit here too
    scores[1, :, :, 5:] = -torch.inf
    expected, order = scores.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(found.atom, order[..., :9].masked_fill(expected[..., :9] == -torch.inf, -1))
    assert_close(found.score, expected[..., :9], rtol=1e-6, atol=1e-6)
    assert bool((found.atom[1, ..., 4:] == -1).all())  # four of five atoms are present there


def test_more_best_atoms_than_one_tile_holds():
    query, key, _ = inputs(5, 1237, batch=1, heads=1, key_heads=1, dtype=torch.float64)
    with threads(2):
        found = best(query, key, top=1000)
    expected, order = (0.3 * query @ key.mT).sort(dim=-1, descending=True, stable=True)
    assert torch.equal(found.atom, order[..., :1000])
    assert_close(found.score, expected[..., :1000], rtol=0, atol=1e-13)


def test_retrieval_of_rows_without_atoms_and_without_values():
    query, key, value = inputs(3, 700, batch=2, heads=1, key_heads=1)
    with threads(2):
        found = retrieve(query, key, value, lengths=torch.tensor([0, 700]))
        alone = retrieve(query, key, None, lengths=torch.tensor([0, 700]))
    assert bool((found.output[0] == 0).all())
    assert bool(found.statistics.entropy[0].isnan().all())
    assert alone.output is None
    for mine, other in zip(alone.statistics, found.statistics, strict=True):
        assert torch.equal(mine.nan_to_num(-7.0), other.nan_to_num(-7.0))


# Memory: where the numbers lie


@pytest.fixture
def copies(monkeypatch):
    """Addresses of query, key and value as the library sees them."""
    seen = []
    original = Library._call

    def call(self, name, structure):
        seen.append((structure.rows.query, structure.rows.key, structure.rows.value))
        return original(self, name, structure)

    monkeypatch.setattr(Library, "_call", call)
    return seen


LAYOUTS = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "heads last": lambda x: x.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3),
    "cut from wider rows": lambda x: torch.cat([x, x, x], -1)[..., x.shape[-1] : 2 * x.shape[-1]],
    "every third row": lambda x: x.repeat_interleave(3, 2)[:, :, 1::3],
    "every second entry": lambda x: x.repeat_interleave(2, 0).repeat_interleave(2, 1)[1::2, ::2],
    "unaligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dim", [24, 32])
def test_strided_inputs_are_read_in_place_and_give_the_same_bits(layout, dtype, dim, copies):
    tensors = inputs(dtype=dtype, dim=dim)
    expected, grads = pass_through(tensors, causal=True)
    others = [layout(x) for x in tensors]
    copies.clear()
    found, found_grads = pass_through(others, causal=True)
    assert copies == [tuple(x.data_ptr() for x in others)] * 2
    assert same(found, expected)
    assert all(torch.equal(a, b) for a, b in zip(found_grads, grads, strict=True))


@pytest.mark.parametrize("layout", ["transposed", "heads last"])
def test_outputs_and_gradients_lie_in_memory_as_their_tensors_do(layout):
    tensors = [LAYOUTS[layout](x).requires_grad_() for x in inputs(key_heads=4)]
    output = attend(*tensors).output
    assert output.stride() == tensors[0].stride() != output.contiguous().stride()
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    grads = torch.autograd.grad(output, tensors, weights)
    assert [x.stride() for x in grads] == [x.stride() for x in tensors]


def test_a_strided_last_axis_gives_the_same_bits():
    tensors = inputs()
    expected, grads = pass_through(tensors, causal=True)
    spread = [x.repeat_interleave(2, -1)[..., ::2] for x in tensors]
    turned = [x.mT.contiguous().mT for x in tensors]
    for others in (spread, turned):
        assert others[0].stride(-1) > 1
        found, found_grads = pass_through(others, causal=True)
        assert same(found, expected)
        assert all(torch.equal(a, b) for a, b in zip(found_grads, grads, strict=True))
    one = [x[..., :1] for x in tensors]  # the stride of a single column means nothing
    assert same(attend(*one), attend(*(x.contiguous() for x in one)))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_expanded_inputs_agree_with_the_dense_reference(axis):
    for chosen in range(3):
        leaves = inputs(key_heads=4)
        shape = leaves[chosen].shape
        leaves[chosen] = leaves[chosen].narrow(axis, 0, 1).clone()
        exact = [x.double().requires_grad_() for x in leaves]
        expected = dense(*(x.expand(shape) if i == chosen else x for i, x in enumerate(exact)), causal=True)
        tensors = [
            x.requires_grad_().expand(shape) if i == chosen else x.requires_grad_() for i, x in enumerate(leaves)
        ]
        assert tensors[chosen].stride(axis) == 0
        found = attend(*tensors, causal=True)
        assert max(forward_excess(found, expected).values()) <= 1.0
        for mine, other in zip(gradients(found, leaves), gradients(expected, exact), strict=True):
            assert excess(mine, other, 1e-4, 1e-5 * float(other.abs().max())) <= 1.0


def test_one_tensor_for_query_key_and_value_agrees_with_the_dense_reference():
    states = randn(2, 3, 50, 16)
    assert_forward_agrees(states, states, states, causal=True)


def test_a_negated_view_is_read_with_its_sign():
    tensors = inputs(key_heads=4)
    log_weight, sink = randn(40, 150, seed=5), randn(4, seed=6)
    negated = [torch._neg_view(-x) for x in (*tensors, log_weight, sink)]
    assert negated[0].is_neg()
    found = attend(*negated[:4], sink=negated[4])
    assert same(found, attend(*tensors, log_weight, sink=sink))
    leaves = [x.requires_grad_() for x in tensors]
    output, coming = attend(*leaves).output, randn(2, 4, 40, 24)
    expected = torch.autograd.grad(output, leaves, coming, retain_graph=True)
    for mine, other in zip(torch.autograd.grad(output, leaves, torch._neg_view(-coming)), expected, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("shape", [(0, 4, 5, 8), (2, 0, 5, 8), (2, 4, 0, 8)], ids=str)
def test_inputs_without_entries_heads_or_queries_give_empty_results(shape):
    query, key = torch.zeros(shape), torch.zeros(*shape[:2], 6, 8)
    attended = attend(query.requires_grad_(), key, key)
    assert attended.output.shape == shape
    assert attended.statistics.entropy.shape == shape[:3]
    assert mass_count(query, key).shape == shape[:3]
    attended.output.sum().backward()
    assert query.grad.shape == shape


def test_inputs_without_atoms_or_without_columns_are_no_error():
    query, key, value = inputs()
    none = attend(query, key[:, :, :0], value[:, :, :0])
    assert bool((none.output == 0).all())
    assert bool(none.statistics.log_normalizer.isnan().all())
    assert bool((mass_count(query, key[:, :, :0]) == 0).all())
    assert attend(query, key, value[..., :0]).output.shape == (2, 4, 40, 0)
    flat = attend(query[..., :0], key[..., :0], value).statistics
    assert excess(flat.entropy, torch.full((2, 4, 40), 150.0, dtype=torch.float64).log(), 1e-6, 0.0) <= 1.0
    sunk = attend(query, key[:, :, :0], value[:, :, :0], sink=2.0)
    assert bool((sunk.output == 0).all())
    assert bool((sunk.statistics.log_normalizer == 2.0).all())


def test_strides_beyond_two_to_the_31_are_followed():
    gap, queries, atoms, dim = 2**31 + 24, 2, 2, 9
    try:
        memory = torch.empty(gap + 4096, dtype=torch.bfloat16)  # four gigabytes, never written
    except RuntimeError:
        pytest.skip("the system does not promise four gigabytes of memory")
    query = memory[:dim].as_strided((1, queries, dim), (1, gap, 1))
    key = memory.as_strided((1, atoms, dim), (1, gap, 1), 32)
    value = memory.as_strided((1, atoms, dim), (1, gap, 1), 64)
    heads = memory.as_strided((2, 3, dim), (gap, 32, 1), 128)
    for i, tensor in enumerate((query, key, value, heads)):
        tensor.copy_(randn(*tensor.shape, seed=i))
    for tensors in ((query, key, value), (heads, heads, heads)):
        found, grads = pass_through(list(tensors))
        expected, expected_grads = pass_through([x.clone() for x in tensors])
        assert same(found, expected)
        assert all(torch.equal(a, b) for a, b in zip(grads, expected_grads, strict=True))
        assert torch.equal(mass_count(tensors[0], tensors[1]), mass_count(tensors[0].clone(), tensors[1].clone()))


# What is not a number


@pytest.mark.parametrize("place", [(0, 0, 0), (1, 60, 0), (1, 149, 23)], ids=str)
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_key_that_is_not_finite_spoils_the_rows_that_see_it_and_no_others(place, number):
    head, atom, column = place
    query, key, value = inputs(150, heads=2)
    clean = attend(query, key, value, causal=True)
    key[0, head, atom, column] = number
    query[..., column].abs_()
    found = attend(query, key, value, causal=True)
    assert bool(found.output[0, head, atom:].isnan().all())
    for name, field in found.statistics._asdict().items():
        assert bool(field[0, head, atom:].isnan().all()), name
        assert bool(field[0, head, :atom].isfinite().all()), name
    assert torch.equal(found.output[1], attend(query[1:], key[1:], value[1:], causal=True).output[0])
    assert clean.output.isfinite().all()


def test_a_query_that_is_not_finite_spoils_its_own_row_only():
    query, key, value = inputs()
    query[0, 1, 7, 3] = torch.nan
    found = attend(query, key, value)
    spoilt = torch.zeros(2, 4, 40, dtype=torch.bool)
    spoilt[0, 1, 7] = True
    assert torch.equal(found.output.isnan().all(-1), spoilt)
    for name, field in found.statistics._asdict().items():
        assert torch.equal(field.isnan(), spoilt), name


def test_keys_that_are_hidden_may_hold_anything():
    query, key, value = inputs()
    expected = attend(query, key[:, :, :100], value[:, :, :100])
    key[:, :, 100:] = torch.nan
    lengths = torch.tensor([100, 100])
    found = attend(query, key, value, lengths=lengths)
    for mine, other in zip(found.statistics, expected.statistics, strict=True):
        assert excess(mine, other.double(), 1e-5, 1e-6) <= 1.0


def test_windows_as_wide_as_numbers_go_hide_nothing():
    tensors = inputs()
    for window in (2**31, 2**62, 2**63 - 1, 2**64):
        assert same(attend(*tensors, window=window), attend(*tensors))
        assert same(attend(*tensors, window=window, causal=True), attend(*tensors, causal=True))


def test_a_call_that_the_library_refuses_is_an_error():
    rows = kernels.arrange(*inputs(), None, sink=None, scale=1.0, causal=False, window=None, lengths=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 0)
        with pytest.raises(RuntimeError, match="the compiled kernel refused a call with status 2"):
            kernels.forward(rows.inputs, 2)


def test_a_call_for_which_there_is_no_memory_is_an_error():
    rows = kernels.arrange(*inputs(), None, sink=None, scale=1.0, causal=False, window=None, lengths=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 2**40)
        with pytest.raises(MemoryError, match="not enough memory for the tiles of one call"):
            kernels.forward(rows.inputs, 2)
