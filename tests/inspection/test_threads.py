"""A model that several threads inspect gives the numbers of one inspection after the other, or a sentence."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pandas
import pytest
import torch

pytest.importorskip("transformers")

from massieu import assets
from massieu.inspection import inspect_model
from massieu.models.evaluation import evaluating
from massieu.models.loading import load
from massieu.taps import tap

DOCUMENTS = assets.documents()
RUNS = 6


@pytest.fixture
def loaded():
    return load(str(assets.MODEL))


@pytest.mark.parametrize("experiments", ["heads", "default"])
def test_inspections_of_one_model_in_several_threads_give_the_tables_of_one_after_the_other(loaded, experiments):
    texts = [DOCUMENTS[number : number + 2] for number in range(RUNS)]

    def tables(own):
        found = inspect_model(loaded.model, own, tokenizer=loaded.tokenizer, experiments=experiments)
        return found.heads, found.layers

    right = [tables(own) for own in texts]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(tables, texts))
    for found, alone in zip(together, right, strict=True):
        for mine, expected in zip(found, alone, strict=True):
            pandas.testing.assert_frame_equal(mine, expected, check_exact=True)


def entered(model: torch.nn.Module) -> tuple[threading.Thread, threading.Event]:
    """A thread that evaluates the model as soon as it may, and what says that it did."""
    inside = threading.Event()

    def enter() -> None:
        with evaluating(model):
            inside.set()

    thread = threading.Thread(target=enter)
    thread.start()
    return thread, inside


def test_a_model_is_evaluated_by_one_thread_at_a_time_and_so_are_its_parts_and_what_contains_it(loaded):
    part, whole = loaded.model.h[0], torch.nn.Sequential(loaded.model)
    with evaluating(loaded.model):
        waiting = [entered(each) for each in (loaded.model, part, whole)]
        other, inside = entered(torch.nn.Linear(2, 2))
        other.join(timeout=60)
        assert inside.is_set()
        with evaluating(loaded.model):  # the same thread again
            assert not any(inside.wait(0.1) for _, inside in waiting)
    for thread, inside in waiting:
        thread.join(timeout=60)
        assert inside.is_set()


def test_a_model_is_free_again_after_an_error(loaded):
    with pytest.raises(RuntimeError), evaluating(loaded.model):
        raise RuntimeError
    thread, inside = entered(loaded.model)
    thread.join(timeout=60)
    assert inside.is_set()


def test_passes_of_another_thread_are_neither_counted_nor_changed(loaded):
    ended, results, tokens = threading.Event(), [], torch.arange(6)[None]

    def run() -> None:
        with torch.no_grad():
            while not ended.is_set():
                results.append(loaded.model(tokens).last_hidden_state)

    right = inspect_model(loaded.model, DOCUMENTS[:2], tokenizer=loaded.tokenizer)
    with torch.no_grad():
        alone = loaded.model(tokens).last_hidden_state
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(run)
        try:
            found = inspect_model(loaded.model, DOCUMENTS[:2], tokenizer=loaded.tokenizer)
        finally:
            ended.set()
        running.result()
    pandas.testing.assert_frame_equal(found.heads, right.heads, check_exact=True)
    pandas.testing.assert_frame_equal(found.layers, right.layers, check_exact=True)
    assert len(results) > 10
    # Some experiments choose the attention kernel of torch for the whole process, which changes last digits.
    assert max((each - alone).abs().max().item() for each in results) < 1e-4 * alone.abs().max().item()


@pytest.mark.parametrize("this_thread", [False, True])
def test_a_tap_observes_the_passes_of_every_thread_unless_it_is_told_not_to(loaded, this_thread):
    callers, tokens = [], torch.arange(6)[None]
    receive = lambda call: callers.append(threading.get_ident())  # noqa: E731
    with torch.no_grad(), tap(loaded.model, receive, this_thread=this_thread):
        thread = threading.Thread(target=loaded.model, args=(tokens,))
        thread.start()
        thread.join()
        assert set(callers) == (set() if this_thread else {thread.ident})
        loaded.model(tokens)
        assert threading.get_ident() in callers
