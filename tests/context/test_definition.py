"""The definition of learning in a context: verdicts, intervals that hold the risk, and what is refused."""

import pytest
import torch

from massieu.checks import UserError
from massieu.context import LeastSquares, Linear, LinearModel, Prompts, Ridge, learns_in_context
from massieu.context.definition import squared_error
from massieu.context.predictors import Averaging
from massieu.context.tasks import Sine

LEARNER = Averaging()
RISK = 1.0  # of averaging in 2 dimensions after 6 examples: d (d + 1) / i


def draws(seed=0):
    return torch.Generator().manual_seed(seed)


def test_verdicts_are_on_the_side_of_the_known_risk():
    for epsilon, verdict in ((0.5, False), (RISK, None), (1.5, True)):
        found = learns_in_context(Averaging(), Linear(2), epsilon, examples=6, generator=draws())
        assert found.verdict is verdict
        assert found.lower < RISK < found.upper
        assert found.lower < found.risk < found.upper
        assert found.epsilon == epsilon


def test_the_normal_interval_holds_the_risk_as_often_as_it_says():
    task, options = Linear(2), {"examples": 6, "tasks": 1024, "confidence": 0.9}
    found = [learns_in_context(Averaging(), task, 1.0, generator=draws(seed), **options) for seed in range(400)]
    share = sum(each.lower <= RISK <= each.upper for each in found) / 400
    assert 0.85 < share < 0.95  # 0.9 within three standard errors, skew included


def test_the_interval_of_bounded_losses_holds_the_risk_at_least_as_often_with_few_tasks():
    def cut(predicted, answers):
        return squared_error(predicted, answers).clamp(max=4.0)

    options = {"examples": 6, "loss": cut, "bound": 4.0, "confidence": 0.9}
    risk = learns_in_context(Averaging(), Linear(2), 1.0, tasks=200_000, generator=draws(1000), **options).risk
    found = [
        learns_in_context(Averaging(), Linear(2), 1.0, tasks=40, generator=draws(seed), **options)
        for seed in range(200)
    ]
    assert sum(each.lower <= risk <= each.upper for each in found) >= 0.9 * 200
    wide, narrow = (
        learns_in_context(Averaging(), Linear(2), 1.0, tasks=count, generator=draws(), **options)
        for count in (40, 4000)
    )
    assert narrow.upper - narrow.lower < 0.2 * (wide.upper - wide.lower)


def test_the_bernstein_interval_is_the_formula():
    prompts = Linear(1).draw(50, 3, draws(3))
    losses = squared_error(0 * prompts.answers[:, -1], prompts.answers[:, -1]).double()
    found = learns_in_context(
        lambda asked: 0 * asked.targets,
        Linear(1),
        1.0,
        examples=2,
        tasks=50,
        bound=1e3,
        confidence=0.95,
        generator=draws(3),
    )
    nats = torch.tensor(4 / 0.05).log().item()
    half = losses.std().item() * (2 * nats / 50) ** 0.5 + 7 * 1e3 * nats / (3 * 49)
    assert found.upper - found.risk == pytest.approx(half)
    assert found.risk == pytest.approx(losses.mean().item())


def test_the_query_is_asked_after_all_examples_whatever_the_model():
    task = Linear(2, noise=0.5)
    by_predictor, by_function = (
        learns_in_context(model, task, 1.0, examples=5, generator=draws())
        for model in (Ridge(0.25), lambda prompts: Ridge(0.25)(prompts))
    )
    assert by_predictor == pytest.approx(by_function)
    expected = Ridge(0.25).variance(task.draw(20_000, 6, draws(1)), [5]).mean()  # posterior variance, without the noise
    assert by_predictor.lower < expected < by_predictor.upper
    model = LinearModel(2, generator=draws())
    assert learns_in_context(model, task, 1.9, examples=5, generator=draws()).risk < 2.1


def test_several_outputs_count_together():
    task = Linear(2, outputs=3)
    found = learns_in_context(LeastSquares(), task, 1e-6, examples=0, generator=draws())
    assert found.lower < 6 < found.upper
    assert (
        learns_in_context(lambda asked: 0 * asked.targets, Sine(1), 1.0, examples=2, generator=draws()).verdict is False
    )


def test_arguments_are_checked():
    def refused(match, model=LEARNER, epsilon=1.0, **options):
        with pytest.raises(UserError, match=match):
            learns_in_context(model, Linear(2), epsilon, **{"examples": 3, "generator": draws(), **options})

    refused("epsilon", epsilon=-1.0)
    refused("confidence", confidence=1.0)
    refused("bound", bound=0.0)
    refused("tasks", tasks=50)
    refused("losses", bound=0.01)
    refused("shape", loss=lambda found, _: found.mean())
    refused("not finite", loss=lambda found, _: found / 0)
    refused("model", model=lambda prompts: prompts.inputs)


def test_a_function_of_prompts_sees_no_answer_but_in_the_place_of_the_query():
    seen = []

    def model(prompts: Prompts):
        seen.append(prompts)
        return 0 * prompts.targets

    learns_in_context(model, Linear(2), 1.0, examples=4, tasks=128, generator=draws())
    assert (seen[0].tasks, seen[0].examples) == (128, 5)
    assert not seen[0].targets[:, -1].any()
    assert not seen[0].answers.any()
