"""Prompts and their layouts as tokens."""

import pytest
import torch

from massieu.checks import UserError
from massieu.context import Linear, Prompts, task_named
from massieu.context.prompts import Interleaved, Pairs, layout_named
from massieu.context.tasks import OrthogonalQueries

LAYOUTS = ["interleaved", "pairs"]


def drawn(outputs=None, examples=6, dim=3):
    task = task_named("linear", dim=dim, noise=0.3, outputs=outputs)
    return task.draw(4, examples, torch.Generator().manual_seed(0), torch.float64)


@pytest.mark.parametrize("outputs", [None, 1, 5])
@pytest.mark.parametrize("name", LAYOUTS)
def test_examples_come_back_from_tokens(name, outputs):
    prompts = drawn(outputs)
    layout = layout_named(name, 3, outputs)
    tokens = layout.tokens(prompts)
    assert tokens.shape[-1] == layout.width
    inputs, targets = layout.examples(tokens)
    assert torch.equal(inputs, prompts.inputs)
    assert torch.equal(targets, prompts.targets[:, : targets.shape[1]])
    assert targets.shape[1] == (6 if name == "interleaved" else 5)  # pairs never show the last target


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_read_knows_its_input_and_not_its_target(name):
    prompts = drawn()
    layout = layout_named(name, 3)
    positions = layout.positions(6)
    for i in range(6):
        changed = prompts.targets.clone()
        changed[:, i] += 1
        before, after = (layout.tokens(Prompts.of(prompts.inputs, y)) for y in (prompts.targets, changed))
        seen = positions[i] + 1
        assert torch.equal(before[:, :seen], after[:, :seen])
        assert torch.equal(before[:, positions[i], :3], prompts.inputs[:, i])
        if i < 5:  # the control: the next reading knows it
            seen = positions[i + 1] + 1
            assert not torch.equal(before[:, :seen], after[:, :seen])


def test_asking_early_is_the_beginning_of_the_prompt():
    prompts = drawn()
    early = prompts.truncated(3)
    assert early.examples == 4
    assert early.queries_are_inputs
    assert torch.equal(early.targets, prompts.targets[:, :4])
    assert torch.equal(early.answers, prompts.answers[:, :4])


def test_a_query_of_its_own_takes_the_last_place():
    prompts = OrthogonalQueries(task_named("linear", dim=6, noise=0.5)).draw(3, 6, torch.Generator().manual_seed(0))
    early = prompts.truncated(4)
    assert torch.equal(early.inputs[:, :4], prompts.inputs[:, :4])
    assert torch.equal(early.inputs[:, 4], prompts.queries[:, 4])
    assert not torch.equal(early.inputs[:, 4], prompts.inputs[:, 4])
    assert torch.equal(early.targets[:, 4], prompts.answers[:, 4])
    assert Pairs(6).tokens(early).shape == (3, 5, 13)


X, Y = torch.zeros(2, 4, 3), torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Prompts.of(torch.zeros(4, 3), torch.zeros(4)), r"for a single task pass inputs\[None\]"),
        (lambda: Prompts.of(torch.zeros(2, 0, 3), torch.zeros(2, 0)), "empty"),
        (lambda: Prompts.of(X, torch.zeros(2, 5)), "targets"),
        (lambda: Prompts(X, Y, torch.zeros(2, 1, 3), Y), "queries"),
        (lambda: Prompts(X, Y, X, torch.zeros(2)), "answers"),
        (lambda: drawn().truncated(6), "length"),
        (lambda: layout_named("rows", 3), "layout"),
        (lambda: Pairs(4).tokens(drawn()), "expects dim 4 and outputs None, got prompts with dim 3"),
        (lambda: Interleaved(3, 2).tokens(drawn()), "build the layout for these prompts"),
        (lambda: Pairs(3).examples(torch.zeros(2, 4, 5)), "tokens"),
        (lambda: Pairs(0), "dim"),
        (lambda: Pairs(3).tokens(OrthogonalQueries(Linear(3)).draw(1, 2, torch.Generator())), "truncated"),
    ],
)
def test_what_is_no_prompt_is_refused_in_one_sentence(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_whole_numbers_are_no_inputs():
    with pytest.raises(UserError, match="inputs"):
        Prompts.of(X.long(), Y)
