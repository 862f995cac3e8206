"""Symmetry and sign of Jacobians by their products with vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["FieldTest", "field_test", "positive_mass"]

PROBES = 2
STEPS = 8


class FieldTest(NamedTuple):
    """Outcome of :func:`field_test`.

    Attributes:
        symmetry: share of the Jacobians' energy in their symmetric part; 1 for a gradient field.
        control: the same after the coordinates of the output were shuffled with random signs, about one half.
        positive: positive share of the eigenvalue mass of the symmetric part; 1 for a convex potential.
    """

    symmetry: float
    control: float
    positive: float


def field_test(
    push: Callable[[Tensor], Tensor], pull: Callable[[Tensor], Tensor], draw: Callable[[int], Tensor]
) -> FieldTest:
    r"""Test whether a field with Jacobians J, one for each token, is a gradient of convex potentials.

    .. math:: \frac{\sum |J + J^\top|^2}{4 \sum |J|^2} = \frac12 + \frac{\sum \mathrm{tr}(J^2)}{2 \sum |J|^2}, \qquad
              \mathrm{tr}(J^2) = E[(J^\top g) \cdot (J g)], \quad |J|^2 = E |J g|^2

    over random signs g, so that no J is ever computed.

    Args:
        push: maps directions ``(tokens, dim)`` to :math:`J g` of every token.
        pull: maps them to :math:`J^\top g`.
        draw: maps a number to random signs ``(tokens, dim)``, different for different numbers.

    Example:
        >>> J = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
        >>> signs = lambda salt: torch.tensor([[1.0, 1.0], [1.0, -1.0]])
        >>> round(field_test(lambda g: g @ J.T, lambda g: g @ J, signs).symmetry, 6)
        0.0
    """
    trace = trace_control = energy = 0.0
    for probe in range(PROBES):
        signs = draw(probe)
        shuffle, flip = shuffling(signs.shape[-1])
        pushed, pulled = push(signs), pull(signs)
        # With P the signed shuffle of outputs: (PJ)^T g = J^T (P^T g).
        back = torch.zeros_like(signs).index_copy_(-1, shuffle, signs * flip)
        trace += float((pushed * pulled).sum())
        trace_control += float((pushed[..., shuffle] * flip * pull(back)).sum())
        energy += float(pushed.square().sum() + pulled.square().sum()) / 2
    if not energy > 0:
        return FieldTest(float("nan"), float("nan"), float("nan"))
    positive = positive_mass(lambda g: (push(g) + pull(g)) / 2, draw(PROBES))
    return FieldTest(0.5 + 0.5 * trace / energy, 0.5 + 0.5 * trace_control / energy, positive)


def positive_mass(apply: Callable[[Tensor], Tensor], start: Tensor) -> float:
    r"""Share of positive eigenvalues in the sum of absolute eigenvalues of symmetric matrices, one for each token.

    .. math:: \frac{\sum \mathrm{tr}(S_+)}{\sum \mathrm{tr} |S|}

    Args:
        apply: maps ``(tokens, dim)`` to the products with the S of every token.
        start: random signs, ``(tokens, dim)``.

    Source:
        Stochastic Lanczos quadrature, Ubaru, Chen and Saad 2017, with one probe for each token.

    Example:
        >>> S = torch.diag(torch.tensor([3.0, -1.0, 0.0], dtype=torch.float64))
        >>> round(positive_mass(lambda g: g @ S, torch.ones(1, 3, dtype=torch.float64)), 6)
        0.75
    """
    steps = min(STEPS, start.shape[-1])
    basis = [start / start.norm(dim=-1, keepdim=True)]
    diagonal, beside = [], []
    for _ in range(steps):
        image = apply(basis[-1])
        diagonal.append((image * basis[-1]).sum(-1))
        # Against all former vectors and twice: three-term recurrences lose orthogonality.
        for _ in range(2):
            for vector in basis:
                image = image - (image * vector).sum(-1, keepdim=True) * vector
        size = image.norm(dim=-1)
        beside.append(size)
        # After the rank of the matrix all vectors are rounding, without weight in the first vector.
        basis.append(image / size[..., None].clamp_min(torch.finfo(size.dtype).tiny))
    matrix = torch.diag_embed(torch.stack(diagonal, -1))
    if steps > 1:
        off = torch.stack(beside[:-1], -1)
        matrix = matrix + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)
    eigenvalues, vectors = torch.linalg.eigh(matrix)
    mass = vectors[..., 0, :].square() * eigenvalues
    return float(mass.clamp_min(0).sum() / mass.abs().sum())


def shuffling(dim: int) -> tuple[Tensor, Tensor]:
    """Return a fixed random order of coordinates and a sign for each, for the control."""
    generator = torch.Generator().manual_seed(dim)
    shuffle = torch.randperm(dim, generator=generator)
    return shuffle, 2.0 * torch.randint(2, (dim,), generator=generator) - 1
