"""Guarantees on the patterns of a memory before any retrieval."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from massieu.checks import UserError, check_count, check_number
from massieu.memory.continuous import Continuous
from massieu.memory.memory import Memory
from massieu.memory.sparse import Sparse

__all__ = [
    "Bound",
    "Certificate",
    "Storage",
    "certificate",
    "contraction_bound",
    "error_bound",
    "fixed_point_bound",
    "guaranteed_storage",
    "lambert_w",
    "one_step_bound",
]

TILE = 1024


@dataclass(frozen=True, repr=False)
class Certificate:
    r"""Guarantees for each pattern; the fields have shape ``(atoms,)``, with several betas ``(heads, atoms)``.

    It covers the cues inside the radius of a certified pattern (:meth:`covers`): each of them is retrieved to the fixed
    point beside that pattern. There is no guarantee for other cues. They may be retrieved as well, and may end in a
    minimum at another pattern than the intended one, or at a blend of several.

    Attributes:
        separation: :math:`\Delta_i = x_i \cdot x_i - \max_{j \ne i} x_i \cdot x_j`; infinite for a single pattern.
        radius: every state that is closer to :math:`x_i` than this is retrieved to the one fixed point of that ball;
            zero without certificate. States farther away may be retrieved as well.
        bound: largest distance of the fixed point from :math:`x_i`; zero where they are the same, infinite without
            certificate.
        certified: True if the condition of the certificate holds.
        reach: :math:`D_i = \max_j |x_j - x_i|`.
        kappa: :math:`\kappa_i`, which must be below 1/e; nan for entmax, which has a margin instead.
        margin: excess of the separation over the :math:`1 / (\beta (\alpha - 1))` at which entmax is exact; nan for
            softmax, which never is.
        ramsauer_radius: :math:`1 / (\beta N M)`, the radius of Ramsauer et al.
        ramsauer_certified: True if their condition holds; never for entmax.
        contraction: :math:`\beta\, \mathrm{diam}^2 / 4`; below one the update is a contraction with a single fixed
            point. Infinite for entmax, whose slope has another bound.
        beta: as in the memory.
        log_rivals: :math:`\log \sum_{j \ne i} w_j / w_i`, without weights :math:`\log (N - 1)`.
        longest: M.
        atoms: N, the patterns that are not masked.
        patterns: :math:`x`, shape ``(atoms, dim)``.
    """

    separation: Tensor
    radius: Tensor
    bound: Tensor
    certified: Tensor
    reach: Tensor
    kappa: Tensor
    margin: Tensor
    ramsauer_radius: Tensor
    ramsauer_certified: Tensor
    contraction: Tensor
    beta: Tensor
    log_rivals: Tensor
    longest: Tensor
    atoms: int
    patterns: Tensor

    def covers(self, cue: Tensor) -> Tensor:
        """Return True for cues closer to a certified pattern than the radius of that pattern, ``(..., queries)``.

        Args:
            cue: shape ``(..., queries, dim)``, with several betas ``(..., heads, queries, dim)``.

        Example:
            >>> found = certificate(massieu.memory.Continuous(3 * torch.eye(4), beta=1.0))
            >>> found.covers(torch.tensor([[3.0, 1.0, 0.0, 0.0], [1.5, 1.5, 0.0, 0.0]]))
            tensor([ True, False])
        """
        heads, dim = self.radius.shape[:-1], self.patterns.shape[-1]
        if cue.dim() < 2 + len(heads) or cue.shape[-1] != dim or cue.shape[-2 - len(heads) : -2] not in (heads, (1,)):
            shape = ", ".join(("...", *map(str, heads), "queries", str(dim)))
            raise UserError(f"cue must have shape ({shape}), got {tuple(cue.shape)}; for one vector pass cue[None]")
        parts = cue.detach().double().split(TILE, dim=-2)
        patterns, radius = self.patterns.detach().double(), self.radius.unsqueeze(-2)
        return torch.cat([(_distances(part, patterns) < radius).any(-1) for part in parts], -1)

    @property
    def globally_contracting(self) -> Tensor:
        """True if there is a single fixed point, to which every state is retrieved."""
        return self.contraction < 1

    def __repr__(self) -> str:
        atoms, dim = self.patterns.shape
        kinds = "" if self.radius.dim() == 1 else f" for each of {len(self.radius)} betas"
        number = int(self.certified.sum())
        title = f"Certificate of {atoms} patterns in {dim} dimensions{kinds}, {number} certified"
        if not number:
            return f"{title}; raise beta, or spread the patterns (separation is at most {self.separation.max():.3g})"
        radius, bound = self.radius[self.certified], self.bound[self.certified]
        return (
            f"{title}\nradius from {radius.min():.3g} to {radius.max():.3g}, median {radius.median():.3g};"
            f" fixed points at most {bound.max():.2g} from their patterns\n"
            "covers(cue) marks the cues inside a radius: they are retrieved to the fixed point there.\n"
            "Other cues may end elsewhere, and a minimum need not be the right pattern."
        )


class Bound(NamedTuple):
    """Upper bound; vacuous where the quantity cannot be larger anyway."""

    value: Tensor
    vacuous: Tensor


class Storage(NamedTuple):
    """Theorem 3 of Ramsauer et al.: its constant and number of patterns; vacuous if its condition fails."""

    constant: float
    patterns: float
    vacuous: bool


def certificate(memory: Memory) -> Certificate:
    r"""Certify which patterns are stored, with a lower bound of their basins.

    For softmax, with :math:`\kappa_i = \beta D_i^2 (N - 1) e^{-\beta \Delta_i} < 1/e`, every state closer to
    :math:`x_i` than

    .. math:: r_i = \frac{\Delta_i - \beta^{-1} \log(\beta (N - 1) D_i^2)}{D_i}

    converges to one fixed point, at most :math:`-W_0(-\kappa_i) / (\beta D_i)` away from :math:`x_i`. Proof: in that
    ball :math:`1 - p_i \le (N - 1) e^{-\beta (\Delta_i - D_i r)}`, the Jacobian is at most :math:`\beta D_i^2 (1 -
    p_i) < 1`, and :math:`|f - x_i| \le D_i (1 - p_i) < 1 / (\beta D_i) \le r_i`. For entmax :math:`x_i` is an exact
    fixed point if and only if :math:`\Delta_i \ge 1/(\beta (\alpha - 1))`, reached in one step from closer than
    :math:`(\Delta_i - 1/(\beta (\alpha - 1))) / D_i`.

    Log weights enter in place of N - 1, as :math:`\sum_{j \ne i} w_j / w_i`; a masked pattern has no certificate. Costs
    atoms squared times dim, in tiles.

    Args:
        memory: :class:`~massieu.memory.Continuous` or :class:`~massieu.memory.Sparse`.

    Source:
        The condition of Ramsauer et al. 2020 (lemmas A5 to A7), with ball :math:`1/(\beta N M)`, implies this one,
        and its ball is smaller.

    Example:
        >>> found = certificate(massieu.memory.Continuous(3 * torch.eye(4).double(), beta=1.0))
        >>> found.radius[0], found.ramsauer_radius[0], found.bound[0]
        (tensor(1.1811, dtype=torch.float64), tensor(0.0833, dtype=torch.float64), tensor(0.0016, dtype=torch.float64))
    """
    if not isinstance(memory, (Continuous, Sparse)):
        raise UserError(f"memory must be Continuous or Sparse, got {type(memory).__name__}; no other has a certificate")
    weights = memory.log_weight
    if weights is not None and weights.dim() > 1:
        raise UserError(f"log_weight must have shape (atoms,) for a certificate, got {tuple(weights.shape)}")
    beta = torch.as_tensor(memory.beta, dtype=torch.float64).detach()
    if beta.dim() and beta.shape[-1] != 1:
        raise UserError(
            f"beta must be a number, or one per head, (heads, 1), for a certificate, got {tuple(beta.shape)}"
        )
    patterns = memory.patterns.detach().double()
    present = memory._present({})
    separation, reach = _separations(patterns, present)
    weight = patterns.new_zeros(len(patterns)) if weights is None else weights.detach().double()
    log_rivals = _log_rivals(weight)
    longest, atoms = memory._size().detach().double(), int(present.sum())
    alpha = memory.alpha if isinstance(memory, Sparse) else 1.0
    shape = torch.broadcast_shapes(beta.shape, separation.shape)
    nothing = separation.new_full(shape, torch.nan)
    if alpha > 1:
        kappa, margin = nothing, separation - 1 / (beta * (alpha - 1))
        if bool((weight[present] != weight[present].max()).any()):
            raise UserError("log_weight must be equal where it is finite for Sparse, got different ones; mask instead")
        certified = margin >= 0
        radius = torch.where(margin.isinf() | (reach == 0), torch.inf, margin / reach)
        bound = torch.zeros_like(margin)
        ramsauer = torch.zeros(shape, dtype=torch.bool)
        contraction = torch.full_like(beta, torch.inf)
    else:
        margin = nothing
        log_kappa = beta.log() + 2 * reach.log() + log_rivals - beta * separation
        kappa = log_kappa.exp()
        certified = log_kappa < -1
        radius = torch.where(log_kappa.isneginf(), torch.inf, -log_kappa / (beta * reach))
        bound = torch.where(kappa > 0, -lambert_w(-kappa.clamp_max(math.exp(-1))) / (beta * reach), 0.0)
        rivals = 2 * max(atoms - 1, 0) * atoms * beta * longest.square()
        needed = 2 / (beta * atoms) + rivals.log() / beta
        plain = bool((weight[present] == weight[present].max()).all())
        ramsauer = (separation >= needed) & torch.as_tensor(plain)
        contraction = 0.25 * beta * torch.where(present, reach, 0.0).amax().square()
    certified = certified & present
    return Certificate(
        separation=separation,
        radius=torch.where(certified, radius, 0.0),
        bound=torch.where(certified, bound, torch.inf),
        certified=certified,
        reach=reach,
        kappa=kappa.expand(shape),
        margin=margin.expand(shape),
        ramsauer_radius=(1 / (beta * atoms * longest)).expand(shape),
        ramsauer_certified=ramsauer & present,
        contraction=contraction,
        beta=beta,
        log_rivals=log_rivals,
        longest=longest,
        atoms=atoms,
        patterns=memory.patterns.detach(),
    )


def _distances(cue: Tensor, patterns: Tensor) -> Tensor:
    # By differences: a product of large numbers has too few digits to compare with a radius.
    return torch.cdist(cue, patterns, compute_mode="donot_use_mm_for_euclid_dist")


def one_step_bound(found: Certificate, distance: float | Tensor) -> Bound:
    r"""Bound the distance from :math:`x_i` after one update of softmax by the distance before.

    .. math:: |f(\xi) - x_i| \le D_i \min(1,\; (N - 1)\, e^{-\beta (\Delta_i - D_i r)}), \qquad |\xi - x_i| \le r

    Args:
        found: the certificate of a :class:`~massieu.memory.Continuous` memory.
        distance: r, a number or shape ``(atoms,)``.

    Source:
        Theorem 5 of Ramsauer et al. 2020 with :math:`D_i` in place of 2M, and without the distance of the fixed point.

    Example:
        >>> found = certificate(massieu.memory.Continuous(3 * torch.eye(4).double(), beta=1.0))
        >>> one_step_bound(found, 0.5).value[0]
        tensor(0.0131, dtype=torch.float64)
    """
    _check_softmax(found)
    log_missing = found.log_rivals - found.beta * (found.separation - found.reach * distance)
    value = found.reach * log_missing.exp()
    return Bound(torch.where(log_missing < 0, value, found.reach), log_missing >= 0)


def contraction_bound(found: Certificate, distance: float | Tensor, fixed_distance: float | Tensor) -> Bound:
    r"""Bound the factor by which an update shrinks the distance to the fixed point: theorem 4 of Ramsauer et al.

    .. math:: |f(\xi) - x_i^*| \le c\, |\xi - x_i^*|, \qquad
              c = 2 \beta N M^2 (N - 1)\, e^{-\beta (\Delta_i - 2 M \max(|\xi - x_i|, |x_i^* - x_i|))}

    Args:
        found: the certificate of a :class:`~massieu.memory.Continuous` memory without log weights.
        distance: :math:`|\xi - x_i|`.
        fixed_distance: :math:`|x_i^* - x_i|`, or an upper bound such as ``found.bound``.

    Returns:
        The factor c; vacuous from one on.
    """
    farthest = _farthest(found, distance, fixed_distance)
    factor = 2 * found.beta * found.atoms * found.longest.square() * (found.atoms - 1)
    value = factor * (-found.beta * (found.separation - 2 * found.longest * farthest)).exp()
    return Bound(value, value >= 1)


def error_bound(found: Certificate, distance: float | Tensor, fixed_distance: float | Tensor) -> Bound:
    r"""Bound the error after one update: theorem 5 of Ramsauer et al.; :func:`one_step_bound` is never larger.

    .. math:: |f(\xi) - x_i| \le 2 M (N - 1)\, e^{-\beta (\Delta_i - 2 M \max(|\xi - x_i|, |x_i^* - x_i|))}

    Arguments as for :func:`contraction_bound`. Vacuous where it is not below the reach :math:`D_i`.
    """
    farthest = _farthest(found, distance, fixed_distance)
    lead = found.separation - 2 * found.longest * farthest
    value = 2 * found.longest * (found.atoms - 1) * (-found.beta * lead).exp()
    return Bound(torch.minimum(value, found.reach), _vacuous(value, found))


def fixed_point_bound(found: Certificate) -> Bound:
    r"""Bound the distance of the fixed point from its pattern: second part of theorem 5 of Ramsauer et al.

    .. math:: |x_i^* - x_i| \le 2 e (N - 1) M e^{-\beta \Delta_i}

    if the fixed point is within :math:`1 / (2 \beta M)`; vacuous where ``found.bound`` does not guarantee that.
    """
    _check_softmax(found)
    value = 2 * math.e * (found.atoms - 1) * found.longest * (-found.beta * found.separation).exp()
    outside = ~(found.bound <= 1 / (2 * found.beta * found.longest))
    return Bound(torch.minimum(value, found.reach), outside | _vacuous(value, found))


def guaranteed_storage(dim: int, *, beta: float = 1.0, radius: float = 1.0, failure: float = 0.001) -> Storage:
    r"""Return the number of random patterns on a sphere stored with probability 1 - p: theorem 3 of Ramsauer et al.

    .. math:: N \ge \sqrt p\, c^{(d - 1)/4}, \quad c = \frac{b}{W_0(e^{a + \ln b})}, \quad
              a = \tfrac{2}{d - 1} (1 + \ln(2 \beta K^2 p (d - 1))), \quad b = \tfrac25 K^2 \beta

    if :math:`c \ge (2/\sqrt p)^{4/(d - 1)}`.

    Args:
        dim: d, at least 2.
        beta: inverse temperature.
        radius: K; the sphere has radius :math:`K \sqrt{d - 1}`.
        failure: p.

    Example:
        >>> found = guaranteed_storage(20, radius=3.0)  # the example of the paper: seven patterns
        >>> round(found.constant, 4), round(found.patterns, 2), found.vacuous
        (3.1546, 7.41, False)
    """
    check_count(dim, "dim", least=2)
    check_number(beta, "beta", above=0)
    check_number(radius, "radius", above=0)
    check_number(failure, "failure", above=0, below=1)
    # In logarithms: the number of patterns overflows long before its constant.
    strength = math.log(beta) + 2 * math.log(radius)
    a = 2 / (dim - 1) * (1 + math.log(2 * failure * (dim - 1)) + strength)
    log_b = math.log(0.4) + strength
    log_constant = log_b - _log_lambert_w(a + log_b)
    log_patterns = 0.5 * math.log(failure) + 0.25 * (dim - 1) * log_constant
    vacuous = log_constant < 4 / (dim - 1) * (math.log(2) - 0.5 * math.log(failure))
    return Storage(_exponential(log_constant), _exponential(log_patterns), vacuous)


def lambert_w(x: Tensor) -> Tensor:
    r"""Return the branch :math:`W_0` of the inverse of :math:`w e^w`, for x of at least -1/e.

    Example:
        >>> lambert_w(torch.tensor([1.0]))
        tensor([0.5671])
    """
    wide = x.double()
    root = (2 * (math.e * wide + 1).clamp_min(0.0)).sqrt()
    start = torch.where(wide < 0, -1 + root - root.square() / 3, torch.log1p(wide.clamp_min(0.0)))
    w = torch.where(wide > math.e, start - start.clamp_min(1.0).log(), start)
    for _ in range(20):
        error = w * w.exp() - wide
        slope = w.exp() * (w + 1)
        step = error / (slope - (w + 2) * error / (2 * w + 2))
        w = w - torch.where(step.isfinite(), step, 0.0)  # at the branch point the first guess is exact
    return torch.where(wide < -math.exp(-1) * (1 + 1e-15), torch.nan, w).to(x.dtype)


def _log_lambert_w(log_x: float) -> float:
    """Return the logarithm of :math:`W_0(x)` for any positive x, from its logarithm."""
    if log_x < -40:
        return log_x
    if log_x < 500:
        return math.log(float(lambert_w(torch.tensor(math.exp(log_x), dtype=torch.float64))))
    w = log_x - math.log(log_x)
    for _ in range(5):  # Newton steps for w + log w = log x
        w -= (w + math.log(w) - log_x) / (1 + 1 / w)
    return math.log(w)


def _exponential(exponent: float) -> float:
    return math.exp(exponent) if exponent < 709 else math.inf


def _separations(patterns: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Return separation and reach of every pattern, by tiles of the Gram matrix; nan for masked patterns."""
    squares = patterns.square().sum(-1)
    rival, reach = torch.full_like(squares, -torch.inf), torch.zeros_like(squares)
    for start in range(0, len(patterns), TILE):
        rows = slice(start, start + TILE)
        for first in range(0, len(patterns), TILE):
            columns = slice(first, first + TILE)
            inner = patterns[rows] @ patterns[columns].T
            distance = (squares[rows, None] + squares[columns] - 2 * inner).masked_fill(~present[columns], 0.0)
            inner = inner.masked_fill(~present[columns], -torch.inf)
            if first == start:
                inner.fill_diagonal_(-torch.inf)
                distance.fill_diagonal_(0.0)
            rival[rows] = torch.maximum(rival[rows], inner.amax(-1))
            reach[rows] = torch.maximum(reach[rows], distance.amax(-1))
    # Squared distances have the rounding of the squares; larger is safe.
    slack = 4 * torch.finfo(torch.float64).eps * squares.amax()
    reach = torch.where(reach > slack, (reach + slack).sqrt(), _exact_reach(patterns, present, reach <= slack))
    separation = squares - rival
    return separation.masked_fill(~present, torch.nan), reach.masked_fill(~present, torch.nan)


