"""Retrieval and learning: what each predicts, and that models which were trained for one of them are told apart."""

import pytest
import torch
from torch.testing import assert_close

from massieu.checks import UserError
from massieu.context import (
    LearningRecipe,
    Pool,
    Ridge,
    draw_pool,
    hypotheses,
    learn,
    learning,
    pools,
    separate,
    shifted,
    task_named,
)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def trained():
    """Tables of two models that differ only in how many functions they were trained on."""
    task = task_named("linear", dim=1, noise=0.5)
    options = {"examples": 8, "steps": 300, "batch": 64, "learning_rate": 5e-3, "width": 32, "layers": 2, "seed": 1}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(learning, "compare", lambda *arguments, **options: None)
        runs = {pool: learn(task, LearningRecipe(**options, pool=pool)) for pool in (4, None)}
    return {pool: run.hypotheses.set_index("condition") for pool, run in runs.items()}


def test_training_on_few_functions_gives_retrieval_and_on_new_ones_learning(trained):
    few, fresh = trained[4], trained[None]
    assert few.follows["novel"] == "retrieval"
    assert fresh.follows["novel"] == "learning"
    assert few.share["novel"] < 0.25
    assert fresh.share["novel"] > 0.75
    # Novel functions cost the one, who is many times worse than ridge regression and as bad as its pool.
    assert few.model_error["novel"] > 10 * few.learning_error["novel"]
    assert few.model_error["novel"] > 2 * few.model_error["pool"]
    assert fresh.model_error["novel"] < 4 * fresh.learning_error["novel"]


def test_shuffled_labels_ruin_both_and_a_learner_fits_them_all_the_same(trained):
    few, fresh = trained[4], trained[None]
    assert few.model_error["shuffled"] > 2 * few.model_error["pool"]
    assert fresh.model_error["shuffled"] > 3 * fresh.model_error["novel"]
    assert fresh.share["shuffled"] > 0.5


def test_a_learner_and_a_retriever_are_told_apart():
    task = task_named("linear", dim=3, noise=0.3)
    pool = draw_pool(task, 4, generator())
    learner = separate(Ridge(0.09), task, pool, 6, generator(1)).set_index("condition")
    retriever = separate(pool.predict, task, pool, 6, generator(1)).set_index("condition")
    assert set(learner.follows) == {"learning"}
    assert set(retriever.follows) == {"retrieval"}
    assert_close(learner.share.tolist(), [1.0] * 3)
    assert_close(retriever.share.tolist(), [0.0] * 3, atol=1e-6, rtol=0)
    assert retriever.retrieval_error["pool"] < 0.1 * retriever.retrieval_error["novel"]
    assert learner.learning_error["novel"] < 0.1 * learner.retrieval_error["novel"]


def test_what_is_near_none_of_the_two_follows_neither():
    task = task_named("linear", dim=3, noise=0.3)
    pool, ridge = draw_pool(task, 4, generator()), Ridge(0.09)
    found = separate(lambda prompts: 20 + ridge(prompts), task, pool, 6, generator(1))
    assert set(found.follows) == {"neither"}
    halfway = separate(lambda prompts: (ridge(prompts) + pool.predict(prompts)) / 2, task, pool, 6, generator(1))
    assert_close(halfway.share.tolist(), [0.5] * 3, atol=1e-5, rtol=0)


def test_without_a_pool_it_is_asked_whether_the_examples_are_used():
    task = task_named("linear", dim=3, noise=0.3)
    ridge = Ridge(0.09)
    cases = {"learning": ridge, "neither": lambda prompts: 0 * prompts.targets}
    for expected, predictor in cases.items():
        found = separate(predictor, task, None, 6, generator(1))
        assert found.condition.tolist() == ["novel", "shuffled"]
        assert set(found.follows) == {expected}
        assert found.retrieval_error.isna().all()
        assert found.to_retrieval.isna().all()
    wrong = separate(lambda prompts: -ridge(prompts), task, None, 6, generator(1))
    assert set(wrong.follows) == {"neither"}


EXACT = {
    "tree": {"dim": 3},
    "sine": {"dim": 1},
    "network": {"dim": 3, "hidden": 20},
    "logistic": {"dim": 2, "scale": 5.0},
}
ENOUGH = {"tree": 60, "sine": 6, "network": 20, "logistic": 40, "sparse": 10}


