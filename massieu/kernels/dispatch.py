"""Choice of the kernel of a call: the compiled one where it was built, works and reads the tensors; else tiles."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor

from massieu.checks import check_choice
from massieu.kernels import tiles
from massieu.kernels.compiled import LIBRARY, Library, serves
from massieu.kernels.nonfinite import all_finite, find_broken, hides_atoms, repaired
from massieu.kernels.results import Found, Gradients, Slope
from massieu.kernels.rows import Inputs, arrange

__all__ = ["backend", "backward", "forward", "mass_count", "reason", "retrieve"]

BUILDS = ("avx512", "avx2", "portable")
FEWEST_SETS = 4


def backend() -> str:
    """Name of the kernel for tensors on the processor: "torch", or "compiled" and its instruction set.

    The environment variable ``MASSIEU_KERNEL`` selects one: "torch", "avx512", "avx2" or "portable". It is read once,
    at the first call.

    Example:
        >>> massieu.kernels.backend().split()[0] in ("torch", "compiled")
        True
    """
    library = loaded()
    return "torch" if library is None else f"compiled {library.build}"


def reason() -> str:
    """Reason for the kernel that :func:`backend` names, as a sentence."""
    if loaded() is not None:
        return "the compiled kernel was built and agrees with the torch kernel"
    if os.environ.get("MASSIEU_KERNEL") == "torch":
        return "MASSIEU_KERNEL=torch switches the compiled kernel off"
    if not LIBRARY.exists():
        return "the compiled kernel was not built: install a C++ compiler, then install massieu again"
    return "the compiled kernel was built, but failed when it was loaded: see the warning"


@functools.cache
def loaded() -> Library | None:
    """The compiled kernel, after a check that it agrees with the torch tiles; None if it cannot be used."""
    wanted = os.environ.get("MASSIEU_KERNEL", "")
    if wanted:
        check_choice(wanted, "MASSIEU_KERNEL", ("torch", *BUILDS))
    if wanted == "torch" or (not wanted and not LIBRARY.exists()):
        return None
    try:
        library = Library(wanted)
        # The context of the first call must not affect the check.
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch._C._DisableFuncTorch():
            check(library)
    except (OSError, AttributeError, RuntimeError, MemoryError) as error:
        warnings.warn(f"the compiled kernel is not used: {error}; the torch kernel serves instead", stacklevel=3)
        return None
    return library


def check(library: Library) -> None:
    """Raise unless the library agrees with the torch tiles on small cases: many rows and few, in each precision."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for rows in (13, 1):
            for found, expected in _answers(library, _tiny_case(rows, dtype)):
                # Outputs and gradients in bfloat16 have three digits of their own.
                tolerance = 2e-2 if found.dtype == torch.bfloat16 else 1e-4
                pair = found.double(), expected.double()
                if not torch.allclose(*pair, rtol=tolerance, atol=tolerance / 10, equal_nan=True):
                    raise RuntimeError(f"its {library.build} build disagrees with the torch kernel on a small case")