def _exact_reach(patterns: Tensor, present: Tensor, wanted: Tensor) -> Tensor:
    """Return the reach by differences, for patterns that are almost the same."""
    reach = torch.zeros_like(patterns[:, 0])
    for row in wanted.nonzero()[:, 0].tolist():
        reach[row] = (patterns[present] - patterns[row]).norm(dim=-1).amax()
    return reach


def _log_rivals(weight: Tensor) -> Tensor:
    """Return the logarithm of the total weight of the others over the own, for log weights ``(atoms,)``."""
    count = len(weight)
    shifted = weight - weight.max()
    share = shifted.exp()
    # Sums before and after, not a difference: an atom may have nearly all of the weight.
    before = torch.cat([share.new_zeros(1), share.cumsum(0)[: count - 1]])
    after = torch.cat([share.flip(0).cumsum(0).flip(0)[1:], share.new_zeros(1)])
    return (before + after).log() - shifted


def _farthest(found: Certificate, distance: float | Tensor, fixed_distance: float | Tensor) -> Tensor:
    _check_softmax(found)
    first, second = torch.as_tensor(distance, dtype=torch.float64), torch.as_tensor(fixed_distance, dtype=torch.float64)
    return torch.maximum(first, second)


def _vacuous(value: Tensor, found: Certificate) -> Tensor:
    """Return True if a bound is not below the reach; a bound of zero, as with a single pattern, is not vacuous."""
    return (value >= found.reach) & (value > 0)


def _check_softmax(found: Certificate) -> None:
    if bool(found.contraction.isinf().any()):
        raise UserError("found must be the certificate of a Continuous memory, got that of entmax; see its margin")
