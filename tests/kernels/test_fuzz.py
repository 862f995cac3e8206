"""Random shapes, strides, masks, precisions and options, for every kernel, against the dense float64 reference."""

from __future__ import annotations

import math

import torch
from agreement import BUILDS, backward_excess, built, count_excess, forward_excess, randn, serving, threads
from dense import dense
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from massieu import attend, mass_count

KERNELS = ["torch", *(name for name in BUILDS if built(name) is not None)]
SIZES = st.sampled_from([*range(1, 20), 31, 33, 47, 49, 64, 65])
DIMS = st.sampled_from([1, 2, 3, 5, 7, 8, 15, 16, 17, 24, 31, 32, 33, 40, 64, 80, 128, 160, 256, 257])
ATOMS = st.sampled_from([*range(1, 20), 40, 64, 100, 127, 128, 129, 130, 200, 255, 256, 257, 300])
DTYPES = st.sampled_from([torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64])
DERANDOMIZED = settings(
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


class Case:
    """One call of one kernel; it prints what decides whether it fails, not its numbers."""

    def __init__(
        self, kernel: str, threads: int, tensors: list[Tensor], log_weight: Tensor | None, options: dict
    ) -> None:
        self.kernel, self.threads = kernel, threads
        self.tensors, self.log_weight, self.options = tensors, log_weight, options

    def __repr__(self) -> str:
        tensors = {"query": self.tensors[0], "key": self.tensors[1], "value": self.tensors[2], "bias": self.log_weight}
        shapes = {k: (*x.shape, "by", *x.stride(), x.dtype) for k, x in tensors.items() if x is not None}
        return f"Case({self.kernel} on {self.threads}, {shapes}, {self.options})"

    def serve(self, function, *more, **named):
        with serving(self.kernel), threads(self.threads):
            return function(*more, **named)


def laid_out(draw, tensor: Tensor) -> Tensor:
    """The same numbers elsewhere in memory: axes in another order, rows apart, a start that is not aligned."""
    order = draw(st.permutations(range(tensor.dim())))
    steps = [draw(st.sampled_from([1, 1, 1, 2, 3])) for _ in order]
    offset = draw(st.integers(0, 5))
    sizes = [step * (size + 1) for size, step in zip(tensor.shape, steps, strict=True)]
    # Whoever reads a gap gets nan.
    memory = torch.full((offset + math.prod(sizes),), torch.nan, dtype=tensor.dtype)
    whole = memory[offset:].view([sizes[i] for i in order]).permute([order.index(i) for i in range(len(order))])
    for axis, (size, step) in enumerate(zip(tensor.shape, steps, strict=True)):
        whole = whole.narrow(axis, step - 1, step * size)[(slice(None),) * axis + (slice(None, None, step),)]
    whole.copy_(tensor)
    return whole


@st.composite
def cases(draw, *, largest_scores: tuple[float, ...] = (1.0, 1.0, 1.0, 5.0, 1e3, 1e4)) -> Case:
    seed, dtype = draw(st.integers(0, 999)), draw(DTYPES)
    batch, key_heads, share = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads, queries, atoms, dim, value_dim = key_heads * share, draw(SIZES), draw(ATOMS), draw(DIMS), draw(DIMS)
    factor = draw(st.sampled_from(largest_scores))
    shapes = [(batch, heads, queries, dim), (batch, key_heads, atoms, dim), (batch, key_heads, atoms, value_dim)]
    tensors = [randn(*shape, seed=seed + i) for i, shape in enumerate(shapes)]
    tensors[0] *= factor
    if draw(st.booleans()):  # repeated keys
        tensors[1] = tensors[1][:, :, :1].expand_as(tensors[1])
    tensors = [laid_out(draw, x.to(dtype)) for x in tensors]

    log_weight = None
    if draw(st.booleans()):
        full = (batch, heads, queries, atoms)
        shape = [1 if draw(st.booleans()) else size for size in full][draw(st.integers(0, 3)) :]
        log_weight = 2 * randn(*shape, seed=seed + 7)
        if draw(st.booleans()):
            log_weight[log_weight < -1] = -torch.inf
        log_weight = laid_out(draw, log_weight)
    options: dict = {"causal": draw(st.booleans())}
    if draw(st.booleans()):
        options["window"] = draw(st.integers(1, atoms + 3))
    if draw(st.booleans()):
        shape = draw(st.sampled_from([(batch,), (batch, heads), (1, heads)]))
        options["lengths"] = torch.randint(0, atoms + 1, shape, generator=torch.Generator().manual_seed(seed))
    if draw(st.booleans()):
        options["sink"] = 2 * randn(heads, seed=seed + 8)
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.1, -0.3, 0.0]))
    return Case(draw(st.sampled_from(KERNELS)), draw(st.integers(1, 2)), tensors, log_weight, options)


@settings(DERANDOMIZED, max_examples=300)
@given(case=cases())
def test_output_and_statistics_agree_with_the_dense_reference(case):
    found = case.serve(attend, *case.tensors, case.log_weight, **case.options)
    worst = forward_excess(found, dense(*case.tensors, case.log_weight, **case.options))
    assert max(worst.values()) <= 1.0, worst


# Beyond scores of a hundred the gradient is a difference of numbers that large, and so is its rounding.
@settings(DERANDOMIZED, max_examples=200)
@given(case=cases(largest_scores=(1.0, 1.0, 5.0)))
def test_gradients_agree_with_autograd_through_the_dense_reference(case):
    if "sink" in case.options:
        case.options["sink"] = case.options["sink"].to(case.tensors[0].dtype)
    # With one atom the values cancel, and what remains is the rounding of their products with what comes in.
    worst = case.serve(backward_excess, case.tensors, case.log_weight, slack=10.0, **case.options)
    assert max(worst) <= 1.0, worst


@settings(DERANDOMIZED, max_examples=200)
@given(case=cases(), mass=st.sampled_from([0.01, 0.5, 0.9, 0.999, 1.0]))
def test_mass_counts_agree_with_sorting(case, mass):
    query, key, value = case.tensors
    expected = dense(query, key, value, case.log_weight, **case.options)
    found = case.serve(mass_count, query, key, case.log_weight, mass=mass, **case.options)
    eps = 2**-52 if query.dtype == torch.float64 else 2**-23
    assert count_excess(found, expected, mass, 32 * eps * (1 + expected.largest_score)) <= 1.0
