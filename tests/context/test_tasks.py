"""Families of functions: their signal, their noise, their shifts, and what is refused."""

import math

import pytest
import torch
from torch.testing import assert_close

from massieu.checks import UserError
from massieu.context import Linear, shifted, task_named
from massieu.context.tasks import TASKS, DecisionTree, OrthogonalQueries, Quadrants, Scaled, Skewed, TwoLayer

SPREAD = torch.tensor([[2.0, 0.5, 0.0], [0.5, 1.0, 0.3], [0.0, 0.3, 0.5]])
PRIOR = torch.tensor([[1.0, -0.4, 0.2], [-0.4, 1.5, 0.0], [0.2, 0.0, 0.7]])
SETTINGS = [
    ("linear", {"dim": 5}),
    ("linear", {"dim": 3, "covariance": SPREAD, "prior": PRIOR}),
    ("linear", {"dim": 3, "outputs": 2, "prior": 4.0}),
    ("sparse", {"dim": 20}),
    ("sparse", {"dim": 3, "nonzero": 2, "covariance": SPREAD}),
    ("ridge", {"dim": 4, "noise": 0.7, "scale": 2.0}),
    ("quadratic", {"dim": 6}),
    ("quadratic", {"dim": 3, "covariance": SPREAD}),
    ("logistic", {"dim": 4, "scale": 2.0}),
    ("logistic", {"dim": 3, "covariance": SPREAD}),
    ("tree", {"dim": 5}),
    ("network", {"dim": 5, "hidden": 3}),
    ("network", {"dim": 7}),
    ("sine", {}),
    ("sine", {"dim": 3, "amplitudes": (1.0, 2.0)}),
]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def draw(task, count=2000, examples=5, seed=0):
    return task.draw(count, examples, seeded(seed), torch.float64)


@pytest.mark.parametrize(("name", "options"), SETTINGS)
def test_the_signal_is_the_mean_square_of_the_answers(name, options):
    task = task_named(name, **options)
    squares = draw(task, 40_000, 2).answers.square().flatten(1).mean(1)
    error = squares.std() / math.sqrt(len(squares))
    assert abs(squares.mean() - task.signal) < 4 * error
    assert 10 * error < task.signal  # the control: nothing that is off by much more than a third would pass


@pytest.mark.parametrize("name", TASKS)
def test_a_seed_gives_the_same_prompts_and_another_one_others(name):
    task = task_named(name, dim=4)
    first, again, other = (draw(task, 6, seed=seed) for seed in (1, 1, 2))
    for field in ("inputs", "targets", "answers"):
        assert torch.equal(getattr(first, field), getattr(again, field))
    assert not torch.equal(first.inputs, other.inputs)
    for key, value in first.parameters.items():
        assert torch.equal(value, again.parameters[key])
        assert not torch.equal(value, other.parameters[key])
        assert len(value) == 6


@pytest.mark.parametrize("name", [name for name in TASKS if name != "logistic"])
def test_targets_are_answers_with_noise_of_the_stated_size(name):
    residual = (lambda p: p.targets - p.answers)(draw(task_named(name, dim=4, noise=0.5)))
    assert abs(residual.square().mean() - 0.25) < 4 * 0.25 * math.sqrt(2 / residual.numel())
    assert torch.corrcoef(residual.T).fill_diagonal_(0).abs().max() < 5 / math.sqrt(len(residual))


def test_inputs_and_weights_have_their_covariances():
    prompts = draw(task_named("linear", dim=3, covariance=SPREAD, prior=PRIOR), 40_000, 1)
    assert_close(prompts.inputs[:, 0].T.cov(), SPREAD.double(), rtol=0, atol=0.06)
    assert_close(prompts.parameters["weights"].T.cov(), PRIOR.double(), rtol=0, atol=0.06)


def test_a_singular_covariance_keeps_inputs_in_its_range():
    inputs = draw(task_named("linear", dim=3, covariance=[1.0, 0.0, 2.0])).inputs
    assert float(inputs[..., 1].abs().max()) < 1e-12
    assert float(inputs[..., 2].abs().max()) > 1


