"""A pass that is run only to be read leaves no trace."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

import massieu
from massieu.monitor.restore_state import restored_state

WORDS = torch.randint(10, (2, 8), generator=torch.Generator().manual_seed(0))


class Stateful(nn.Module):
    """A module that has a state of every kind, on which its output depends."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = massieu.nn.Transformer(16, num_layers=1, num_heads=4, vocabulary=10)
        self.register_buffer("assigned", torch.zeros(()))
        self.register_buffer("written", torch.zeros(()))
        self.register_buffer("undefined", torch.full((2,), torch.nan))
        self.register_buffer("late", None)
        self.count, self.plain = 0, torch.zeros(())
        self.generator = torch.Generator().manual_seed(0)
        self.more = {"noise": torch.Generator().manual_seed(1)}

    def forward(self, ids):
        self.assigned = self.assigned + 1
        self.written += 2
        self.late = self.written.clone() if self.late is None else self.late + 3
        self.count += 1
        self.plain.add_(1)
        noise = torch.rand((), generator=self.generator) + torch.rand((), generator=self.more["noise"])
        noise = noise + torch.rand(()) + np.random.rand() + random.random()
        state = self.assigned + self.written + self.late + self.count + self.plain
        return self.inner(ids) * noise * (1 + 0.1 * state)

    def state(self) -> list:
        buffers = [self.assigned, self.written, self.undefined, self.late, self.plain, self.count]
        generators = [self.generator, self.more["noise"], torch.default_generator]
        drawn = [generator.get_state().tolist() for generator in generators]
        return [*map(str, buffers), *drawn, random.getstate(), str(np.random.get_state())]


def test_every_kind_of_state_is_put_back():
    model = Stateful()
    before, tensors = model.state(), [model.assigned, model.written, model.plain]
    version = model.undefined._version
    with restored_state(model):
        model(WORDS)
        assert model.state() != before
    assert model.state() == before
    assert all(x is y for x, y in zip(tensors, [model.assigned, model.written, model.plain], strict=True))
    # What was not written may be part of a graph.
    assert model.undefined._version == version


def test_it_is_put_back_after_an_exception_too():
    model = Stateful()
    before = model.state()
    with pytest.raises(ValueError, match="word numbers"), restored_state(model):
        model(WORDS + 10)
    assert model.state() == before
    assert torch.is_autocast_cache_enabled()


def test_casts_that_are_made_inside_are_not_kept():
    weight = nn.Linear(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        with restored_state(weight):
            assert not torch.is_autocast_cache_enabled()
            weight(torch.randn(2, 4))
        assert torch.is_autocast_cache_enabled()
        weight(torch.randn(2, 4)).sum().backward()
    assert weight.weight.grad is not None


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_compiled_model_with_state_trains_as_it_would():
    found = []
    for watched in (False, True):
        torch.compiler.reset()
        random.seed(0)
        np.random.seed(0)
        model = Stateful()
        compiled = torch.compile(model, backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watch = massieu.watch(compiled, every=1) if watched else None
        for _ in range(3):
            compiled(WORDS).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if watch is not None:
            assert [reading.step for reading in watch.readings] == [0, 1, 2]
            watch.close()
        found.append((model.state(), {name: value.clone() for name, value in model.inner.state_dict().items()}))
    (state, weights), (own_state, own_weights) = found
    assert state == own_state
    assert all(torch.equal(value, own_weights[name]) for name, value in weights.items())
