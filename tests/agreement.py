"""Tolerances of kernels against the dense reference, and all builds of the compiled kernel."""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from dense import Dense, dense
from torch import Tensor

from massieu import Attended, RowStatistics, attend
from massieu.kernels import dispatch
from massieu.kernels.compiled import LIBRARY, Library

BUILDS = dispatch.BUILDS
NOT_BUILT = "the compiled kernel is not built: python setup.py build_ext --inplace"

# A library runs one build at a time; a copy of the file is a library of its own. The copies stay until
# the end: the loader takes a new file with the number of a deleted one for the old library.
_COPIES = tempfile.TemporaryDirectory(prefix="massieu_builds_")


@functools.cache
def built(name: str) -> Library | None:
    """One build of the compiled kernel, or None where there is no library or the processor does not run the build."""
    if not LIBRARY.exists():
        return None
    try:
        return Library(name, Path(shutil.copy(LIBRARY, Path(_COPIES.name) / f"{name}.so")))
    except OSError:
        return None


@contextlib.contextmanager
def serving(name: str) -> Iterator[None]:
    """Let one build serve, or the torch tiles."""
    library = None if name == "torch" else built(name)
    assert library is not None or name == "torch"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "loaded", lambda: library)
        yield


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """Set the number of threads of torch and the compiled kernel."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def excess(found: Tensor, expected: Tensor, relative: float, absolute: float) -> float:
    """The largest error as a multiple of what is allowed; infinite where only one of the two is nan."""
    found, expected = found.detach().double(), expected.detach().double()
    if not bool((found.isnan() == expected.isnan()).all()):
        return torch.inf
    allowed = relative * expected.abs() + absolute
    return float(((found - expected).abs() / allowed).nan_to_num(0.0).max()) if found.numel() else 0.0


def forward_excess(attended: Attended, expected: Dense) -> dict[str, float]:
    """Output and statistics: 1e-5 relative plus four roundings of the largest score, 1e-12 in double precision.

    The entropy of a row with one atom is zero: 1e-6 absolute. A half precision output rounds once more.
    """
    own, wide = attended.output.dtype, attended.output.dtype == torch.float64
    relative, small, eps = (1e-12, 1e-13, 2**-52) if wide else (1e-5, 1e-6, 2**-23)
    floor = 4 * eps * max(1.0, expected.largest_score)
    largest = float(expected.output.detach().abs().max()) if expected.output.numel() else 0.0
    rounding = 0.0 if own in (torch.float32, torch.float64) else torch.finfo(own).eps
    worst = {"output": excess(attended.output, expected.output, relative + rounding, floor + relative * largest)}
    assert attended.statistics is not None
    for name, found in attended.statistics._asdict().items():
        absolute = floor + (small if name == "entropy" else 0.0)
        worst[name] = excess(found, getattr(expected, name), relative, absolute)
    return worst


def assert_forward_agrees(
    query: Tensor, key: Tensor, value: Tensor, log_weight: Tensor | None = None, **options
) -> Attended:
    """``attend`` within the allowance of the dense float64 reference, in whatever precision comes in."""
    attended = attend(query, key, value, log_weight, **options)
    worst = forward_excess(attended, dense(query, key, value, log_weight, **options))
    assert max(worst.values()) <= 1.0, worst
    return attended


DIFFERENTIABLE = ("output", *(name for name in RowStatistics._fields if name != "peak"))


def gradients(source: Attended | Dense, wanted: list[Tensor], names: tuple[str, ...] = DIFFERENTIABLE) -> list[Tensor]:
    """Gradients of one fixed random loss in the output and the statistics of these names."""
    fields = source.statistics if isinstance(source, Attended) else source
    outputs = [source.output if name == "output" else getattr(fields, name) for name in names]
    # Numbers that every precision holds exactly.
    coming = [randn(*x.shape, seed=100 + i).bfloat16().to(x.dtype) for i, x in enumerate(outputs)]
    return list(torch.autograd.grad(outputs, wanted, coming, allow_unused=True, materialize_grads=True))


def backward_excess(
    tensors: list[Tensor],
    log_weight: Tensor | None = None,
    *,
    sink: Tensor | None = None,
    names: tuple[str, ...] = DIFFERENTIABLE,
    slack: float = 1.0,
    **options,
) -> list[float]:
    """Errors of all gradients against autograd through the dense reference, as multiples of what is allowed.

    That is 1e-4 relative and 1e-5 of the largest gradient (1e-9 and 1e-10 in double precision), the latter times the
    slack. Half precision rounds the gradients and, what weighs more, the output that the backward pass starts from:
    4 eps of the largest gradient.
    """
    own = tensors[0].dtype
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-10}.get(own, 4 * torch.finfo(own).eps)
    leaves = [x.detach().requires_grad_() for x in (*tensors, *(() if sink is None else (sink,)))]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    found = gradients(
        attend(*leaves[:3], log_weight, sink=leaves[3] if sink is not None else None, **options), leaves, names
    )
    reference = dense(*exact[:3], log_weight, sink=exact[3] if sink is not None else None, **options)
    expected = gradients(reference, exact, names)
    assert [x.dtype for x in found] == [x.dtype for x in leaves]
    largest = [max(float(x.abs().max()), 1e-6) if x.numel() else 0.0 for x in expected]
    return [
        excess(mine, other, 10 * tolerance, slack * tolerance * most)
        for mine, other, most in zip(found, expected, largest, strict=True)
    ]


def assert_backward_agrees(tensors: list[Tensor], log_weight: Tensor | None = None, **options) -> None:
    worst = backward_excess(tensors, log_weight, **options)
    assert max(worst) <= 1.0, worst


def count_excess(count: Tensor, expected: Dense, mass: float, slack: float) -> float:
    """Mass that the heaviest atoms lack, or have without the lightest of them, as a multiple of the slack."""
    held = expected.probability.detach().sort(-1, descending=True).values.cumsum(-1)
    held = torch.nn.functional.pad(held, (1, 0))
    empty = expected.entropy.isnan()
    if bool(((count == 0) != empty).any()):
        return torch.inf
    with_all = held.gather(-1, count[..., None])[..., 0]
    without_one = held.gather(-1, (count - 1).clamp(min=0)[..., None])[..., 0]
    lacking = torch.maximum(mass - with_all, without_one - mass).masked_fill(empty, 0.0)
    return float(lacking.max()) / slack