def test_sparse_weights_are_everywhere_equally_often():
    nonzero = draw(task_named("sparse", dim=8, nonzero=3), 8000).parameters["weights"] != 0
    assert nonzero.sum(1).eq(3).all()
    assert_close(nonzero.double().mean(0), torch.full((8,), 3 / 8, dtype=torch.float64), rtol=0, atol=0.03)


def test_labels_are_as_frequent_as_their_probabilities():
    prompts = draw(task_named("logistic", dim=3, scale=2.0), 20_000)
    assert set(prompts.targets.unique().tolist()) == {-1.0, 1.0}
    scores = torch.einsum("tnd,td->tn", prompts.inputs, prompts.parameters["weights"])
    assert_close(prompts.answers, 2 * torch.sigmoid(scores) - 1)
    for low, high in ((-3, -1), (-1, 0), (0, 0.5), (0.5, 3)):
        inside = (scores > low) & (scores < high)
        gap = (prompts.targets - prompts.answers)[inside].mean()
        assert abs(gap) < 4 / math.sqrt(int(inside.sum()))


def test_trees_agree_with_walking_down():
    task = DecisionTree(4, depth=3)
    prompts = draw(task, 5, 20)
    for t in range(5):
        asked, leaves = (prompts.parameters[key][t] for key in ("coordinates", "leaves"))
        for x, answer in zip(prompts.inputs[t], prompts.answers[t], strict=True):
            path = ""
            for level in range(3):  # nodes of a level stand one after the other, left to right
                node = 2**level - 1 + int(path or "0", 2)
                path += "1" if x[asked[node]] > 0 else "0"
            assert answer == leaves[int(path, 2)]


def test_networks_agree_with_layers_of_torch():
    prompts = draw(TwoLayer(4, hidden=6), 3, 7)
    for t in range(3):
        first, second = torch.nn.Linear(4, 6, bias=False).double(), torch.nn.Linear(6, 1, bias=False).double()
        with torch.no_grad():
            first.weight.copy_(prompts.parameters["first"][t].T)
            second.weight.copy_(prompts.parameters["second"][t][None] * (2 / 6) ** 0.5)
            expected = second(torch.relu(first(prompts.inputs[t])))[:, 0]
        assert_close(prompts.answers[t], expected)


def test_the_penalty_of_ridge_is_noise_over_prior():
    assert task_named("ridge", dim=4, noise=1.0, scale=2.0).penalty == 0.25


def test_draws_have_the_default_dtype():
    assert task_named("tree", dim=3).draw(2, 3, seeded()).targets.dtype == torch.float32


def test_scaling_changes_inputs_and_neither_functions_nor_noise():
    task = task_named("quadratic", dim=3, noise=0.5)
    plain, moved = draw(task), draw(Scaled(task, 3.0))
    assert torch.equal(moved.inputs, 3 * plain.inputs)
    assert torch.equal(moved.parameters["weights"], plain.parameters["weights"])
    assert_close(moved.answers, 9 * plain.answers)
    assert_close(moved.targets - moved.answers, plain.targets - plain.answers)


def test_skewed_inputs_have_the_spectrum_along_axes_of_their_own():
    prompts = draw(Skewed(task_named("linear", dim=4), [4.0, 2.0, 1.0, 1.0]), 3, 20_000)
    expected = torch.tensor([0.5, 0.5, 1.0, 2.0], dtype=torch.float64)
    covariances = prompts.inputs.mT @ prompts.inputs / 20_000
    assert_close(torch.linalg.eigvalsh(covariances), expected.expand(3, 4), rtol=0, atol=0.07)
    assert float((covariances[0] - covariances[1]).abs().max()) > 0.2


def test_orthogonal_queries_see_nothing_of_the_examples():
    prompts = draw(OrthogonalQueries(task_named("linear", dim=6)), 50, 6)
    products = torch.einsum("tid,tjd->tij", prompts.queries, prompts.inputs)
    assert float(products.tril(-1).abs().max()) < 1e-12
    assert float(products.triu(1).abs().max()) > 1  # the control: later examples are not avoided
    assert_close(prompts.queries.norm(dim=-1), prompts.inputs.norm(dim=-1))
    assert_close(prompts.queries[:, 0], prompts.inputs[:, 0])


