"""Keys and values that are not finite affect only the rows that see them."""

from __future__ import annotations

import pytest
import torch
from agreement import BUILDS, built, excess, randn, serving
from dense import dense
from torch.testing import assert_close

from massieu import attend, mass_count

KERNELS = ["torch", *(name for name in BUILDS if built(name) is not None)]
BAD = 7  # the atom whose key or value is not finite


def hiding(length: int) -> dict:
    """Ways to hide the bad atom from some rows, with the rows that do not see it."""
    place = torch.arange(length)
    mask = place != BAD
    least = torch.zeros(length, length).masked_fill(~mask, torch.finfo(torch.float32).min)
    everyone = torch.ones(length, dtype=torch.bool)
    return {
        "causal": ({"causal": True}, place < BAD),
        "window": ({"window": 3}, (place - BAD).abs() >= 3),
        "lengths": ({"lengths": torch.tensor([BAD, BAD])}, everyone),
        "boolean mask": ({"log_weight": mask}, everyone),
        "minus infinity": ({"log_weight": torch.zeros(length).masked_fill(~mask, -torch.inf)}, everyone),
        "most negative number": ({"log_weight": least}, everyone),
        "behind a weak bias": ({"log_weight": randn(2, 4, length, length) - 500, "causal": True}, place < BAD),
    }


def case(length: int, which: str, bad: float) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Grouped queries, keys and values, without and with numbers that are not finite."""
    clean = [randn(2, heads, length, 6, seed=heads + i) for i, heads in enumerate((4, 2, 2))]
    spoiled = [x.clone() for x in clean]
    spoiled[("query", "key", "value").index(which)][:, :, BAD, 2] = bad
    return clean, spoiled


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("how", hiding(9))
def test_a_hidden_atom_changes_no_row_and_no_gradient(kernel, how, which, bad):
    length = 300 if how == "causal" else 20
    options, blind = hiding(length)[how]
    clean, spoiled = ([x.requires_grad_() for x in tensors] for tensors in case(length, which, bad))
    with serving(kernel):
        expected, found = (attend(*tensors, **options) for tensors in (clean, spoiled))
        pairs = [(expected.output, found.output), *zip(expected.statistics, found.statistics, strict=True)]
        for mine, other in pairs:
            assert_close(other[:, :, blind], mine[:, :, blind])
        wanted = [
            torch.autograd.grad((x.output[:, :, blind].square().sum() + x.statistics.entropy[:, :, blind].sum()), y)
            for x, y in ((expected, clean), (found, spoiled))
        ]
        for mine, other in zip(*wanted, strict=True):
            assert_close(other, mine)
        counts = [mass_count(*tensors[:2], **options)[:, :, blind] for tensors in (clean, spoiled)]
        assert torch.equal(*counts)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_that_sees_it_is_not_a_number(kernel):
    options, blind = hiding(20)["causal"]
    with serving(kernel):
        _, (query, key, value) = case(20, "key", torch.nan)
        found = attend(query, key, value, **options)
        for field in (found.output[..., 0], *found.statistics):
            assert bool(field[:, :, ~blind].isnan().all())
        assert not bool(mass_count(query, key, **options)[:, :, ~blind].any())
        _, tensors = case(20, "value", torch.nan)
        found = attend(*tensors, **options)
        assert found.output.isfinite()[0, 0, ~blind].all(0).tolist() == [True, True, False, True, True, True]
        assert bool(found.statistics.entropy.isfinite().all())


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_gradient_that_comes_through_a_broken_row_is_not_finite(kernel):
    options, _ = hiding(20)["causal"]
    for which in ("query", "key", "value"):
        _, spoiled = case(20, which, torch.nan)
        leaves = [x.requires_grad_() for x in spoiled]
        with serving(kernel):
            found = torch.autograd.grad(attend(*leaves, **options).output.sum(), leaves)
        assert not all(bool(x.isfinite().all()) for x in found)


@pytest.mark.parametrize("kernel", KERNELS)
def test_hidden_atoms_in_half_precision_with_a_sink_agree_with_the_reference(kernel):
    clean, spoiled = case(40, "key", torch.nan)
    options = {"lengths": torch.tensor([BAD, BAD - 3]), "causal": True, "sink": randn(4, seed=9)}
    reference = dense(*(x.bfloat16() for x in clean), **options)
    with serving(kernel):
        found = attend(*(x.bfloat16() for x in spoiled), **options)
    assert excess(found.output, reference.output, 2**-7, 2**-7) <= 1
    assert excess(found.statistics.entropy, reference.entropy, 1e-5, 1e-5) <= 1
