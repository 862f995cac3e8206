import pytest
import torch
from torch import nn
from torch.testing import assert_close

from massieu.inspection.response import linear_response, response_r2
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


def test_r2_is_the_median_over_sentences_and_heads():
    target = draw(30, 3, 4)
    sequence = torch.arange(30) // 15
    predicted = target.clone()
    predicted[:, 0] = 0
    assert response_r2(predicted, target, sequence, 2) == 1
    worst = response_r2(torch.zeros_like(target), target, sequence, 2)
    assert -0.5 < worst < 0
