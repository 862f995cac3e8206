"""Networks by construction: values on all their sequences, certificates, and bad input."""

import itertools

import pytest
import torch

from massieu.checks import UserError
from massieu.nn import FeedForward, MeasureAttention
from massieu.universal import BelowResolution, construct, cost, interpolant, memorize, staircase, table


def random_table(cells, length, outputs, seed=0):
    """A random equivariant function of cells of the unit square or line, repeated tokens included."""
    drawn = torch.randn(*[cells] * (length + 1), outputs, generator=torch.Generator().manual_seed(seed)).double()

    def function(x):
        side = round(cells ** (1 / x.shape[-1]))
        number = (x * side).long() @ side ** torch.arange(x.shape[-1])
        around = number.sort(1).values
        return drawn[(number, *(around[:, [place]].expand_as(number) for place in range(length)))]

    return function


def smooth(x):
    return torch.sin(3 * x) + x * x.sum(1, keepdim=True)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_all_sequences_of_a_grid_have_their_values(seed):
    function = random_table(9, 3, 2, seed)
    network = construct(function, (3, 3), 3, generator=seed)
    certificate = network.certify()
    assert (certificate.sequences, certificate.exhaustive, certificate.wrong) == (729, True, 0)
    assert certificate.error == 0.0
    assert certificate.holds
    assert str(certificate).startswith("all 729 sequences within 1e-12: error 0.0e+00, 0 tokens wrong")

    # Independently: every sequence of centers, and of points elsewhere in the cells.
    centers = torch.cartesian_prod(*[torch.tensor([1.0, 3.0, 5.0]).double() / 6] * 2)
    inputs = torch.stack([centers[list(row)] for row in itertools.product(range(9), repeat=3)])
    jitter = torch.rand(inputs.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 0.5
    with torch.no_grad():
        assert torch.equal(network(inputs), function(inputs))
        assert torch.equal(network(inputs + 0.999 / 3 * jitter), function(inputs))


def test_the_certificate_of_a_network_without_its_context_fails():
    network = construct(random_table(9, 2, 1), (3, 3), 2)
    with torch.no_grad():
        network.block.attention.out_proj.weight.zero_()
    certificate = network.certify()
    assert not certificate.holds
    assert certificate.wrong > 100
    assert "NOT within" in str(certificate)


@pytest.mark.parametrize(
    ("grid", "length", "ramp", "every"),
    [(6, 4, None, False), (4, 3, None, False), (6, 4, 0.01, True), ((3, 3), 3, None, True)],
)
def test_a_certificate_in_float32_counts_the_tokens_that_are_right(grid, length, ramp, every):
    network = construct(smooth if isinstance(grid, int) else random_table(9, 3, 2), grid, length, ramp=ramp)
    exact = network.certify()
    assert exact.holds
    assert exact.dtype == torch.float64
    assert exact.right == 1
    found = network.float().certify()
    inputs, targets, *_ = network.cases()
    with torch.no_grad():
        apart = (network(inputs.float()) - targets).abs().amax(-1)
    assert found.dtype == torch.float32
    assert (found.right == 1) if every else (found.right < 0.9)  # which of them is a matter of rounding
    assert found.right == pytest.approx(float((apart <= found.tolerance).double().mean()))
    assert found.holds == every
    assert found.margin == pytest.approx(exact.margin * 2.0**-29)
    advice = "of the tokens right: go back with .double(), or construct with wider strips"
    assert (advice in str(found)) != every
    assert network.double().certify(1e-6).tolerance == 1e-6


@pytest.mark.parametrize(("cells", "length", "right"), [(9, 2, True), (5, 8, False)])
def test_float32_is_enough_for_few_identifiers_only(cells, length, right):
    network = construct(smooth, cells, length, steps=0, ramp=1e-3)
    inputs, targets, *_ = network.cases()
    assert network.certify().holds
    with torch.no_grad():
        assert ((network.float()(inputs.float()) - targets).abs().max() < 1e-6) == right


def test_the_network_is_made_of_layers_of_the_package_with_one_head_of_rank_one():
    network = construct(smooth, 3, 2)
    attention = network.block.attention
    assert isinstance(attention, MeasureAttention)
    assert all(isinstance(part, FeedForward) for part in [*network.encode, *network.decode])
    assert attention.num_heads == 1
    for matrix in (attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj):
        assert torch.linalg.matrix_rank(matrix.weight) == 1


@pytest.mark.parametrize(
    ("grid", "length", "outputs"), [((3, 3), 3, 2), (5, 2, 1), ((2, 3, 2), 2, 4), (4, 1, 1), (1, 3, 1), ((1, 2), 2, 1)]
)
def test_the_cost_is_that_of_the_network(grid, length, outputs):
    network = construct(lambda x: x.mean(-1, keepdim=True).expand(-1, -1, outputs), grid, length, steps=5)
    expected = cost(grid, length, outputs)
    assert network.cost == expected
    assert sum(parameter.numel() for parameter in network.parameters()) == expected.parameters
    assert network.num_parameters < expected.parameters
    assert network.certify().error == 0.0


def test_the_error_for_a_continuous_function_is_of_the_order_of_a_cell():
    points = torch.rand(4000, 2, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean, most = [], []
    for cells in (4, 8, 16, 32):
        with torch.no_grad():
            apart = construct(smooth, cells, 2, steps=30)(points) - smooth(points)
        mean.append(float(apart.square().mean().sqrt()))
        most.append(float(apart.abs().max()))
    for errors in (mean, most):
        assert all(1.7 < coarse / fine < 2.3 for coarse, fine in itertools.pairwise(errors))


def test_wide_ramps_spoil_the_largest_error():
    points = torch.rand(4000, 2, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        wide, narrow = (
            (construct(smooth, 16, 2, steps=30, ramp=ramp)(points) - smooth(points)).abs().max() for ramp in (0.1, 1e-5)
        )
    assert wide > 3 * narrow


def test_many_sequences_are_certified_by_one_for_every_context():
    network = construct(smooth, 3, 11)
    certificate = network.certify()
    assert not certificate.exhaustive
    assert certificate.sequences == network.cost.identifiers == 3 * 66
    assert certificate.holds
    assert str(certificate).startswith("one for every multiset, 198 sequences within")


@pytest.mark.parametrize("labels", ["classes", "values"])
def test_two_hundred_sequences_are_memorized_without_error(labels):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(200, 8, 4, generator=generator, dtype=torch.float64)
    classes = torch.randint(10, (200, 8), generator=generator)
    targets = classes if labels == "classes" else torch.randn(200, 8, 3, generator=generator, dtype=torch.float64)
    network = memorize(inputs, targets, steps=10)
    with torch.no_grad():
        assert torch.equal(network(inputs).squeeze(-1), targets.double())
    assert network.certify(0.0).wrong == 0
    assert network.cost.identifiers == 1600
    # Other sequences do not have these labels.
    shuffled = inputs[torch.randperm(200, generator=generator)]
    with torch.no_grad():
        assert not torch.equal(network(shuffled).squeeze(-1), targets.double())


def test_fewer_weights_memorize_up_to_rounding():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(50, 8, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(10, (50, 8), generator=generator)
    exact, lean = (memorize(inputs, labels, exact=each, steps=10) for each in (True, False))
    assert lean.num_parameters <= 3 * 400 + 20 < exact.num_parameters
    certificate = lean.certify(1e-6)
    assert certificate.holds
    assert certificate.error > 0
    assert exact.certify(0.0).holds


@pytest.mark.parametrize(("count", "length", "words"), [(50, 4, 8), (100, 3, 12), (30, 6, 3)])
def test_words_are_memorized_by_their_multiset(count, length, words):
    inputs = torch.randint(words, (count, length), generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([sum(7**word for word in row) % 101 for row in inputs.tolist()])
    network = memorize(inputs, labels)
    assert network.certify(0.0).holds
    with torch.no_grad():
        assert torch.equal(network(inputs.flip(1)).squeeze(-1), labels[:, None].expand(-1, length).double())


def test_positions_in_the_tokens_let_order_matter():
    rows = torch.tensor(list(itertools.product(range(3), repeat=2)))
    tokens = torch.stack([rows / 3, torch.tensor([0.0, 1.0]).expand(9, 2)], -1).double()
    labels = torch.arange(9)
    assert memorize(tokens, labels).certify(0.0).holds
    with pytest.raises(UserError, match=r"\[1.0\] in sequence 1 and \[3.0\] in sequence 3"):
        memorize(rows, labels)


def test_a_table_is_exact_near_its_keys_and_a_plain_staircase_is_not():
    generator = torch.Generator().manual_seed(0)
    keys = torch.rand(500, generator=generator, dtype=torch.float64).sort().values
    values = torch.randn(500, 2, generator=generator, dtype=torch.float64)
    gaps = keys.diff()
    near = keys.clone()
    near[:-1] += 0.24 * gaps
    near[1:] -= 0.24 * torch.minimum(gaps, gaps.roll(-1))
    tokens = torch.nn.functional.pad(torch.cat([keys, near])[:, None], (0, 8))
    ahead = torch.eye(9, dtype=torch.float64)[0].expand(499, -1)
    plain = staircase(9, ahead, keys[:-1] + gaps / 2, gaps / 2, values.diff(dim=0), values[0])
    with torch.no_grad():
        assert torch.equal(table(9, keys, values)(tokens)[:500, :2], values)
        assert torch.equal(table(9, keys, values)(tokens)[500:, :2], values)
        assert 1e-13 < (plain(tokens)[:500, :2] - values).abs().max() < 1e-6


def test_from_key_to_key_one_digit_changes():
    keys = torch.arange(21, dtype=torch.float64)
    digits = table(5, keys, torch.zeros(21, 1))[0]
    assert digits.down.weight.count_nonzero(0).tolist() == [1] * 40
    with torch.no_grad():
        found = digits(torch.nn.functional.pad(keys[:, None], (0, 4)))
    assert len(found.unique(dim=0)) == 21


def test_an_interpolant_agrees_with_numpy():
    numpy = pytest.importorskip("numpy")
    generator = torch.Generator().manual_seed(0)
    knots = torch.rand(12, generator=generator, dtype=torch.float64).sort().values
    values = torch.randn(12, 1, generator=generator, dtype=torch.float64)
    points = knots[0] + (knots[-1] - knots[0]) * torch.rand(50, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        found = interpolant(2, torch.tensor([0.0, 1.0]), knots, values)(torch.stack([0 * points, points], -1))
    expected = numpy.interp(points.numpy(), knots.numpy(), values[:, 0].numpy())
    assert torch.allclose(found[:, 0], torch.from_numpy(expected), rtol=0, atol=1e-11)
    assert (found[:, 1] == 0).all()


WORDS = torch.tensor([[0, 1], [1, 2]])
VECTORS = torch.zeros(2, 3, 1, dtype=torch.float64)


@pytest.mark.parametrize(
    ("word", "call"),
    [
        ("identifiers", lambda: construct(smooth, (10, 10), 8)),
        ("ramp", lambda: construct(smooth, 3, 2, ramp=1.0)),
        ("rounding", lambda: construct(smooth, 3, 2, ramp=1e-15)),
        ("rounding", lambda: construct(smooth, (3, 3), 2, ramp=1e-15)),
        ("shape", lambda: construct(lambda x: x.sum(1), 3, 2)),
        ("finite", lambda: construct(lambda x: x / 0, 3, 2)),
        ("equivariant", lambda: construct(lambda x: x.cumsum(1), 3, 2)),
        ("shape", lambda: construct(smooth, 3, 2)(torch.zeros(1, 3, 1).double())),
        ("floating", lambda: construct(smooth, 3, 2)(torch.zeros(1, 2, 1).long())),
        ("word numbers", lambda: memorize(WORDS, torch.zeros(2))(torch.zeros(1, 2))),
        ("sequences", lambda: memorize([[0, 1]], torch.zeros(1))),
        ("vectors", lambda: memorize(torch.zeros(2, 3), torch.zeros(2))),
        ("sequences must be finite", lambda: memorize(VECTORS / 0, torch.zeros(2))),
        ("labels", lambda: memorize(VECTORS, torch.zeros(3))),
        ("labels must be finite", lambda: memorize(VECTORS, torch.full((2,), torch.nan))),
        ("4 identifiers", lambda: memorize(WORDS, torch.zeros(2), limit=3)),
    ],
)
def test_bad_input_is_refused(word, call):
    with pytest.raises(UserError, match=word):
        call()


def test_tokens_below_the_resolution_of_float64_are_refused():
    inputs = 1 + torch.linspace(0, 1e-12, 400, dtype=torch.float64).reshape(100, 2, 2)
    with pytest.raises(BelowResolution):
        memorize(inputs, torch.arange(100), steps=2)
