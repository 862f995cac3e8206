"""Single steps of attention on a cloud of tokens: residual, or as a Hopfield memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from massieu.checks import UserError, check_floating, check_number, check_shape
from massieu.statistics import attend

__all__ = ["ascend", "check_cloud", "hopfield_step", "hopfield_time"]


def ascend(
    natural: Tensor,
    keys: Tensor | None = None,
    *,
    step: float = 1.0,
    beta: float = 1.0,
    causal: bool = False,
    log_weight: Tensor | None = None,
) -> Tensor:
    r"""Apply residual attention, a step of gradient ascent on the log normalizer of the keys.

    .. math:: \eta_i \mapsto \eta_i + s\, m(\eta_i), \qquad
              m(\eta) = \nabla G(\eta), \quad G(\eta) = \beta^{-1} \log \sum_j w_j e^{\beta x_j \cdot \eta}

    G is convex. Hence, for every positive step and with the keys held fixed,
    :math:`G(\eta + s \nabla G) \ge G(\eta) + s |\nabla G|^2`; and where all tokens see the same keys, moving or not,
    no two of them come closer: :math:`|\Delta\eta'|^2 \ge |\Delta\eta|^2 + s^2 |\Delta m|^2`. A causal mask breaks
    the second statement. Nothing of size tokens x keys is held in memory.

    Args:
        natural: the tokens :math:`\eta_i`, shape ``(..., tokens, dim)``.
        keys: :math:`x_j`, shape ``(..., atoms, dim)``, held fixed; None for moving keys, the tokens themselves.
        step: s.
        beta: inverse temperature :math:`\beta`.
        causal: a token sees only the keys up to its own position.
        log_weight: :math:`\log w_j`, broadcasting to ``(..., tokens, atoms)``.

    Returns:
        The moved tokens, same shape.

    Source:
        "A Probabilistic Interpretation of Transformers", section 3.1. Its condition on the step is not needed, and
        the ascent needs values that are the keys.

    Example:
        >>> ascend(torch.tensor([[0.0], [2.0]]), torch.tensor([[-1.0], [3.0]]), step=0.5)
        tensor([[0.5000],
                [3.4993]])
    """
    check_cloud(natural, "natural")
    return natural + check_number(step, "step") * _attention(natural, keys, beta, causal, log_weight)


def hopfield_step(state: Tensor, patterns: Tensor, *, tau: float = 1.0, beta: float = 1.0) -> Tensor:
    r"""Apply one step of a continuous Hopfield memory, :math:`\xi \mapsto (1 - \tau)\, \xi + \tau\, m(\xi)`.

    It lowers the energy :math:`\tfrac12 |\xi|^2 - G(\xi)` for every :math:`\tau` between 0 and 2. At :math:`\tau = 1`
    it is attention without its residual connection; :func:`hopfield_time` gives the one of residual attention.

    Args:
        state: :math:`\xi`, shape ``(..., queries, dim)``.
        patterns: shape ``(..., atoms, dim)``.
        tau: :math:`\tau`.
        beta: inverse temperature.

    Returns:
        The next state, same shape.

    Source:
        Ramsauer et al. 2020, eq. 3, is the case :math:`\tau = 1`.

    Example:
        >>> hopfield_step(torch.tensor([[0.0, 1.0]]), torch.eye(2), tau=0.5, beta=100.0)
        tensor([[0., 1.]])
    """
    check_cloud(state, "state")
    tau = check_number(tau, "tau")
    return (1 - tau) * state + tau * _attention(state, patterns, beta, False, None)


def hopfield_time(step: float, spread: float = 0.0) -> float:
    r"""Return the :math:`\tau` at which a Hopfield step is residual attention up to a factor.

    .. math:: \tau = \frac{s}{1 + s + s \sigma^2}, \qquad
              \eta + s\,(m(\eta) + \sigma^2 \eta) = (1 + s + s \sigma^2)\, [(1 - \tau)\, \eta + \tau\, m(\eta)]

    A layer norm erases the factor. The spread belongs to keys that are Gaussians of covariance :math:`\sigma^2 I`
    around the patterns.

    Args:
        step: s, not negative.
        spread: :math:`\sigma^2`, the variance of every key, not negative.

    Example:
        >>> hopfield_time(1.0), hopfield_time(1.0, spread=2.0)
        (0.5, 0.25)
    """
    step, spread = check_number(step, "step", least=0.0), check_number(spread, "spread", least=0.0)
    return step / (1 + step + step * spread)


def _attention(natural: Tensor, keys: Tensor | None, beta: float, causal: bool, log_weight: Tensor | None) -> Tensor:
    keys = natural if keys is None else keys
    scale = check_number(beta, "beta")
    return attend(natural, keys, keys, log_weight, scale=scale, causal=causal, statistics=None).output


def check_cloud(cloud: Any, name: str = "cloud", *, least: int = 0) -> None:
    """Raise unless this is a cloud ``(..., tokens, dim)`` of at least ``least`` tokens."""
    check_floating(cloud, name)
    check_shape(cloud, name, "...", "tokens", "dim")
    if cloud.shape[-2] < least or not cloud.shape[-1]:
        raise UserError(
            f"{name} must have at least {least} tokens and one coordinate, got shape {tuple(cloud.shape)};"
            " pass a larger cloud"
        )
