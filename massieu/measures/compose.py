"""Measures made of measures: mixtures, convolutions (tied multi-head attention) and tilts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from massieu.checks import UserError
from massieu.measures.measure import Measure, as_log_weight, as_parameter, common_batch
from massieu.measures.remainders import mixture_remainder
from massieu.statistics import probabilities

__all__ = ["Convolution", "Mixture", "Tilted"]


class Mixture(Measure):
    r"""A weighted sum of measures, :math:`h = \sum_n w_n h_n`: attention over distributions.

    .. math:: G = \log \sum_n w_n e^{G_n}, \qquad m = \sum_n r_n m_n, \qquad r_n \propto w_n e^{G_n}

    Args:
        log_weight: :math:`\log w_n`, shape ``(components,)``.
        measures: the components, all of one dimension.

    Example:
        >>> from massieu import Gaussian
        >>> sides = [Gaussian(torch.tensor([side]), torch.eye(1)) for side in (-1.0, 1.0)]
        >>> Mixture(torch.zeros(2), sides).mean(torch.tensor([[0.5]]))
        tensor([[0.9621]])
    """

    def __init__(self, log_weight: Tensor, measures: Sequence[Measure]) -> None:
        self.measures = tuple(measures)
        dims = sorted({measure.dim for measure in self.measures})
        if len(dims) != 1:
            raise UserError(f"measures must be at least one, all of one dim, got dims {dims}; map them to one space")
        self.dim = dims[0]
        components = len(self.measures)
        self.log_weight = as_log_weight(log_weight, components, flat=True).expand(components)
        self.batch_shape = common_batch(*(measure.batch_shape for measure in self.measures))
        self.domain = "the natural domain of every component"
        self.start = common_start(self, [torch.as_tensor(measure.start) for measure in self.measures])

    def log_normalizer(self, natural: Tensor) -> Tensor:
        natural = self.expect(natural)
        return torch.logsumexp(self.log_weight.to(natural) + self._potentials(natural), -1)

    def mean(self, natural: Tensor) -> Tensor:
        share, means = self._components(self.expect(natural))
        return torch.einsum("...qn,...qnd->...qd", share, means)

    def fisher(self, natural: Tensor) -> Tensor:
        natural = self.expect(natural)
        share, means = self._components(natural)
        centered = means - torch.einsum("...qn,...qnd->...qd", share, means)[..., None, :]
        within = torch.stack([measure.fisher(natural) for measure in self.measures], -3)
        return (share[..., None, None] * within).sum(-3) + (share[..., None] * centered).mT @ centered

    def remainder(self, natural: Tensor, step: Tensor) -> Tensor:
        natural = self.expect(natural)
        _, means = self._components(natural)
        within = torch.stack([measure.remainder(natural, step) for measure in self.measures], -1)
        log_share = torch.log_softmax(self.log_weight.to(natural) + self._potentials(natural), -1)
        return mixture_remainder(log_share, (means * step[..., None, :]).sum(-1), within)

    def contains(self, natural: Tensor) -> Tensor:
        return torch.stack(torch.broadcast_tensors(*(m.contains(natural) for m in self.measures))).all(0)

    def _draw(self, natural: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
        share, _ = self._components(self.expect(natural))
        drawn = torch.multinomial(share.flatten(0, -2), count, replacement=True, generator=generator)
        drawn = drawn.reshape(*share.shape[:-1], count).movedim(-1, 0)
        every = torch.stack([measure.sample(natural, count, generator) for measure in self.measures])
        return torch.take_along_dim(every, drawn[None, ..., None], dim=0)[0]

    def support_function(self, direction: Tensor) -> Tensor:
        reaches = [measure.support_function(direction) for measure in self.measures]
        reach = torch.stack(torch.broadcast_tensors(*reaches), -1)
        return reach.masked_fill(self.log_weight == -torch.inf, -torch.inf).amax(-1)

    def _potentials(self, natural: Tensor) -> Tensor:
        return torch.stack([measure.log_normalizer(natural) for measure in self.measures], -1)

    def _components(self, natural: Tensor) -> tuple[Tensor, Tensor]:
        means = torch.stack([measure.mean(natural) for measure in self.measures], -2)
        return probabilities(self._potentials(natural), self.log_weight.to(natural)), means


class Convolution(Measure):
    r"""Law of :math:`\sum_h A_h x^{(h)}` for independent heads: tied multi-head attention as one measure.

    .. math:: G(\eta) = \sum_h G_h(A_h^\top \eta), \qquad m(\eta) = \sum_h A_h m_h(A_h^\top \eta)

    Args:
        maps: :math:`A_h`, each of shape ``(dim, dim_h)``.
        measures: the measure of each head, on :math:`R^{dim_h}`.

    Source:
        Section 5 of "A Probabilistic Interpretation of Transformers" leaves multi-head attention open; it is a gradient
        field if each head's output map is a multiple of its query map.

    Example:
        >>> from massieu import Points
        >>> heads = [Points(torch.tensor([[0.0], [1.0]])) for _ in range(2)]
        >>> Convolution(list(torch.eye(2)[..., None]), heads).mean(torch.zeros(1, 2))
        tensor([[0.5000, 0.5000]])
    """

    domain = "the points that every map takes into the natural domain of its measure"

    def __init__(self, maps: Sequence[Tensor], measures: Sequence[Measure]) -> None:
        self.maps = tuple(as_parameter(matrix, "maps") for matrix in maps)
        self.measures = tuple(measures)
        shapes = [tuple(matrix.shape) for matrix in self.maps]
        dims = [measure.dim for measure in self.measures]
        rows = {shape[0] for shape in shapes if shape}
        if len(rows) != 1 or [shape[1:] for shape in shapes] != [(dim,) for dim in dims]:
            raise UserError(
                f"maps must have shapes (dim, dim_h) with dim_h = {dims}, one per measure, got {shapes};"
                " transpose the maps of the other direction"
            )
        self.dim = shapes[0][0]
        self.batch_shape = common_batch(*(measure.batch_shape for measure in self.measures))
        every = torch.cat([a.double() for a in self.maps], -1)
        starts = [torch.as_tensor(measure.start).double().expand(measure.dim) for measure in self.measures]
        self.start = common_start(self, [torch.linalg.pinv(every.mT) @ torch.cat(starts)])

    def log_normalizer(self, natural: Tensor) -> Tensor:
        natural = self.expect(natural)
        return torch.stack([measure.log_normalizer(natural @ a) for a, measure in self._heads(natural)]).sum(0)

    def mean(self, natural: Tensor) -> Tensor:
        natural = self.expect(natural)
        return torch.stack([measure.mean(natural @ a) @ a.mT for a, measure in self._heads(natural)]).sum(0)

    def fisher(self, natural: Tensor) -> Tensor:
        natural = self.expect(natural)
        return torch.stack([a @ measure.fisher(natural @ a) @ a.mT for a, measure in self._heads(natural)]).sum(0)

    def remainder(self, natural: Tensor, step: Tensor) -> Tensor:
        natural = self.expect(natural)
        return torch.stack([measure.remainder(natural @ a, step @ a) for a, measure in self._heads(natural)]).sum(0)

    def contains(self, natural: Tensor) -> Tensor:
        return torch.stack([measure.contains(natural @ a) for a, measure in self._heads(natural)]).all(0)

    def _draw(self, natural: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
        natural = self.expect(natural)
        draws = [measure.sample(natural @ a, count, generator) @ a.mT for a, measure in self._heads(natural)]
        return torch.stack(draws).sum(0)

    def support_function(self, direction: Tensor) -> Tensor:
        reaches = [measure.support_function(direction @ a) for a, measure in self._heads(direction)]
        return torch.stack(torch.broadcast_tensors(*reaches)).sum(0)

    def _heads(self, natural: Tensor) -> list[tuple[Tensor, Measure]]:
        return [(a.to(natural), measure) for a, measure in zip(self.maps, self.measures, strict=True)]


class Tilted(Measure):
    r"""A member :math:`p_{\eta_0}` of a family as an intrinsic measure of its own: tilts add up.

    .. math:: G(\eta) = G_0(\eta_0 + \eta) - G_0(\eta_0), \qquad m(\eta) = m_0(\eta_0 + \eta)

    Args:
        measure: the family.
        natural: :math:`\eta_0`, shape ``(dim,)`` or ``(..., queries, dim)``.

    Source:
        "A Probabilistic Interpretation of Transformers", Proposition 1b, with the misprints of its appendix corrected:
        the exponent of eq. 1 is :math:`x \cdot (\eta_1 + \eta)` and the mean is taken under :math:`p_0`.

    Example:
        >>> from massieu import Poisson
        >>> Tilted(Poisson(1.0), torch.tensor([1.0])).mean(torch.tensor([[-1.0]]))
        tensor([[1.]])
    """

    def __init__(self, measure: Measure, natural: Tensor) -> None:
        self.measure = measure
        natural = as_parameter(natural, "natural")
        self.natural = measure.expect(natural[None] if natural.dim() == 1 else natural)
        self.dim = measure.dim
        self.batch_shape = common_batch(measure.batch_shape, tuple(self.natural.shape[:-2]))
        self.reference = measure.reference
        self.domain = f"{measure.domain}, moved by minus the tilt"

    def log_normalizer(self, natural: Tensor) -> Tensor:
        shifted, own = self._shifted(natural)
        return self.measure.log_normalizer(shifted) - self.measure.log_normalizer(own)

    def mean(self, natural: Tensor) -> Tensor:
        return self.measure.mean(self._shifted(natural)[0])

    def fisher(self, natural: Tensor) -> Tensor:
        return self.measure.fisher(self._shifted(natural)[0])

    def remainder(self, natural: Tensor, step: Tensor) -> Tensor:
        return self.measure.remainder(self._shifted(natural)[0], step)

    def expected_log_density(self, natural: Tensor) -> Tensor:
        shifted, own = self._shifted(natural)
        linear = (own * self.measure.mean(shifted)).sum(-1) - self.measure.log_normalizer(own)
        return self.measure.expected_log_density(shifted) + linear

    def tilt(self, natural: Tensor) -> Measure:
        return Tilted(self.measure, self.natural.to(natural) + natural)

    def contains(self, natural: Tensor) -> Tensor:
        return self.measure.contains(natural + self.natural.to(natural))

    def _draw(self, natural: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
        return self.measure.sample(self._shifted(natural)[0], count, generator)

    def support_function(self, direction: Tensor) -> Tensor:
        return self.measure.support_function(direction)

    def affine_span(self, at: Tensor | None = None) -> Tensor:
        return self.measure.affine_span(None if at is None else self._shifted(at)[0])

    def _shifted(self, natural: Tensor) -> tuple[Tensor, Tensor]:
        natural = self.expect(natural)
        own = self.natural.to(natural)
        return natural + own, own

    def __repr__(self) -> str:
        return f"Tilted({self.measure!r})"


def common_start(measure: Measure, points: Sequence[Tensor]) -> Tensor:
    """Return zero if the natural domain contains it, else the first point, or the mean of all, in the domain."""
    every = torch.stack([point.detach().double().expand(measure.dim) for point in points])
    tried = torch.cat([torch.zeros_like(every[:1]), every, every.mean(0, keepdim=True)])
    inside = [bool(measure.contains(point[None]).all()) for point in tried]
    return tried[inside.index(True)] if True in inside else tried[0]
