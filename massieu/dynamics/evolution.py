"""Evolution of a cloud of tokens under many blocks of attention and contraction, with observables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from massieu.checks import check_choice, check_count, check_number
from massieu.dynamics.contractions import CONTRACTIONS
from massieu.dynamics.maps import ascend, check_cloud
from massieu.dynamics.observables import OBSERVABLES, Observable, Regime
from massieu.statistics import attend

__all__ = ["CloudTrajectory", "Observe", "evolve", "record"]

Observe = Sequence[str] | Mapping[str, Observable]
"""Names from ``OBSERVABLES``, or functions of the cloud and its :class:`Regime` by name."""


@dataclass(frozen=True, repr=False)
class CloudTrajectory:
    """Last state and observables of a cloud.

    Attributes:
        cloud: the last cloud, shape ``(..., tokens, dim)``.
        steps: numbers of steps after which observables were recorded, the start included, shape ``(records,)``.
        observables: recorded values by name, shape ``(records, ...)``.
        regime: keys frozen or moving, causal or not, motion and contraction, in one sentence.
    """

    cloud: Tensor
    steps: Tensor
    observables: dict[str, Tensor]
    regime: str

    def __repr__(self) -> str:
        names = ", ".join(self.observables)
        size = f"{int(self.steps[-1])} steps of a cloud {tuple(self.cloud.shape)}"
        return f"CloudTrajectory({size}: {self.regime}; [{names}])"


def evolve(
    cloud: Tensor,
    *,
    steps: int,
    step: float = 1.0,
    beta: float = 1.0,
    keys: Tensor | None = None,
    causal: bool = False,
    residual: bool = True,
    contraction: str | Callable[[Tensor], Tensor] | None = None,
    observe: Observe = ("mean", "covariance", "median_distance", "entropy_logdet"),
    every: int = 1,
) -> CloudTrajectory:
    r"""Apply blocks of attention and contraction to a cloud, all tokens at once.

    .. math:: \eta_i \mapsto K(\eta_i + s\, m(\eta_i)), \quad \text{or without the residual connection} \quad
              \eta_i \mapsto K(s\, m(\eta_i))

    Args:
        cloud: the tokens, shape ``(..., tokens, dim)``.
        steps: number of blocks.
        step: s.
        beta: inverse temperature.
        keys: fixed keys, shape ``(..., atoms, dim)``; None for moving keys, which are the tokens at every step.
        causal: a token sees only the keys up to its own position.
        residual: attention is added to the token, otherwise it replaces the token.
        contraction: K, a name from ``CONTRACTIONS`` or any function of a cloud; None for the identity.
        observe: names from ``OBSERVABLES``, or a mapping of names to functions of the cloud and its :class:`Regime`.
        every: steps between two records; start and end are always recorded.

    Returns:
        The last cloud and the observables. Without a contraction clouds diverge: one that would overflow ends at its
        last finite state, and the regime says so.

    Source:
        "A Probabilistic Interpretation of Transformers", section 3.3. Frozen and moving keys behave differently:
        without the residual connection moving keys collapse to a point, if slowly, and fixed ones need not.

    Example:
        >>> cloud = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> found = evolve(cloud, steps=2, contraction="rms_norm", observe=["median_distance"])
        >>> print(found.regime)
        residual attention with step 1 at beta 1 over moving keys (the tokens themselves), not causal, then rms_norm
        >>> found.observables["median_distance"]
        tensor([1.4142, 1.8401, 1.7475])
    """
    check_cloud(cloud, least=1)
    step, beta = check_number(step, "step"), check_number(beta, "beta")
    shrink, name = _contraction(contraction)
    motion = f"residual attention with step {step:g}" if residual else f"attention without residual times {step:g}"
    regime = Regime(keys, beta, causal, motion, name)

    def move(tokens: Tensor) -> Tensor:
        if residual:
            return shrink(ascend(tokens, keys, step=step, beta=beta, causal=causal))
        atoms = tokens if keys is None else keys
        return shrink(step * attend(tokens, atoms, atoms, scale=beta, causal=causal, statistics=None).output)

    return record(move, cloud, steps=steps, regime=regime, observe=observe, every=every)


def record(
    move: Callable[[Tensor], Tensor], cloud: Tensor, *, steps: int, regime: Regime, observe: Observe, every: int
) -> CloudTrajectory:
    """Apply ``move`` for a number of steps and record observables; stop at the last finite state."""
    steps, every = check_count(steps, "steps", least=0), check_count(every, "every")
    observables = _observables(observe)
    times: list[int] = []
    records: dict[str, list[Tensor]] = {name: [] for name in observables}
    overflow = ""
    for time in range(steps + 1):
        following = move(cloud) if time < steps else cloud
        if not bool(following.isfinite().all()) and bool(cloud.isfinite().all()):
            overflow = f"; it left the range of {str(cloud.dtype).removeprefix('torch.')} after {time} steps"
        if time % every == 0 or time == steps or overflow:
            times.append(time)
            for name, observable in observables.items():
                records[name].append(observable(cloud, regime))
        if overflow:
            break
        cloud = following
    found = {name: torch.stack(values) for name, values in records.items()}
    return CloudTrajectory(cloud, torch.tensor(times), found, str(regime) + overflow)


def _contraction(contraction: str | Callable[[Tensor], Tensor] | None) -> tuple[Callable[[Tensor], Tensor], str]:
    if contraction is None:
        return (lambda cloud: cloud), "no contraction"
    if callable(contraction):
        return contraction, getattr(contraction, "__name__", type(contraction).__name__)
    check_choice(contraction, "contraction", CONTRACTIONS)
    return CONTRACTIONS[contraction], contraction


def _observables(observe: Observe) -> dict[str, Observable]:
    if isinstance(observe, Mapping):
        return dict(observe)
    names = [observe] if isinstance(observe, str) else list(observe)
    for name in names:
        check_choice(name, "observe", OBSERVABLES)
    return {name: OBSERVABLES[name] for name in names}
