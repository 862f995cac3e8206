"""A watch as it shows itself: one line, and a table in a notebook."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
import torch

import massieu

WORDS = torch.tensor([[1, 2, 3, 4]])
LOW = massieu.monitor.Rule("<low> entropy", "entropy", "<", 10.0, 11.0, "it is made to be raised", "nobody")


class Balanced(HTMLParser):
    """Collects the cells of tables and sees that every element is closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.cells = [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.cells += [""] if tag in ("td", "th") else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] in ("td", "th"):
            self.cells[-1] += data


def watched_run(steps, **options):
    torch.manual_seed(0)
    model = massieu.nn.Transformer(16, 3, 4, vocabulary=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watched = massieu.watch(model, every=1, console=False, **options)
    for _ in range(steps):
        loss = model(WORDS).square().mean()
        watched.record(loss=loss)
        loss.backward()
        optimizer.step()
    return watched


def test_a_watch_is_one_short_line(tmp_path):
    path = tmp_path / "run.jsonl"
    watched = watched_run(0, log=path)
    assert repr(watched) == f"Watch(Transformer, no reading yet, no flag, log {path})"
    watched.close()
    with watched_run(2, rules=[LOW]) as watched:
        line = "Watch(Transformer, 3 layers, 2 readings to step 1, 12 flags: <low> entropy"
        assert repr(watched) == str(watched) == f"{line})"
    assert repr(watched) == f"{line}, closed)"


def test_a_watch_that_stopped_reading_says_so(monkeypatch):
    monkeypatch.setattr(massieu.monitor.pass_reader.PassReader, "reading", lambda self, step, sums: 1 / 0)
    with watched_run(2) as watched:
        assert repr(watched) == "Watch(Transformer, no reading yet, no flag, stopped)"


@pytest.mark.parametrize("steps", [0, 2])
def test_a_notebook_shows_the_last_reading_as_a_table(steps):
    with watched_run(steps, rules=[LOW]) as watched:
        html = watched._repr_html_()
        shown = Balanced(html)
    assert "<low>" not in html
    if not steps:
        assert "no reading yet" in html
        return
    assert re.search(rf"step 1, loss {watched.readings[-1].recorded['loss']:.4g}", html)
    assert [cell for cell in shown.cells if cell.startswith("layer")] == ["layer", "layer00", "layer01", "layer02"]
    assert shown.cells.count("<low> entropy") == 3
    entropy = watched.readings[-1].heads["entropy"][2]
    assert f"{entropy.min():.3g} {entropy.quantile(0.5):.3g} {entropy.max():.3g}" in shown.cells


def test_a_table_of_chosen_quantities_has_their_columns():
    with watched_run(1, quantities=("token_cosine",)) as watched:
        titles = Balanced(watched._repr_html_()).cells[:3]
    assert titles == ["layer", massieu.monitor.WATCHED["token_cosine"].title, "flags"]
