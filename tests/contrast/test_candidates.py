"""InfoNCE, N-pair and NT-Xent against the whole matrix, their edges, and what they estimate."""

import itertools
import math

import pytest
import torch
from agreement import randn, serving
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from torch.testing import assert_close

from massieu import Points, Sphere
from massieu.checks import UserError
from massieu.contrast import info_nce, mutual_information_bound, n_pair, nt_xent

DOUBLE = torch.float64


def pairs(count: int, dim: int, dtype: torch.dtype = DOUBLE, noise: float = 0.5) -> list[Tensor]:
    query = normalize(randn(count, dim), dim=-1)
    return [query.to(dtype), normalize(query + noise * randn(count, dim, seed=1), dim=-1).to(dtype)]


def dense_info_nce(query: Tensor, key: Tensor, temperature: float, log_weight: Tensor | float = 0.0) -> Tensor:
    scores = query @ key.mT / temperature
    return torch.logsumexp(scores + log_weight, -1) - scores.diagonal(dim1=-2, dim2=-1)


def dense_nt_xent(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    views = normalize(torch.cat([first, second]).double(), dim=-1)
    scores = (views @ views.mT / temperature).fill_diagonal_(-torch.inf)
    return cross_entropy(scores, torch.arange(len(views)).roll(len(first)), reduction="none").view(2, -1)


def gradients(loss: Tensor, wanted: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, wanted)


def assert_equal_with_gradients(function, reference, tensors, *, rtol=1e-12, atol=1e-12):
    mine, other = ([x.clone().requires_grad_() for x in tensors] for _ in range(2))
    found, expected = function(*mine), reference(*other)
    assert_close(found, expected, rtol=rtol, atol=atol)
    coming = randn(*found.shape, seed=9).to(found)
    for own, true in zip(
        gradients((found * coming).sum(), mine), gradients((expected * coming).sum(), other), strict=True
    ):
        assert_close(own, true, rtol=rtol, atol=atol)


@pytest.mark.parametrize("kernel", ["torch", None])
@pytest.mark.parametrize("shape", [(2, 3), (7, 5), (300, 16), (2, 3, 40, 8)])
def test_info_nce_is_the_cross_entropy_of_the_whole_matrix(shape, kernel):
    tensors = [randn(*shape, dtype=DOUBLE), randn(*shape, seed=1, dtype=DOUBLE)]

    def compare():
        assert_equal_with_gradients(
            lambda q, k: info_nce(q, k, temperature=0.3, reduction="none"),
            lambda q, k: dense_info_nce(q, k, 0.3),
            tensors,
        )

    if kernel is None:
        compare()
    else:
        with serving(kernel):
            compare()


def test_large_batches_in_float32_agree_to_1e_5_in_loss_and_gradient():
    query, key = (x.requires_grad_() for x in pairs(2048, 64, torch.float32))
    loss, dense = info_nce(query, key, temperature=0.07), dense_info_nce(query, key, 0.07).mean()
    assert abs(loss.item() - dense.item()) <= 1e-5 * dense.item()
    for mine, other in zip(gradients(loss, [query, key]), gradients(dense, [query, key]), strict=True):
        assert float((mine - other).abs().max()) <= 1e-5 * float(other.abs().max())


def test_symmetric_info_nce_is_the_mean_of_both_directions():
    query, key = pairs(9, 4)
    both = (info_nce(query, key, temperature=0.2) + info_nce(key, query, temperature=0.2)) / 2
    assert_close(info_nce(query, key, temperature=0.2, symmetric=True), both, rtol=1e-14, atol=0)
    assert abs(float(info_nce(query, key, temperature=0.2) - both)) > 1e-4


def test_a_tiny_loss_keeps_its_digits_and_is_never_negative():
    query = torch.eye(6)  # of one partner with score 40 and five negatives with score 0
    found = info_nce(query, query, temperature=1 / 40, reduction="none")
    assert_close(found, torch.full((6,), 5 * math.exp(-40.0)), rtol=1e-5, atol=0)
    assert float(dense_info_nce(query, query, 1 / 40).abs().max()) < 1e-20  # the difference has lost it


@pytest.mark.parametrize("shape", [(8,), (1, 8), (8, 1), (8, 8)])
def test_log_weights_are_those_of_the_candidates(shape):
    query, key = pairs(8, 3)
    log_weight = randn(*shape, seed=3, dtype=DOUBLE)
    assert_equal_with_gradients(
        lambda q, k, w: info_nce(q, k, temperature=0.5, log_weight=w, reduction="none"),
        lambda q, k, w: dense_info_nce(q, k, 0.5, w),
        [query, key, log_weight],
    )


def test_an_absent_candidate_does_not_count_even_if_that_leaves_nothing_before_or_after():
    query, key = (x.requires_grad_() for x in pairs(6, 3))
    present = torch.tensor([False, False, True, True, True, False])
    log_weight = torch.zeros(6, dtype=DOUBLE).masked_fill(~present, -torch.inf)
    found = info_nce(query, key, log_weight=present, reduction="none")
    dense = dense_info_nce(query, key, 1.0, log_weight)
    assert_close(found, dense, rtol=1e-14, atol=1e-14)
    for mine, other in zip(gradients(found.sum(), [query, key]), gradients(dense.sum(), [query, key]), strict=True):
        assert_close(mine, other, rtol=1e-12, atol=1e-14)


def test_nan_is_not_taken_for_an_absent_candidate():
    query, key = pairs(6, 3)
    key[2] = torch.nan
    assert bool(info_nce(query, key, log_weight=torch.zeros(6), reduction="none").isnan().all())
    assert bool(info_nce(query, key, reduction="none").isnan().all())


@pytest.mark.parametrize("own", [False, True])
def test_negatives_join_the_partner_in_the_measure(own):
    query, key = pairs(5, 3)
    negatives = randn(*((5, 4, 3) if own else (4, 3)), seed=5, dtype=DOUBLE)
    log_weight = randn(5, 4, seed=6, dtype=DOUBLE)

    def dense(q: Tensor, k: Tensor, n: Tensor, w: Tensor) -> Tensor:
        score = (q * k).sum(-1, keepdim=True) / 0.4
        against = torch.einsum("qd,qnd->qn" if own else "qd,nd->qn", q, n) / 0.4 + w
        return torch.logsumexp(torch.cat([score, against], -1), -1) - score[:, 0]

    assert_equal_with_gradients(
        lambda q, k, n, w: info_nce(q, k, n, temperature=0.4, log_weight=w, reduction="none"),
        dense,
        [query, key, negatives, log_weight],
    )


def test_a_measure_as_negatives_gives_the_likelihood_of_its_family():
    query, key = pairs(5, 3)
    found = info_nce(query, key, Points(key), temperature=0.3, reduction="none")
    assert_close(found, info_nce(query, key, temperature=0.3, reduction="none"), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dim", [3, 8])
def test_uniform_negatives_on_the_sphere_tend_to_the_measure_sphere(dim):
    query, key = pairs(4, dim)
    count, measure = 200_000, Sphere(dim)
    negatives = randn(count, dim, seed=7, dtype=DOUBLE)
    area = measure.log_normalizer(torch.zeros(1, dim, dtype=DOUBLE))
    options = {"temperature": 0.5, "normalize": True, "reduction": "none"}
    limit = info_nce(query, key, measure, **options) - area
    found = info_nce(query, key, negatives, **options) - math.log(count)
    # The relative deviation of Z is sqrt(Var / N), below 2 / sqrt(N) at length two; five of them.
    assert_close(found, limit, rtol=0, atol=10 / math.sqrt(count))
    unprojected = info_nce(query, key, negatives, temperature=0.5, reduction="none") - math.log(count)
    assert float((unprojected - limit).abs().min()) > 0.1


def test_a_learned_temperature_gets_its_gradient():
    query, key = pairs(6, 3)
    temperature = torch.tensor(0.3, dtype=DOUBLE, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: info_nce(query, key, temperature=t), (temperature,))
    assert torch.autograd.gradcheck(lambda t: nt_xent(query, key, temperature=t), (temperature,))


def test_n_pair_is_the_formula_of_its_source():
    anchor, positive = randn(7, 4, dtype=DOUBLE), randn(7, 4, seed=1, dtype=DOUBLE)
    expected = [
        math.log(1 + sum(math.exp(anchor[i] @ positive[j] - anchor[i] @ positive[i]) for j in range(7) if j != i))
        for i in range(7)
    ]
    assert_close(n_pair(anchor, positive, reduction="none"), torch.tensor(expected, dtype=DOUBLE), rtol=1e-13, atol=0)
    on_sphere = n_pair(normalize(anchor, dim=-1), normalize(positive, dim=-1))
    assert_close(n_pair(anchor, positive, normalize=True), on_sphere, rtol=1e-14, atol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.1, 0.01])
def test_nt_xent_is_the_cross_entropy_without_the_diagonal(temperature):
    first, second = randn(20, 6, dtype=DOUBLE), randn(20, 6, seed=1, dtype=DOUBLE)
    assert_equal_with_gradients(
        lambda a, b: nt_xent(a, b, temperature=temperature, reduction="none"),
        lambda a, b: dense_nt_xent(a, b, temperature),
        [first, second],
        rtol=1e-11,
        atol=1e-11,
    )


def test_nt_xent_survives_a_self_score_that_outweighs_all_others():
    # At t = 0.01 in float32 the self score is 100 and the others are near zero: exp(100) would swallow their sum.
    first, second = randn(500, 128), randn(500, 128, seed=1)
    found, expected = nt_xent(first, second, temperature=0.01, reduction="none"), dense_nt_xent(first, second, 0.01)
    assert float((found.double() - expected).abs().max()) < 3e-5  # measured 1e-5; scores near 40 round by 2e-6
    views = normalize(torch.cat([first, second]), dim=-1)
    scores = views @ views.mT / 0.01
    subtracted = (torch.logsumexp(scores, -1).exp() - scores.diagonal().exp()).log()
    assert not bool(torch.isfinite(subtracted).all())


def test_repeated_points_share_the_mass():
    same = torch.ones(5, 3, dtype=DOUBLE)
    assert_close(info_nce(same, same), torch.tensor(math.log(5), dtype=DOUBLE), rtol=1e-14, atol=0)
    assert_close(nt_xent(same, same, temperature=0.1), torch.tensor(math.log(9), dtype=DOUBLE), rtol=1e-13, atol=0)


def test_one_pair_has_nothing_to_tell_apart():
    query, key = (x.requires_grad_() for x in pairs(1, 3))
    for loss in (
        info_nce(query, key),
        info_nce(query, key, log_weight=torch.zeros(1)),
        info_nce(query, key, torch.empty(0, 3, dtype=DOUBLE)),
        nt_xent(query, key, temperature=0.1),
    ):
        assert loss.item() == 0
        for gradient in torch.autograd.grad(loss, [query, key], allow_unused=True, materialize_grads=True):
            assert bool((gradient == 0).all())


def test_scores_of_thousands_stay_finite():
    query, key = (1000 * x for x in pairs(30, 8, torch.float32))
    found = info_nce(query, key, reduction="none")
    expected = dense_info_nce(query.double(), key.double(), 1.0)
    assert_close(found.double(), expected, rtol=1e-5, atol=0.2)  # float32 rounds scores near 1e6 by 0.06


def test_half_precision_computes_in_single():
    query, key = (x.bfloat16() for x in pairs(30, 8))
    found = info_nce(query, key, temperature=0.1)
    assert found.dtype == torch.float32
    assert_close(found, info_nce(query.float(), key.float(), temperature=0.1), rtol=0, atol=0)


def test_no_tensor_of_pairs_by_pairs_is_made():
    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            for x in found if isinstance(found, (tuple, list)) else (found,):
                if isinstance(x, Tensor):
                    self.largest = max(self.largest, x.untyped_storage().nbytes() // x.element_size())
            return found

    query, key = (x.requires_grad_() for x in pairs(3000, 4, torch.float32))
    linear = 20 * 2 * 3000 * 4  # both views of nt_xent, stacked with a few statistics
    for loss in (lambda: info_nce(query, key, symmetric=True), lambda: nt_xent(query, key, temperature=0.1)):
        with Sizes() as sizes:
            gradients(loss(), [query, key])
        assert 0 < sizes.largest < linear
    with Sizes() as sizes:
        dense_info_nce(query, key, 1.0)
    assert sizes.largest == 3000**2  # the control sees the matrix


def joint_table() -> Tensor:
    table = torch.tensor([[0.10, 0.05, 0.15, 0.02], [0.04, 0.16, 0.06, 0.08], [0.12, 0.03, 0.09, 0.10]], dtype=DOUBLE)
    return table / table.sum()


def expected_info_nce(critic: Tensor, joint: Tensor, candidates: int) -> Tensor:
    """The expected loss, by enumeration of context, partner and independent negatives."""
    contexts, words = joint.shape
    marginal, atoms = joint.sum(0), torch.eye(words, dtype=DOUBLE)
    cases = torch.tensor(list(itertools.product(range(contexts), *[range(words)] * candidates)))
    context, partner, negatives = cases[:, 0], cases[:, 1], cases[:, 2:]
    weight = joint[context, partner] * marginal[negatives].prod(-1)
    return (weight * info_nce(critic[context], atoms[partner], atoms[negatives], reduction="none")).sum()


def test_at_the_optimum_the_law_of_the_negatives_tilted_by_the_critic_is_the_conditional_law():
    joint = joint_table()
    marginal, conditional = joint.sum(0), joint / joint.sum(1, keepdim=True)
    critic = torch.zeros(3, 4, dtype=DOUBLE, requires_grad=True)
    solver = torch.optim.LBFGS([critic], lr=1, max_iter=300, tolerance_grad=1e-12, tolerance_change=0)

    def closure() -> Tensor:
        solver.zero_grad()
        loss = expected_info_nce(critic, joint, candidates=3)
        loss.backward()
        return loss

    solver.step(closure)
    recovered = Points(torch.eye(4, dtype=DOUBLE), marginal.log()).probabilities(critic.detach())
    assert_close(recovered, conditional, rtol=0, atol=1e-7)
    without = critic.detach().softmax(-1)  # the control: the counting measure instead of the negatives'
    assert float((without - conditional).abs().max()) > 0.05


def test_log_candidates_minus_loss_is_below_the_mutual_information():
    joint = joint_table()
    ratio = (joint / joint.sum(0) / joint.sum(1, keepdim=True)).log()
    information = float((joint * ratio).sum())
    bounds = [float(mutual_information_bound(expected_info_nce(ratio, joint, k), k)) for k in (1, 2, 3, 5)]
    assert bounds == sorted(bounds)
    assert bounds[0] == 0
    assert 0 < bounds[-1] < information
    # The control: more candidates than were there would claim more than there is.
    assert float(mutual_information_bound(expected_info_nce(ratio, joint, 3), 6)) > information


QUERY = torch.zeros(3, 2)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: info_nce(QUERY[0], QUERY[0]), "query"),
        (lambda: info_nce(QUERY, QUERY[:2]), "query and positive"),
        (lambda: info_nce(QUERY.long(), QUERY), "query"),
        (lambda: n_pair(QUERY, QUERY[:2]), "anchor and positive"),
        (lambda: nt_xent(QUERY, QUERY[:2], temperature=1.0), "first and second"),
        (lambda: info_nce(QUERY, QUERY, temperature=0.0), "temperature"),
        (lambda: nt_xent(QUERY, QUERY, temperature=-1.0), "temperature"),
        (lambda: info_nce(QUERY, QUERY, temperature=math.nan), "temperature"),
        (lambda: info_nce(QUERY, QUERY, temperature=torch.ones(2)), "temperature"),
        (lambda: info_nce(QUERY, QUERY, temperature="low"), "temperature"),
        (lambda: info_nce(QUERY, QUERY, reduction="max"), "reduction"),
        (lambda: info_nce(QUERY[:0], QUERY[:0]), "at least one row"),
        (lambda: info_nce(QUERY, QUERY, QUERY, symmetric=True), "got negatives"),
        (lambda: info_nce(QUERY, QUERY, symmetric=True, log_weight=torch.zeros(3)), "got log_weight"),
        (lambda: info_nce(QUERY, QUERY, Sphere(2), log_weight=torch.zeros(3)), "Measure"),
        (lambda: info_nce(QUERY, QUERY, QUERY[0]), "negatives"),
        (lambda: info_nce(QUERY, QUERY, torch.zeros(4, 5, 2)), "shared"),
        (lambda: info_nce(QUERY, QUERY, log_weight=torch.zeros(2)), "broadcast"),
        (lambda: info_nce(QUERY, QUERY, log_weight=torch.zeros(3).long()), "log_weight"),
        (lambda: mutual_information_bound(0.5, 0), "num_candidates"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(call, sentence):
    with pytest.raises(UserError, match=sentence) as error:
        call()
    assert "\n" not in str(error.value)


def test_an_empty_batch_sums_to_zero():
    assert float(info_nce(QUERY[:0], QUERY[:0], reduction="sum")) == 0
    assert nt_xent(QUERY[:0], QUERY[:0], temperature=1.0, reduction="none").shape == (2, 0)
