import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from massieu.inspection.response import Response, jackknife_error, linear_response, response_r2
from massieu.taps import AttentionCall


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def call(**options):
    fields = {
        **{"name": "", "number": 0, "layer": 0, "stack": "decoder", "module": nn.Identity(), "present": None},
        **{"query": draw(2, 4, 70, 3), "key": draw(2, 2, 70, 3, seed=1), "value": draw(2, 2, 70, 5, seed=2)},
        **{"log_weight": None, "scale": 0.5, "causal": False, "window": None, "sink": None, "softcap": None},
        **{"scores": None, "output": None},
    }
    return AttentionCall(**{**fields, **options})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "window": 9},
        {"log_weight": draw(1, 4, 70, 70, seed=3)},
        {"log_weight": torch.arange(70) < 50},
        {"sink": draw(4, seed=4)},
    ],
)
def test_it_is_the_derivative_of_attention_at_the_zero_query(options):
    seen = call(**options)
    size = torch.tensor(0.0, dtype=torch.float64)
    zero, slope = torch.autograd.functional.jvp(lambda size: attention(seen, size * seen.query), size, size + 1)
    assert_close(linear_response(seen, seen.key), zero + slope)


def attention(seen, query):
    """Attention written out."""
    key, value = (x.repeat_interleave(2, dim=1) for x in (seen.key, seen.value))
    score = seen.scale * query @ key.mT
    if seen.log_weight is not None:
        bias = seen.log_weight
        score = score.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else score + bias
    distance = torch.arange(70)[:, None] - torch.arange(70)
    if seen.causal:
        score = score.masked_fill(distance < 0, -torch.inf)
    if seen.window:
        score = score.masked_fill(distance.abs() >= seen.window, -torch.inf)
    if seen.sink is not None:
        score = torch.cat([score, seen.sink[:, None, None].expand(2, 4, 70, 1)], dim=-1)
        value = torch.cat([value, torch.zeros(2, 4, 1, 5, dtype=torch.float64)], dim=2)
    return score.softmax(-1) @ value


def test_r2_is_the_median_over_heads_of_all_tokens():
    target = draw(30, 3, 4)
    predicted = target + draw(30, 3, 4, seed=1) * torch.tensor([0.0, 0.5, 2.0])[:, None]
    passages = [Response.of(predicted[rows], target[rows]) for rows in (slice(0, 7), slice(7, 30))]
    error = (predicted - target).square().sum((0, 2))
    expected = 1 - error / (target - target.mean(0)).square().sum((0, 2))
    assert_close(response_r2(passages), float(expected[1]), rtol=1e-9, atol=1e-9)


def test_a_head_without_variation_does_not_count():
    target = torch.ones(5, 2, 3)
    target[:, 0] = draw(5, 3).float()
    assert response_r2([Response.of(target, target)]) == 1
    assert math.isnan(response_r2([Response.of(target[:, 1:], target[:, 1:])]))


def test_the_standard_error_says_how_far_the_value_of_another_sample_lies():
    # Errors of passages vary by half of their mean, as in real models.
    def sample(seed, count):
        noise = (draw(count, seed=seed) / 4).exp()
        target = draw(count, 20, 6, 3, seed=seed + 1)
        predicted = target + noise[:, None, None, None] * draw(count, 20, 6, 3, seed=seed + 2)
        return [Response.of(*each) for each in zip(predicted, target, strict=True)]

    truth = response_r2(sample(1, 4000))
    found = [sample(seed, 32) for seed in range(10, 1210, 3)]
    values = torch.tensor([response_r2(each) for each in found])
    errors = torch.tensor([jackknife_error(each, range(32)) for each in found])
    assert 0.75 < float(errors.square().mean().sqrt() / values.std()) < 1.25
    assert float(((values - truth).abs() > 2 * errors).double().mean()) < 0.1
    assert math.isnan(jackknife_error(found[0], ["one"] * 32))