def _answers(library: Library, inputs: Inputs) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of results of library and tiles: output and statistics by rows and by atoms, gradients, mass counts."""
    theirs = tiles.forward(inputs, 2)
    assert theirs.output is not None
    for ours in (library.forward(inputs, 2), (split := library.forward(inputs, 2, split_atoms=True, top=3))):
        yield from zip(_all(ours.output, *ours.statistics), _all(theirs.output, *theirs.statistics), strict=True)
    # Scores alone: of two that are almost equal either atom may come first.
    assert split.best is not None
    yield split.best.score, tiles.best(inputs, 3).score
    statistic = theirs.statistics[0]
    slope = Slope(statistic, statistic, statistic, statistic)
    coming = torch.arange(theirs.output.numel(), device="cpu").float().cos().view_as(theirs.output).to(inputs.query)
    back = (inputs, theirs.moments, slope, theirs.output, coming)
    mine, other = (kernel.backward(*back, want_log_weight=True) for kernel in (library, tiles))
    yield from zip(_all(*mine), _all(*other), strict=True)
    # An atom at the very edge of the mass may fall on either side of it.
    ours_count, their_count = (kernel.mass_count(inputs, 0.9).double() for kernel in (library, tiles))
    yield ours_count + (their_count - ours_count).clamp(-1, 1), their_count


def _all(*tensors: Tensor | None) -> list[Tensor]:
    return [x for x in tensors if x is not None]


def _tiny_case(rows: int, dtype: torch.dtype) -> Inputs:
    """Inputs with grouped heads over more than one tile of atoms, whose scores rise from tile to tile."""
    # On the processor, whatever the default is.
    wave = torch.arange(2 * 2 * 150 * 19, device="cpu").float().mul(0.7).sin().view(2, 2, 150, 19)
    rise = torch.linspace(0, 1, 150, dtype=torch.float32, device="cpu")[:, None]
    tensors = wave[:, :, :rows], wave[:, :1].cos() + rise, wave[:, :1, :, :11] + 1, wave[0, 0, :rows, :1] + rise[:, 0]
    options = {"sink": wave[0, 0, 0, :2], "lengths": torch.tensor([150, 147], device="cpu")}
    return arrange(*(x.to(dtype) for x in tensors), **options, scale=0.3, causal=True, window=140).inputs


def _kernel(inputs: Inputs) -> Library | ModuleType:
    library = loaded() if serves(inputs) else None
    return tiles if library is None else library


def forward(inputs: Inputs, level: int) -> Found:
    """Compute output and row statistics: all at level 2, no variance and no collision at level 1, none at level 0."""
    solve = _kernel(inputs).forward
    return repaired(inputs, solve(inputs, level), level, solve)


def retrieve(inputs: Inputs, level: int, top: int = 0) -> Found:
    """As :func:`forward`, for few queries over very many atoms: threads share the atoms and merge their results.

    The result holds the ``top`` best atoms too. The last digits depend on the number of threads. Scores are computed
    in double if the largest of a row exceeds 1000, not if the norms allow it: reading the norms of all atoms takes too
    long.
    """
    kernel = _kernel(inputs)
    if isinstance(kernel, Library):
        return kernel.forward(inputs, level, split_atoms=True, top=top)
    found = forward(inputs, level)
    return found._replace(best=tiles.best(inputs, top)) if top else found


def backward(
    inputs: Inputs,
    moments: Tensor,
    slope: Slope,
    output: Tensor | None,
    grad_output: Tensor | None,
    *,
    want_log_weight: bool,
) -> Gradients:
    """Gradients in query, key, value and log weight; scores are recomputed."""
    # The compiled kernel uses one thread for every set of log weights: with few sets the others are idle.
    few = want_log_weight and inputs.log_weight is not None and inputs.log_weight.shape[0] < FEWEST_SETS
    kernel = tiles if few else _kernel(inputs)
    found: Gradients = kernel.backward(inputs, moments, slope, output, grad_output, want_log_weight=want_log_weight)
    if not hides_atoms(inputs) or all_finite(found.query):
        return found
    broken = find_broken(inputs, _kernel(inputs).forward)
    if broken is None or broken.is_used(slope, grad_output):
        return found
    # Moments of the repaired rows: where no gradient comes in, none goes out.
    again = _kernel(inputs).forward(broken.clean, len(moments) - 2)
    output = None if output is None or broken.outputs is None else output.masked_fill(broken.outputs, 0.0)
    found = kernel.backward(broken.clean, again.moments, slope, output, grad_output, want_log_weight=want_log_weight)
    return found


def mass_count(inputs: Inputs, mass: float) -> Tensor:
    """Number of the heaviest atoms that hold the given mass, ``(batch, groups, queries)``, int64."""
    kernel = _kernel(inputs)
    broken = find_broken(inputs, kernel.forward)
    count: Tensor = kernel.mass_count(inputs if broken is None else broken.clean, mass)
    return count if broken is None else count.masked_fill(broken.flat_rows, 0)