@pytest.mark.parametrize("name", ENOUGH)
def test_exact_answers_are_learning_and_functions_of_the_pool_retrieval_in_every_class(name):
    pytest.importorskip("sklearn")
    task = task_named(name, **EXACT.get(name, {"dim": 5, "noise": 0.5}))
    pool = draw_pool(task, 4, generator())
    exact = separate(lambda prompts: prompts.answers, task, pool, ENOUGH[name], generator(1)).set_index("condition")
    assert exact.follows["novel"] == "learning"
    # Nobody can tell them apart where both are right, nor where an approximate learner fits what is no function.
    assert exact.follows["pool"] == "undecided"
    assert exact.follows["shuffled"] == "undecided"
    assert exact.share["shuffled"] != exact.share["shuffled"]
    retriever = separate(pool.predict, task, pool, ENOUGH[name], generator(1)).set_index("condition")
    assert retriever.follows["novel"] == "retrieval"
    fresh = separate(lambda prompts: prompts.answers, task, None, ENOUGH[name], generator(1)).set_index("condition")
    assert fresh.follows["novel"] == "learning"


@pytest.mark.parametrize("name", ["tree", "sine", "logistic"])
def test_there_is_no_verdict_where_the_learner_itself_is_far_from_the_answers(name):
    pytest.importorskip("sklearn")
    task = task_named(name, dim=5)
    pool = draw_pool(task, 4, generator())
    found = separate(lambda prompts: prompts.answers, task, pool, 10, generator(1)).set_index("condition")
    assert found.follows["novel"] == "undecided"


def test_a_large_pool_is_asked_in_parts(monkeypatch):
    task = task_named("network", dim=2, hidden=10)
    pool = draw_pool(task, 50, generator())
    prompts, whole, sizes = task.draw(6, 5, generator(1)), None, []
    whole = pool.predict(prompts)
    monkeypatch.setattr(pools, "NUMBERS", 3 * 10 * prompts.targets.numel())
    scores = Pool._scores
    monkeypatch.setattr(Pool, "_scores", lambda self, p, which: sizes.append(which) or scores(self, p, which))
    assert_close(pool.predict(prompts), whole)
    assert len(sizes) > 10
    monkeypatch.setattr(hypotheses, "WORK", 1)
    assert set(separate(pool.predict, task, pool, 4, generator(1)).tasks) == {hypotheses.LEAST}


def test_a_pool_of_shifted_functions_has_the_inputs_and_queries_of_the_shift():
    task = task_named("linear", dim=2, noise=0.5)
    scaled = draw_pool(shifted(task, "scale", factor=100.0), 3, generator()).draw(50, 20, generator(1))
    assert 90 < float(scaled.inputs.std()) < 110
    pool = draw_pool(shifted(task, "quadrants"), 3, generator())
    prompts = pool.draw(4, 5, generator(1))
    asked = prompts.truncated(4)
    assert not prompts.queries_are_inputs
    assert_close(pool.predict(prompts)[:, -1], pool.predict(asked)[:, -1])


def test_shuffling_makes_least_squares_fit_what_is_no_function():
    # y is then as good as independent of x: the weights that are fitted have no part in the true ones but by those
    # targets that stay in place, one in n on average.
    task = task_named("linear", dim=2, noise=0.1)
    found = separate(Ridge(0.01), task, None, 20, generator(2)).set_index("condition")
    assert found.learning_error["novel"] < 0.01
    assert found.learning_error["shuffled"] > 0.9 * task.signal
    assert found.apart["shuffled"] < 0.3 * found.apart["novel"]  # about dim / n of the variance of the targets


def test_retrieval_is_bayes_over_the_pool_written_as_a_loop():
    task = task_named("linear", dim=2, noise=0.5)
    pool = draw_pool(task, 3, generator())
    prompts = pool.draw(4, 5, generator(1))
    w, found = pool.parameters["weights"], pool.predict(prompts)
    for t in range(4):
        for i in range(5):
            logs = [
                -sum((prompts.targets[t, j] - w[k] @ prompts.inputs[t, j]) ** 2 for j in range(i)) / 0.5
                for k in range(3)
            ]
            p = torch.softmax(torch.tensor([float(x) for x in logs]), 0)
            assert_close(found[t, i], p @ (w @ prompts.inputs[t, i]), rtol=1e-4, atol=1e-5)


def test_retrieval_from_labels_weighs_functions_by_their_probabilities():
    task = task_named("logistic", dim=2)
    pool = draw_pool(task, 3, generator())
    prompts = pool.draw(4, 5, generator(1))
    w, found = pool.parameters["weights"], pool.predict(prompts)
    for t in range(4):
        scores = prompts.inputs[t] @ w.T
        for i in range(5):
            p = torch.sigmoid(prompts.targets[t, :i, None] * scores[:i]).prod(0)
            assert_close(found[t, i], (p / p.sum()) @ torch.tanh(scores[i] / 2), rtol=1e-4, atol=1e-5)


def test_a_pool_has_at_least_one_function():
    with pytest.raises(UserError, match="size"):
        draw_pool(task_named("linear", dim=2), 0, generator())
