"""Which passes are steps of training, and what is said where none is."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint
from monitor.expected_messages import logs

import massieu

WORDS = torch.randint(10, (2, 8), generator=torch.Generator().manual_seed(0))


def small() -> massieu.nn.Transformer:
    torch.manual_seed(0)
    return massieu.nn.Transformer(16, num_layers=1, num_heads=4, vocabulary=10)


def train(model, optimizer, count: int) -> None:
    for _ in range(count):
        model(WORDS).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("fused", [False, True])
def test_training_in_eval_mode_is_mentioned_once(fused):
    model = small().eval()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    with massieu.watch(model, every=1) as watched, logs("eval mode") as said:
        train(model, optimizer, 10)
    assert len(said) == 1
    assert watched.readings == []


def test_a_model_that_is_checkpointed_as_a_whole_in_the_older_way_is_mentioned():
    model, tokens = massieu.nn.MeasureAttention(8, num_heads=2), torch.randn(1, 5, 8, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop() -> None:
        for _ in range(4):
            torch.utils.checkpoint.checkpoint(model, tokens, use_reentrant=True).square().mean().backward()
            optimizer.step()

    with massieu.watch(model, every=1), logs("runs without gradients"):
        loop()


def test_evaluation_before_and_between_training_is_not_mentioned():
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with logs(), massieu.watch(model, every=1) as watched:
        for _ in range(5):
            model.eval()(WORDS)  # with unused gradients
        model.load_state_dict(small().state_dict())
        for _ in range(5):
            model.eval()(WORDS)
            train(model.train(), optimizer, 1)
    assert [reading.step for reading in watched.readings] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("fused", [False, True])
def test_weights_that_were_assigned_are_followed(fused):
    model = small()
    with massieu.watch(model, every=1) as watched:
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
        train(model, torch.optim.AdamW(model.parameters(), fused=fused), 4)
    assert [reading.step for reading in watched.readings] == [0, 1, 2, 3]


def test_from_the_first_call_of_step_on_nothing_else_counts():
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with massieu.watch(model, every=1) as watched:
        train(model, optimizer, 1)
        watched.step()
        train(model, optimizer, 3)
        watched.step()
        train(model, optimizer, 2)
    assert [reading.step for reading in watched.readings] == [0, 1, 2]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:`torch.jit")
def test_a_model_with_a_part_in_torchscript():
    model = torch.nn.Sequential(torch.jit.script(torch.nn.Linear(8, 8)), massieu.nn.MeasureAttention(8, num_heads=2))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with massieu.watch(model, every=1) as watched:
        for _ in range(3):
            model(torch.randn(1, 5, 8)).square().mean().backward()
            optimizer.step()
    assert [reading.step for reading in watched.readings] == [0, 1, 2]
