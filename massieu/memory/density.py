"""Memory as a density: a mixture of Gaussians around the patterns, whose ideal denoiser is the update."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from massieu.checks import UserError
from massieu.memory.continuous import Continuous
from massieu.memory.memory import Memory
from massieu.memory.similarity import Kernel

__all__ = ["denoise", "log_density"]


def log_density(memory: Memory, state: Tensor) -> Tensor:
    r"""Return the logarithm of :math:`e^{-\beta E(\xi)}`, normalized: a mixture of Gaussians of variance 1 / beta.

    .. math:: p(\xi) = \sum_j \pi_j\, \mathcal N(\xi;\, x_j, I/\beta), \qquad \pi_j \propto w_j e^{\beta |x_j|^2 / 2}

    for :class:`~massieu.memory.Continuous`, where longer patterns weigh more; equal weights :math:`\pi_j \propto
    w_j`, a kernel density estimate, belong to :class:`~massieu.memory.Kernel` with ``"l2"``.

    Args:
        memory: with one beta, and log weights for all queries alike.
        state: :math:`\xi`, shape ``(..., queries, dim)``.

    Returns:
        Shape ``(..., queries)``.

    Example:
        >>> memory = massieu.memory.Continuous(torch.zeros(1, 1), beta=1.0)
        >>> log_density(memory, torch.zeros(1, 1)).exp()
        tensor([0.3989])
    """
    beta = _one_beta(memory)
    assert isinstance(memory, (Continuous, Kernel))
    constant = 0.5 * memory.dim * (math.log(2 * math.pi) - beta.log())
    if isinstance(memory, Continuous):
        # The constant of the energy is that of the longest pattern, so that every exponent here is negative.
        squares = 0.5 * (memory.patterns.double().square().sum(-1) - memory._size().double().square())
        weights = squares.new_zeros(len(squares)) if memory.log_weight is None else memory.log_weight.double()
        constant = constant + (beta * squares + weights).logsumexp(-1) - weights.logsumexp(-1)
    return (-beta * memory.energy(state.double()) - constant).to(state.dtype)


def denoise(memory: Memory, state: Tensor) -> Tensor:
    r"""Return the expected clean pattern of a noisy state, by the formula of Tweedie.

    .. math:: E[x \mid \xi] = \xi + \beta^{-1} \nabla \log p(\xi), \qquad \xi = x + \beta^{-1/2} \varepsilon

    for x drawn from the mixture of :func:`log_density`. It is one update of the memory, and one step of mean shift: the
    ideal denoiser of a diffusion model at noise :math:`\sigma^2 = 1/\beta`.

    Args:
        memory: as for :func:`log_density`.
        state: :math:`\xi`, shape ``(..., queries, dim)``.

    Returns:
        Shape ``(..., queries, dim)``.

    Example:
        >>> memory = massieu.memory.Continuous(torch.tensor([[1.0], [-1.0]]), beta=1.0)
        >>> denoise(memory, torch.tensor([[0.0], [3.0]]))
        tensor([[0.0000],
                [0.9951]])
    """
    _one_beta(memory)
    return memory.update(state)


def _one_beta(memory: Memory) -> Tensor:
    if not isinstance(memory, Continuous) and not (isinstance(memory, Kernel) and memory.similarity == "l2"):
        raise UserError(
            f'memory must be Continuous, or Kernel with "l2", got {memory!r};'
            " only their energies are those of Gaussian mixtures"
        )
    beta = torch.as_tensor(memory.beta, dtype=torch.float64)
    if beta.dim() or (memory.log_weight is not None and memory.log_weight.dim() > 1):
        raise UserError("memory must have one beta and log weights of shape (atoms,), not one for each query or head")
    return beta
