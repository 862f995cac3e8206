"""Random attention calls, every kernel, against the dense float64 reference of the tests.

Shapes, strides, precisions, masks, options, scores of 10,000, numbers that are not finite behind a mask, tensors of
zeros without memory, empty tensors; output, statistics, gradients, functional gradients, mass counts and capped scores.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from massieu import Attended, attend, mass_count
from massieu.taps import AttentionCall
from massieu.taps.call_statistics import call_statistics

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from agreement import BUILDS, backward_excess, built, count_excess, excess, forward_excess, serving
from dense import Dense, dense

__all__ = ["COUNT", "attack"]

COUNT = 20_000
SIZES = (*range(1, 9), 12, 17, 31, 33, 64)
ATOMS = (*range(1, 9), 15, 17, 33, 64, 127, 128, 129, 257)
DIMS = (1, 2, 3, 5, 8, 16, 17, 24, 33, 64, 80)
DTYPES = (*(torch.float32,) * 5, torch.float64, torch.bfloat16, torch.float16)
CHECKS = ("forward",) * 9 + ("gradients",) * 5 + ("counts",) * 2 + ("functional", "capped", "hidden", "hidden")
ODD = ("zeros", "empty")


class Case(NamedTuple):
    """One attention call, its kernel and the check."""

    check: str
    kernel: str
    tensors: list[Tensor]
    log_weight: Tensor | None
    options: dict[str, Any]

    def __str__(self) -> str:
        names = dict(zip(("query", "key", "value", "log_weight"), (*self.tensors, self.log_weight), strict=True))
        shapes = ", ".join(f"{k} {tuple(x.shape)} by {x.stride()}" for k, x in names.items() if x is not None)
        return f"{self.check} by {self.kernel} in {self.tensors[0].dtype}: {shapes}, {self.options}"


def attack(seed: int, count: int) -> Iterator[str | None]:
    """Yield None for every case that passed, else a sentence on the failure."""
    torch.set_num_threads(1)
    kernels = ["torch", *(name for name in BUILDS if built(name) is not None)]
    for number in range(count):
        case = drawn(random.Random(f"{seed}-{number}"), kernels)
        try:
            with serving(case.kernel):
                worst = WORST[case.check](case)
            yield None if worst <= 1.0 else f"case {number} of seed {seed}: {worst:.3g} times its error in {case}"
        except Exception as error:
            yield f"case {number} of seed {seed}: {type(error).__name__} ({error}) in {case}"


def drawn(rng: random.Random, kernels: list[str]) -> Case:
    """Return a random case."""
    generator = torch.Generator().manual_seed(rng.getrandbits(40))
    check, kernel, dtype = rng.choice(CHECKS), rng.choice(kernels), rng.choice(DTYPES)
    batch, key_heads, share = rng.randint(1, 2), rng.randint(1, 3), rng.randint(1, 3)
    queries, atoms, dim, value_dim = rng.choice(SIZES), rng.choice(ATOMS), rng.choice(DIMS), rng.choice(DIMS)
    odd = rng.choice(ODD) if rng.random() < 0.04 and check in ("forward", "counts") else ""
    if odd == "empty":
        batch, queries, atoms, value_dim = (rng.choice((0, size)) for size in (batch, queries, atoms, value_dim))
    heads = key_heads * share
    shapes = ((batch, heads, queries, dim), (batch, key_heads, atoms, dim), (batch, key_heads, atoms, value_dim))
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    # Beyond scores of a hundred the gradient is a difference of numbers that large, and so is its rounding.
    tensors[0] *= rng.choice((1.0, 1.0, 5.0) if check in ("gradients", "functional") else (1.0, 1.0, 5.0, 1e3, 1e4))
    if rng.random() < 0.2 and atoms:
        tensors[1] = tensors[1][:, :, :1].expand_as(tensors[1])  # repeated keys
    tensors = [laid_out(rng, x.to(dtype)) for x in tensors]
    if odd == "zeros":
        place = rng.randrange(3)
        tensors[place] = torch._efficientzerotensor(tensors[place].shape, dtype=dtype)
    log_weight = drawn_log_weight(rng, generator, (batch, heads, queries, atoms))
    return Case(check, kernel, tensors, log_weight, drawn_options(rng, generator, check, batch, heads, atoms))


def laid_out(rng: random.Random, tensor: Tensor) -> Tensor:
    """Return an equal tensor in another memory layout: order of axes, strides, alignment, or expanded axes."""
    if rng.random() < 0.3 or not tensor.numel():
        return tensor
    if rng.random() < 0.2:
        axis = rng.randrange(2)
        return tensor.narrow(axis, 0, 1).expand_as(tensor)
    order = rng.sample(range(4), 4)
    steps = [rng.choice((1, 1, 1, 2)) for _ in order]
    offset, sizes = rng.randrange(6), [step * (size + 1) for size, step in zip(tensor.shape, steps, strict=True)]
    memory = torch.full((offset + math.prod(sizes),), torch.nan, dtype=tensor.dtype)  # a gap that is read shows
    whole = memory[offset:].view([sizes[i] for i in order]).permute([order.index(i) for i in range(4)])
    for axis, (size, step) in enumerate(zip(tensor.shape, steps, strict=True)):
        whole = whole.narrow(axis, step - 1, step * size)[(slice(None),) * axis + (slice(None, None, step),)]
    return whole.copy_(tensor)


def drawn_log_weight(rng: random.Random, generator: torch.Generator, full: tuple[int, ...]) -> Tensor | None:
    """Return None, a bias or a mask, with some axes broadcast and several forms of absent atoms."""
    if rng.random() < 0.5:
        return None
    shape = [1 if rng.random() < 0.5 else size for size in full][rng.randrange(4) :]
    weight = 2 * torch.randn(shape, generator=generator)
    if rng.random() < 0.6:
        weight[weight < -1] = rng.choice((-torch.inf, -torch.inf, torch.finfo(torch.float32).min))
    if rng.random() < 0.2:
        return torch.zeros_like(weight).masked_fill_(weight < -1, -torch.inf)
    return weight


def drawn_options(
    rng: random.Random, generator: torch.Generator, check: str, batch: int, heads: int, atoms: int
) -> dict[str, Any]:
    options: dict[str, Any] = {"causal": rng.random() < 0.5}
    if rng.random() < 0.3:
        options["window"] = rng.randint(1, atoms + 3)
    if rng.random() < 0.3 and check != "capped":
        shape = rng.choice(((batch,), (batch, heads), (1, heads)))
        options["lengths"] = torch.randint(0, atoms + 1, shape, generator=generator)
    if rng.random() < 0.3:
        options["sink"] = 2 * torch.randn(heads, generator=generator)
    if rng.random() < 0.3:
        options["scale"] = rng.choice((0.1, -0.3, 0.0))
    return options


def reference(case: Case, tensors: list[Tensor] | None = None) -> Dense:
    """Return the dense result, with the most negative number as minus infinity."""
    query, key, value = (x.clone() for x in (case.tensors if tensors is None else tensors))
    if 0 in (*query.shape, *key.shape, *value.shape):
        return empty_reference(case)
    weight = case.log_weight
    weight = None if weight is None else weight.masked_fill(weight <= torch.finfo(weight.dtype).min / 2, -torch.inf)
    return dense(query, key, value, weight, **case.options)


def empty_reference(case: Case) -> Dense:
    """Return the result of a call without queries, atoms or value columns, which the dense form rejects."""
    query, key, value = case.tensors
    padded = [query.clone(), *(torch.nn.functional.pad(x.clone(), (0, 0, 0, 1)) for x in (key, value))]
    options = case.options | {"lengths": torch.as_tensor(case.options.get("lengths", key.shape[-2]))}
    # One more atom that no query sees; the positions of the queries are counted from the last of the others.
    hidden = torch.zeros(query.shape[-2], key.shape[-2] + 1)
    here, there = (
        torch.arange(query.shape[-2])[:, None] + key.shape[-2] - query.shape[-2],
        torch.arange(hidden.shape[1]),
    )
    if options.pop("causal"):
        hidden[there > here] = -torch.inf
    if (window := options.pop("window", None)) is not None:
        hidden[(there - here).abs() >= window] = -torch.inf
    hidden[:, -1] = -torch.inf
    weight = case.log_weight
    if weight is not None:
        weight = weight.masked_fill(weight <= torch.finfo(weight.dtype).min / 2, -torch.inf)
        hidden = hidden + (weight if weight.shape[-1] == 1 else torch.nn.functional.pad(weight, (0, 1)))
    full = torch.zeros(*query.shape[:-1], 0)
    found = dense(*padded, hidden, **options) if query.numel() else None
    if found is None:
        nothing = full.sum(-1)
        return Dense(torch.zeros(*query.shape[:-1], value.shape[-1]), *(nothing,) * 6, full, 0.0)
    return found


def forward(case: Case) -> float:
    return judged(attend(*case.tensors, case.log_weight, **case.options), reference(case))


def judged(found: Attended, expected: Dense) -> float:
    """Return the largest error as a multiple of the tolerance, that of the variance by rounding of its formula."""
    worst = forward_excess(found, expected)
    if worst.pop("score_variance") > 1.0:
        # A difference of moments about the largest score.
        below = expected.score_mean - expected.log_normalizer - expected.peak.log()
        eps = 2**-52 if found.output.dtype == torch.float64 else 2**-23
        floor = 4 * eps * max(1.0, expected.largest_score, float(below.square().nan_to_num().max()))
        assert found.statistics is not None
        assert found.statistics.score_variance is not None
        worst["score_variance"] = excess(found.statistics.score_variance, expected.score_variance, 1e-5, floor)
    return max(worst.values())


def gradients(case: Case) -> float:
    options, dtype = dict(case.options), case.tensors[0].dtype
    if dtype in (torch.bfloat16, torch.float16):
        # Its gradient is a sum over all rows that may cancel to less than the rounding of their outputs.
        options.pop("sink", None)
    if "sink" in options:
        options["sink"] = options["sink"].to(dtype)
    weight = case.log_weight
    if weight is not None:  # autograd through the dense form has no gradient at the most negative number
        weight = weight.masked_fill(weight <= torch.finfo(weight.dtype).min / 2, -torch.inf)
    return max(backward_excess([x.clone() for x in case.tensors], weight, slack=10.0, **options))


def counts(case: Case) -> float:
    expected, mass = reference(case), (0.01, 0.5, 0.9, 0.999, 1.0)[case.tensors[1].shape[-2] % 5]
    found = mass_count(*case.tensors[:2], case.log_weight, mass=mass, **case.options)
    if not found.numel() or not expected.probability.shape[-1]:
        return 0.0 if found.shape == case.tensors[0].shape[:-1] and not bool(found.any()) else math.inf
    eps = 2**-52 if case.tensors[0].dtype == torch.float64 else 2**-23
    return count_excess(found, expected, mass, 32 * eps * (1 + expected.largest_score))


def functional(case: Case) -> float:
    """Compare gradients and mass counts under ``torch.func.grad`` with autograd."""

    def loss(query: Tensor) -> tuple[Tensor, Tensor]:
        found = attend(query, *case.tensors[1:], case.log_weight, **case.options)
        assert found.statistics is not None
        count = mass_count(query, case.tensors[1], case.log_weight, **case.options)
        return found.output.float().sum() + found.statistics.entropy.nansum(), count

    found, seen = torch.func.grad(loss, has_aux=True)(case.tensors[0])
    leaf = case.tensors[0].detach().requires_grad_()  # the same strides, the same rounding
    value, count = loss(leaf)
    (expected,) = torch.autograd.grad(value, leaf)
    same = torch.equal(seen, count) and torch.equal(found.isnan(), expected.isnan())
    most = 1e-6 + float(expected.abs().nan_to_num().max())
    return excess(found, expected, 1e-4, 1e-4 * most) if same else math.inf


def capped(case: Case) -> float:
    """Compare statistics of a call with softcap with those of the capped scores as log weights."""
    query, key, value = case.tensors
    cap, options = 5.0, dict(case.options)
    scale = options.pop("scale", query.shape[-1] ** -0.5)
    sight = {name: options.get(name) for name in ("causal", "window", "sink")}
    tensors = {"query": query, "key": key, "value": value, "log_weight": case.log_weight}
    call = AttentionCall(
        name="",
        number=0,
        layer=0,
        stack="decoder",
        **tensors,
        scale=scale,
        **sight,
        softcap=cap,
        module=torch.nn.Module(),
    )
    share = query.shape[1] // key.shape[1]
    exact = torch.promote_types(query.dtype, torch.float32)
    product = query.double() @ key.double().repeat_interleave(share, 1).mT * scale
    scores = cap * torch.tanh(product / cap)
    if case.log_weight is not None:
        scores = scores + case.log_weight.double().masked_fill(case.log_weight < -1e30, -torch.inf)
    expected = dense(torch.zeros_like(query), torch.zeros_like(key), value, scores, **options)
    found = call_statistics(call)
    rounding = torch.finfo(exact).eps * max(1.0, float(product.abs().max()))
    names = ("log_normalizer", "entropy", "score_mean", "peak")
    return max(excess(getattr(found, name), getattr(expected, name), 1e-5, 1e-5 + 16 * rounding) for name in names)


def hidden(case: Case) -> float:
    """Put nan or infinity in a key or a value, and compare rows that do not see it with a call without it."""
    query, key, value = (x.clone() for x in case.tensors)
    rng = random.Random(key.numel() * 31 + query.numel())
    clean = [query.clone(), key.clone(), value.clone()]
    spoiled, atom = rng.choice((key, value)), rng.randrange(key.shape[-2])
    head = rng.randrange(key.shape[1])
    spoiled[:, head, atom, rng.randrange(spoiled.shape[-1])] = rng.choice((torch.nan, torch.inf, -torch.inf))
    expected = reference(case, clean)
    flat = Case(case.check, case.kernel, [0 * clean[0], clean[1], clean[2]], _mask(case.log_weight), case.options)
    share = query.shape[1] // key.shape[1]
    sees = reference(flat).probability[..., atom] > 0
    sees[:, [i for i in range(query.shape[1]) if i // share != head]] = False
    found = attend(query, key, value, case.log_weight, **case.options)
    if spoiled is key and rng.random() < 0.5:
        count = mass_count(query, key, case.log_weight, **case.options)
        if bool(count[sees].any()) or not torch.equal(
            count[~sees], mass_count(query, clean[1], case.log_weight, **case.options)[~sees]
        ):
            return math.inf
    spread = found._replace(output=found.output.masked_fill(sees[..., None], 0.0))
    assert found.statistics is not None
    spread = spread._replace(statistics=type(found.statistics)(*(x.masked_fill(sees, 0.0) for x in found.statistics)))
    fields = [x.masked_fill(sees, 0.0) for x in expected[1:7]]
    whole = expected._replace(output=expected.output.masked_fill(sees[..., None], 0.0))
    whole = Dense(whole.output, *fields, whole.probability, whole.largest_score)
    return judged(spread, whole)


def _mask(log_weight: Tensor | None) -> Tensor | None:
    """Return log weights of zero for present atoms."""
    return None if log_weight is None else torch.zeros_like(log_weight).masked_fill(log_weight < -1e30, -torch.inf)


WORST = {
    "forward": forward,
    "gradients": gradients,
    "counts": counts,
    "functional": functional,
    "capped": capped,
    "hidden": hidden,
}
