"""Repair of rows that do not see the keys and values that are not finite.

Kernels hide an atom by adding a very low score, which leaves nan and infinity as they are. Where a call may hide atoms
and its result is not finite, the rows that see no such atom are computed again without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from massieu.kernels.blocks import is_absent
from massieu.kernels.results import Found, Slope
from massieu.kernels.rows import Inputs

__all__ = ["Broken", "all_finite", "find_broken", "hides_atoms", "repaired"]

Solve = Callable[[Inputs, int], Found]


class Broken(NamedTuple):
    """A call without the numbers that are not finite, and the part of its result that depends on them."""

    clean: Inputs
    """The call with zeros in their place."""
    rows: Tensor
    """True for rows with such a key in sight, or with such a query and any key, ``(*batch, *groups, queries)``."""
    outputs: Tensor | None
    """True for outputs of these rows and of rows with such a value in sight."""

    def is_used(self, slope: Slope, grad_output: Tensor | None) -> bool:
        """Return True if any gradient is propagated through these rows and outputs."""
        if any(x is not None and bool((x.ne(0) & self.flat_rows).any()) for x in slope):
            return True
        if grad_output is None or self.outputs is None:
            return False
        return bool((grad_output.ne(0) & self.outputs).any())

    @property
    def flat_rows(self) -> Tensor:
        """Rows with batch and groups as one axis each."""
        return self.clean.flat_rows(self.rows[..., None])[..., 0]


def hides_atoms(inputs: Inputs) -> bool:
    """Return True if an atom may be hidden from a row of the call."""
    plan = inputs.plan
    ahead = plan.causal and inputs.query.shape[-2] > 1
    return ahead or plan.window is not None or plan.lengths is not None or inputs.log_weight is not None


def all_finite(tensor: Tensor) -> bool:
    """Return True if every entry is finite."""
    # The sum is fast, and not finite if any entry is not; of large entries it may overflow.
    return math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())


def find_broken(inputs: Inputs, solve: Solve) -> Broken | None:
    """Return the rows with numbers in sight that are not finite; None if there are no such numbers."""
    tensors = inputs[:3]
    if all(x is None or all_finite(x) for x in tensors):
        return None
    query, key, value = (None if x is None else torch.isfinite(x) for x in tensors)
    assert query is not None
    assert key is not None
    clean = Inputs(*(None if x is None else x.nan_to_num(0.0, 0.0, 0.0) for x in tensors), *inputs[3:])  # type: ignore[arg-type,call-arg]
    marks = [torch.ones_like(key[..., :1]), ~key.all(-1, keepdim=True)]
    reached = _reached(inputs, torch.cat(marks if value is None else [*marks, ~value], -1), solve)
    rows = reached[..., 1] | (reached[..., 0] & ~query.all(-1))
    return Broken(clean, rows, None if value is None else reached[..., 2:] | rows[..., None])


def repaired(inputs: Inputs, found: Found, level: int, solve: Solve) -> Found:
    """Return the result of a call in which atoms that are not finite affect only the rows that see them."""
    if not hides_atoms(inputs) or (all_finite(found.moments) and (found.output is None or all_finite(found.output))):
        return found
    broken = find_broken(inputs, solve)
    if broken is None:  # rows without atoms have nan, too
        return found
    again, rows = solve(broken.clean, level), broken.flat_rows
    output = found.output
    if output is not None and again.output is not None and broken.outputs is not None:
        output = torch.where(broken.outputs, output, again.output)
    fields = zip(found.statistics, again.statistics, strict=True)
    statistics = tuple(None if x is None or y is None else torch.where(rows, x, y) for x, y in fields)
    return Found(output, statistics, torch.where(rows, found.moments, again.moments))


def _reached(inputs: Inputs, marks: Tensor, solve: Solve) -> Tensor:
    """Return True where a row sees a mark of an atom, ``(*batch, *groups, queries, marks)``: uniform attention."""
    query, key = (x.new_zeros((*x.shape[:-1], 1), dtype=torch.float32) for x in inputs[:2])
    weight = inputs.log_weight
    if weight is not None:
        weight = torch.zeros(weight.shape, device=weight.device).masked_fill(is_absent(weight), -torch.inf)
    uniform = Inputs(query, key, marks.float(), weight, None, replace(inputs.plan, scale=1.0))
    output = solve(uniform, 0).output
    assert output is not None
    return output > 0
