"""Two identities of the theory over random inputs: several tied heads are one measure, and a gap is a divergence."""

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from massieu import Convolution, GaussianMixture, Points

FEW = settings(max_examples=30, deadline=None)


def normals(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@FEW
@given(
    seed=st.integers(0, 2**32),
    dim=st.integers(1, 5),
    heads=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=3),
    size=st.floats(0.01, 5.0),
)
def test_tied_heads_are_the_convolution_of_their_measures(seed, dim, heads, size):
    """Attention over every sum of one atom of each head, written out, against the sum of the heads."""
    atoms = [normals(seed + number, count, width) for number, (count, width) in enumerate(heads)]
    maps = [normals(seed + 100 + number, dim, width) for number, (_, width) in enumerate(heads)]
    natural = size * normals(seed + 200, 3, dim)
    together = Convolution(maps, [Points(own) for own in atoms])
    images = [own @ map_.T for own, map_ in zip(atoms, maps, strict=True)]
    sums = torch.stack([torch.stack(chosen).sum(0) for chosen in itertools.product(*images)])
    scores = natural @ sums.T
    assert_close(together.log_normalizer(natural), scores.logsumexp(-1), rtol=1e-10, atol=1e-10)
    assert_close(together.mean(natural), scores.softmax(-1) @ sums, rtol=1e-9, atol=1e-9)
    # The control: outputs that are not tied to what the heads read are no gradient of this potential.
    if sum(count for count, _ in heads) > len(heads):
        untied = sum(Points(own).mean(natural @ map_) @ (2 * map_).T for own, map_ in zip(atoms, maps, strict=True))
        assert not torch.allclose(untied, scores.softmax(-1) @ sums, rtol=1e-6, atol=1e-9)


@FEW
@given(seed=st.integers(0, 2**32), dim=st.integers(1, 4), components=st.integers(1, 6), size=st.floats(0.01, 4.0))
def test_the_gap_of_jensens_bound_is_a_divergence(seed, dim, components, size):
    """Log Z minus the bound against the divergence of the prior weights from the posterior ones, written out."""
    weight = normals(seed, components).log_softmax(0)
    roots, places = normals(seed + 1, components, dim, dim), normals(seed + 2, components, dim)
    covariances = roots @ roots.mT + 0.1 * torch.eye(dim, dtype=torch.float64)
    natural = size * normals(seed + 3, 5, dim)
    mixture = GaussianMixture(weight, places, covariances)
    each = natural @ places.T + 0.5 * torch.einsum("qd,nde,qe->qn", natural, covariances, natural)
    posterior = (weight + each).log_softmax(-1)
    divergence = (weight.exp() * (weight - posterior)).sum(-1)
    gap = mixture.log_normalizer(natural) - mixture.lower_bound(natural)
    assert_close(gap, divergence, rtol=1e-9, atol=1e-9)
    assert bool((gap > -1e-9).all())
    backward = (posterior.exp() * (posterior - weight)).sum(-1)  # the other order is another number
    if components > 1 and float(divergence.max()) > 0.1:
        assert not torch.allclose(gap, backward, rtol=1e-6)


def test_at_the_origin_the_bound_is_exact():
    origin, same = torch.zeros(1, 2, dtype=torch.float64), torch.eye(2).double().expand(2, 2, 2)
    mixture = GaussianMixture(torch.tensor([0.5, 0.5]).double().log(), normals(0, 2, 2), same)
    assert_close(mixture.log_normalizer(origin), mixture.lower_bound(origin))