@pytest.mark.parametrize("opposite", [True, False])
def test_quadrants_separate_examples_from_queries(opposite):
    prompts = draw(Quadrants(task_named("linear", dim=3), opposite=opposite), 400, 10)
    signs = prompts.inputs.sign()
    assert torch.equal(signs, signs[:, :1].expand_as(signs))
    assert len(signs[:, 0].unique(dim=0)) == 8
    agreement = float((prompts.queries.sign() * signs).mean())
    assert agreement == -1 if opposite else abs(agreement) < 0.05
    w = prompts.parameters["weights"]
    assert_close(prompts.answers, torch.einsum("tnd,td->tn", prompts.queries, w))
    assert_close(prompts.targets, torch.einsum("tnd,td->tn", prompts.inputs, w))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: task_named("cubic", dim=3), "task"),
        (lambda: task_named("linear", dim=3, nose=1), "got nose"),
        (lambda: task_named("linear"), "dim is missing"),
        (lambda: task_named("linear", dim=0), "dim"),
        (lambda: task_named("sparse", dim=0), "dim"),
        (lambda: task_named("tree", dim=2.5), "dim"),
        (lambda: task_named("linear", dim=4, noise=3.0), r"3.0\^2; lower it to 2 or less"),
        (lambda: task_named("tree", dim=4, noise=1.5), "at most the variance of the signal, 1,"),
        (lambda: task_named("network", dim=4, noise=2.5), "at most the variance of the signal, 4,"),
        (lambda: task_named("sine", noise=2.5), "at most the variance of the signal, 4.252,"),
        (lambda: task_named("linear", dim=4, noise=-0.1), "noise"),
        (lambda: task_named("linear", dim=4, noise=math.nan), "noise"),
        (lambda: task_named("ridge", dim=4, noise=0.0), "without noise take the task linear"),
        (lambda: task_named("ridge", dim=4, scale=0.0), "scale"),
        (lambda: task_named("logistic", dim=4, scale=-1.0), "scale"),
        (lambda: task_named("sparse", dim=4, nonzero=5), "nonzero"),
        (lambda: task_named("sparse", dim=4, nonzero=0), "nonzero"),
        (lambda: task_named("linear", dim=4, outputs=0), "outputs"),
        (lambda: task_named("linear", dim=4, covariance=SPREAD), "covariance"),
        (lambda: task_named("linear", dim=2, prior=[[1.0, 2.0], [0.0, 1.0]]), "prior must be finite and symmetric"),
        (lambda: task_named("linear", dim=2, prior=[1.0, -1.0]), "prior must be positive semidefinite"),
        (lambda: task_named("linear", dim=2, covariance=0.0), "not zero"),
        (lambda: task_named("tree", dim=4, depth=-1), "depth"),
        (lambda: task_named("network", dim=4, hidden=0), "hidden"),
        (lambda: task_named("sine", amplitudes=(2.0, 1.0)), "amplitudes"),
        (lambda: task_named("sine", width=0.0), "width"),
        (lambda: Linear(3).draw(0, 5, seeded()), "count"),
        (lambda: Linear(3).draw(5, 0, seeded()), "examples"),
        (lambda: shifted(Linear(3), "twist"), "shift"),
        (lambda: shifted(Linear(3), "scale"), "shift scale takes factor, factor is missing"),
        (lambda: Scaled(Linear(3), 0.0), "factor"),
        (lambda: Skewed(Linear(3), [1.0, 2.0]), "spectrum"),
        (lambda: Skewed(Linear(2), [1.0, -2.0]), "spectrum"),
        (lambda: OrthogonalQueries(Linear(3)).draw(2, 4, seeded()), "examples"),
        (lambda: Scaled(Quadrants(Linear(3)), 2.0).draw(2, 4, seeded()), "put the shift of the queries outermost"),
    ],
)
def test_what_is_no_task_is_refused_in_one_sentence(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_what_is_no_generator_or_task_is_refused_in_one_sentence():
    with pytest.raises(UserError, match="generator"):
        Linear(3).draw(2, 4, 0)
    with pytest.raises(UserError, match="task"):
        Scaled("linear", 2.0)
