"""Memory by similarity, in which only the observed coordinates count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from massieu.checks import UserError, check_choice
from massieu.memory.continuous import WARM
from massieu.memory.memory import Conditions, Retrieval, as_mask, row_chunks
from massieu.memory.soft import Soft, check_scores
from massieu.statistics import probabilities

__all__ = ["Kernel"]

NEGLIGIBLE = 1e-20
"""Share of the largest weight below which a pattern has no part in a derivative."""

PIECE_NUMBERS = 1 << 22
"""Differences of states and patterns are formed for this many numbers at a time."""


class Kernel(Soft):
    r"""Memory that compares by a similarity of states and patterns, over the coordinates that were observed.

    .. math:: E(\xi) = -\beta^{-1} \log \sum_j \frac{w_j}{\sum w} e^{\beta s(\xi, x_j)}, \qquad
              f(\xi) = \sum_j p_j x_j, \quad p_j \propto w_j e^{\beta s(\xi, x_j)}

    with s one of ``"l2"``: :math:`-\tfrac12 \sum_l o_l (\xi_l - x_{jl})^2`, ``"l1"``:
    :math:`-\sum_l o_l |\xi_l - x_{jl}|`, ``"cosine"``: the cosine of the observed parts (zero if one of them is zero).
    The mask o marks the observed coordinates; by default all. The value of any other coordinate has no influence on the
    result: it is filled in from the patterns that agree elsewhere. Zeros in place of the unknown would count as data.

    With ``"l2"`` an update is a mean-shift step and lowers the energy by at least half the square of its observed part;
    the other two similarities come without such a guarantee, and "minimum" then says that the update attracts.

    Args:
        patterns: :math:`x_j`, shape ``(atoms, dim)``.
        similarity: "l2", "l1" or "cosine".
        beta: as for :class:`~massieu.memory.Continuous`.
        values: as for :class:`~massieu.memory.Continuous`.
        log_weight: as for :class:`~massieu.memory.Continuous`.

    Source:
        Millidge et al. 2022, "Universal Hopfield networks", without masks.

    Example:
        >>> memory = Kernel(torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 5.0]]), "l2", beta=50.0)
        >>> cue, observed = torch.tensor([[1.0, 2.0, 0.0]]), torch.tensor([[True, True, False]])
        >>> memory.retrieve(cue, observed=observed).state
        tensor([[1., 2., 3.]])
    """

    def __init__(
        self,
        patterns: Tensor,
        similarity: Literal["l2", "l1", "cosine"] = "l2",
        beta: float | Tensor = 1.0,
        *,
        values: Tensor | None = None,
        log_weight: Tensor | None = None,
    ) -> None:
        super().__init__(patterns, beta, values, log_weight)
        check_choice(similarity, "similarity", SIMILARITIES)
        self.similarity = similarity

    def energy(self, state: Tensor, *, observed: Tensor | None = None) -> Tensor:
        """As :meth:`Memory.energy`; ``observed`` is boolean and broadcasts to the state."""
        rows, shape, conditions = self._arrange_observed(state, observed)
        return self._energy(rows, **conditions).reshape(shape)

    def update(self, state: Tensor, *, observed: Tensor | None = None) -> Tensor:
        """As :meth:`Memory.update`; ``observed`` is boolean and broadcasts to the state."""
        rows, shape, conditions = self._arrange_observed(state, observed)
        return self._move(rows, 0, None, **conditions).reshape(*shape, self.dim)

    def read(self, state: Tensor, *, observed: Tensor | None = None) -> Tensor:
        """As :meth:`Soft.read`; ``observed`` is boolean and broadcasts to the state."""
        rows, shape, conditions = self._arrange_observed(state, observed)
        values = self.patterns if self.values is None else self.values
        return self._read(rows, values, **conditions).reshape(*shape, values.shape[-1])

    def retrieve(
        self,
        state: Tensor,
        *,
        steps: int = 100,
        tolerance: float | None = None,
        clamp: Tensor | None = None,
        observed: Tensor | None = None,
    ) -> Retrieval:
        """As :meth:`Memory.retrieve`; ``observed`` is boolean and broadcasts to the state.

        Observed coordinates move like the others, toward the patterns; ``clamp=observed`` holds them.
        """
        return self._settle(*self._arrange_observed(state, observed), steps, tolerance, clamp)

    def _arrange_observed(self, state: Tensor, observed: Tensor | None) -> tuple[Tensor, tuple[int, ...], Conditions]:
        rows, shape, conditions = self._arrange(state)
        if observed is not None:
            mask = as_mask(observed, "observed", (*shape, self.dim)).reshape(-1, self.dim)
            if not bool(mask.any(-1).all()):
                raise UserError("observed must leave one coordinate in each row to compare, got a row without any")
            conditions["observed"] = mask
        return rows, shape, conditions

    def _energy(self, rows: Tensor, **conditions: Tensor) -> Tensor:
        offsets = self._weights(rows.double(), conditions)
        energy = self._by_chunks(rows, conditions, lambda scores, beta, chunk: -_log_mean(scores, beta, offsets, chunk))
        return energy.to(rows.dtype)

    def _read(self, rows: Tensor, values: Tensor, **conditions: Tensor) -> Tensor:
        values = values.to(rows)
        return self._by_weights(rows, conditions, lambda weight, chunk: weight.to(rows) @ values)

    def _peak(self, rows: Tensor, **conditions: Tensor) -> Tensor:
        return self._by_weights(rows, conditions, lambda weight, chunk: weight.amax(-1))

    def _index(self, rows: Tensor, **conditions: Tensor) -> Tensor:
        offsets = self._weights(rows.double(), conditions)
        return self._by_chunks(
            rows, conditions, lambda scores, beta, chunk: _weighted(beta * scores, offsets, chunk).argmax(-1)
        )

    def _growth(self, rows: Tensor, held: Tensor | None, **conditions: Tensor) -> Tensor:
        beta = self._beta(rows.double(), conditions).expand(len(rows), 1)[:, 0]
        observed, slopes = conditions.get("observed"), SLOPES[self.similarity]

        def growth(weight: Tensor, chunk: slice) -> Tensor:
            found = weight.new_zeros(len(weight))
            for place, (own, state) in enumerate(zip(weight, rows[chunk], strict=True)):
                kept = own > NEGLIGIBLE * own.max()
                if int(kept.sum()) < 2:
                    continue
                seen = torch.ones_like(state, dtype=torch.bool) if observed is None else observed[chunk][place]
                free = seen if held is None else seen & ~held[chunk][place]
                patterns, root = self.patterns[kept].double(), own[kept, None].sqrt()
                slope = slopes(torch.where(seen, state.double(), 0.0), torch.where(seen, patterns, 0.0))
                first, second = ((root * (x - (root.square() * x).sum(0)))[:, free] for x in (patterns, slope))
                warmth = beta[chunk][place].sqrt()
                found[place] = _radius(warmth * first, warmth * second)
            return found

        return self._by_weights(rows, conditions, growth)

    def _by_weights(self, rows: Tensor, conditions: Conditions, reduce: Callable[[Tensor, slice], Tensor]) -> Tensor:
        """Return ``reduce`` of weights and slice of each chunk of rows, concatenated."""
        offsets = self._weights(rows.double(), conditions)

        def weigh(scores: Tensor, beta: Tensor, chunk: slice) -> Tensor:
            return reduce(probabilities(_weighted(beta * scores, offsets, chunk)), chunk)

        return self._by_chunks(rows, conditions, weigh)

    def _by_chunks(
        self, rows: Tensor, conditions: Conditions, reduce: Callable[[Tensor, Tensor, slice], Tensor]
    ) -> Tensor:
        """Return ``reduce`` of similarities, betas and slice of each chunk of rows, in double, concatenated."""
        wide, observed, found = rows.double(), conditions.get("observed"), []
        beta, compare = self._beta(wide, conditions).expand(len(rows), 1), SIMILARITIES[self.similarity]
        for chunk in row_chunks(max(1, len(rows)), len(self.patterns)):
            own, seen = wide[chunk], None if observed is None else observed[chunk].to(wide)
            if observed is not None:  # other coordinates may hold any number, even one whose square overflows
                own = torch.where(observed[chunk], own, 0.0)
            scores = compare(own, self.patterns, seen)
            check_scores(beta[chunk] * scores)
            found.append(reduce(scores, beta[chunk], chunk))
        return torch.cat(found)


def _weighted(scores: Tensor, offsets: Tensor | None, chunk: slice) -> Tensor:
    return scores if offsets is None else scores + (offsets if offsets.dim() == 1 else offsets[chunk])


def _log_mean(scores: Tensor, beta: Tensor, offsets: Tensor | None, chunk: slice) -> Tensor:
    """Return the logarithm of the weighted mean of exponentials of beta times the scores, over beta."""
    own = scores.new_zeros(scores.shape[-1]) if offsets is None else offsets if offsets.dim() == 1 else offsets[chunk]
    cold = ((beta * scores + own).logsumexp(-1) - own.logsumexp(-1)) / beta[:, 0]
    exponent = beta * scores
    warm = exponent.detach().abs().amax(-1) < WARM
    if not bool(warm.any()):
        return cold
    # At small beta that is a difference of almost equal numbers over almost zero; this is not.
    exponent = torch.where(warm[:, None], exponent, 0.0)
    mean = (own.softmax(-1) * scores * _quotient(exponent, torch.expm1, 1 / 2, 1 / 6)).sum(-1)
    total = torch.where(warm, beta[:, 0] * mean, 0.0)
    return torch.where(warm, mean * _quotient(total, torch.log1p, -1 / 2, 1 / 3), cold)


def _quotient(x: Tensor, function: Callable[[Tensor], Tensor], first: float, second: float) -> Tensor:
    """Return function(x) / x, by its series 1 + first x + second x² near zero."""
    small = x.detach().abs() < 1e-6
    safe = torch.where(small, 1.0, x)
    return torch.where(small, 1 + x * (first + second * x), function(safe) / safe)


def _radius(first: Tensor, second: Tensor) -> Tensor:
    """Return the spectral radius of a product of matrices (atoms, dim), or an upper bound if that is below one."""
    largest: Tensor = first.norm() * second.norm()
    if largest < 0.99:
        return largest
    # The product has the same eigenvalues in either order, apart from zeros: the smaller one is enough.
    jacobian = second @ first.T if len(first) < first.shape[1] else second.T @ first
    power = jacobian
    for doublings in range(4):  # norms of powers are bounds too, and cost less than eigenvalues
        largest = power.norm() ** 0.5**doublings
        if largest < 0.99:
            return largest
        power = power @ power
    symmetric = torch.equal(first, second)
    largest = torch.linalg.eigvalsh(jacobian)[-1] if symmetric else torch.linalg.eigvals(jacobian).abs().max()
    return largest


def _l2(state: Tensor, patterns: Tensor, observed: Tensor | None) -> Tensor:
    return -0.5 * _sum_of_differences(state, patterns, observed, torch.square)


def _l1(state: Tensor, patterns: Tensor, observed: Tensor | None) -> Tensor:
    return -_sum_of_differences(state, patterns, observed, torch.abs)


def _cosine(state: Tensor, patterns: Tensor, observed: Tensor | None) -> Tensor:
    seen = torch.ones_like(state) if observed is None else observed
    state, patterns = _reduced(state * seen), _reduced(patterns.double())
    lengths = state.square().sum(-1, keepdim=True).sqrt(), (seen @ patterns.square().T).sqrt()
    first, second = (torch.where(length > 0, length, 1.0) for length in lengths)
    return state / first @ patterns.T / second


def _reduced(vectors: Tensor) -> Tensor:
    """Scale vectors to a largest entry of one, so that squares stay in range."""
    largest = vectors.detach().abs().amax(-1, keepdim=True)
    return vectors / torch.where(largest > 0, largest, 1.0)


def _l2_slopes(state: Tensor, patterns: Tensor) -> Tensor:
    return patterns  # up to a term that is the same for all


def _l1_slopes(state: Tensor, patterns: Tensor) -> Tensor:
    return (patterns - state).sign()


def _cosine_slopes(state: Tensor, patterns: Tensor) -> Tensor:
    length = state.norm()
    if length == 0:
        return torch.zeros_like(patterns)
    unit, others = state / length, torch.nn.functional.normalize(_reduced(patterns), dim=-1)
    slopes: Tensor = (others - (others @ unit)[:, None] * unit) / length
    return slopes


def _sum_of_differences(
    state: Tensor, patterns: Tensor, observed: Tensor | None, size: Callable[[Tensor], Tensor]
) -> Tensor:
    """Sum the size of differences over coordinates: without the cancellation of squares of sums."""
    width = max(1, PIECE_NUMBERS // max(1, state.numel()))
    pieces = []
    for atoms in patterns.split(width):
        sizes = size(state[:, None] - atoms.double())
        pieces.append(sizes.sum(-1) if observed is None else torch.einsum("qnd,qd->qn", sizes, observed))
    return torch.cat(pieces, -1)


SIMILARITIES: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {"l2": _l2, "l1": _l1, "cosine": _cosine}

SLOPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"l2": _l2_slopes, "l1": _l1_slopes, "cosine": _cosine_slopes}
"""Derivatives of the similarities of one state with all patterns, shape ``(atoms, dim)``."""
