"""No reading ends a training: what fails in one is logged once, and the weights are those of an unwatched run."""

from __future__ import annotations

import copy
import csv
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import massieu
from massieu.checks import UserError
from massieu.monitor import Place, Reading, open_sink, read_log
from massieu.taps import sources

ROOT = Path(__file__).resolve().parents[2]
WORDS = torch.randint(10, (2, 8), generator=torch.Generator().manual_seed(0))
HEADS = 512


def small(**options) -> nn.Module:
    torch.manual_seed(0)
    return massieu.nn.Transformer(16, num_layers=2, num_heads=4, vocabulary=10, **options)


def train(model, batches, change=lambda model, step: None, **options):
    """Readings, weights and how many passes there were."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with massieu.watch(model, every=1, **options) as watched:
        for step, batch in enumerate(batches):
            change(model, step)
            model(batch).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert sources._OBSERVERS == []
    assert torch._C._len_torch_function_stack() == 0
    return watched


def said(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("massieu")]


def multihead() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(10, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


@pytest.mark.parametrize("make", [small, multihead])
def test_an_empty_batch_is_not_read_and_the_next_one_is(make, caplog):
    watched = train(make(), [WORDS, WORDS[:0], WORDS[:0], WORDS])
    assert [reading.step for reading in watched.readings] == [0, 3]
    assert said(caplog) == ["step 1 is not read: its batch is empty; later empty batches are not reported"]


@pytest.mark.parametrize("heads", [2, 4, 8])
def test_an_attention_module_that_is_replaced_is_read_with_its_own_heads(heads, caplog):
    def change(model, step):
        if step == 1:
            model.blocks[0].attention = massieu.nn.MeasureAttention(16, num_heads=heads, causal=True)

    watched = train(small(), [WORDS] * 3, change)
    assert [reading.places[0].heads for reading in watched.readings] == [4, heads, heads]
    last = watched.readings[-1].heads["entropy"]
    assert bool(last[0, :heads].isfinite().all())
    assert bool(last[0, heads:].isnan().all())
    assert said(caplog) == []


class Copies(nn.Module):
    """Runs copies of its part, as DataParallel does; they share its hooks."""

    def __init__(self, how) -> None:
        super().__init__()
        self.inner, self.how = small(), how

    def forward(self, ids):
        return self.how(self.inner)(ids)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda module: module._replicate_for_data_parallel()])
def test_copies_that_are_made_in_the_forward_pass_switch_the_watch_off(how, caplog):
    torch.manual_seed(0)
    model, twin = Copies(how), Copies(how)
    watched = train(model, [WORDS] * 3)
    assert watched.readings == []
    (sentence,) = said(caplog)
    assert sentence == (
        "massieu.watch stopped reading Copies at step 0: a copy of Transformer was made and called inside the forward"
        " pass; the training goes on, without readings"
    )
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(3):
        twin(WORDS).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), twin.parameters(), strict=True))


def test_a_deep_copy_that_the_forward_pass_keeps_runs_later_as_an_unwatched_model_does(caplog):
    kept = []

    class Keeps(Copies):
        def forward(self, ids):
            kept.append(self.how(self.inner))
            return self.inner(ids)

    model = Keeps(copy.deepcopy)
    with massieu.watch(model, every=1) as watched:
        expected = model(WORDS)
        assert torch.equal(kept[0](WORDS), expected)
    assert torch.equal(kept[0](WORDS), expected)
    assert len(watched.readings) == 1
    assert said(caplog) == []


def test_a_copy_that_runs_beside_the_model_is_not_read(caplog):
    model = small()
    with massieu.watch(model, every=1) as watched:
        copy.copy(model)(WORDS)
        assert watched.readings == []
        model(WORDS)
    assert len(watched.readings) == 1
    assert said(caplog) == ["a copy of Transformer ran, which is not read: massieu.watch reads the model it was given"]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (massieu.monitor.observation, "add_call"),
        (massieu.monitor.observation, "score_sizes"),
        (massieu.monitor.observation, "hidden_tensors"),
        (massieu.monitor.pass_reader, "Observation"),
        (massieu.taps.translation, "from_attend"),
        (sys.modules["massieu.taps.tap"], "frame"),
        (massieu.monitor.step_counter.WeightUpdates, "compare"),
        (massieu.monitor.step_counter.WeightUpdates, "store"),
        (massieu.monitor.step_counter.StepCounter, "advance"),
        (massieu.monitor.flags.Flags, "update"),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_whatever_fails_in_a_reading_is_logged_once_in_one_line(owner, name, compiled, monkeypatch, caplog):
    def fails(*args, **kwargs):
        raise RuntimeError("it broke\nin the second line, too")

    model = small()
    plain = copy.deepcopy(model)
    monkeypatch.setattr(owner, name, fails)
    if compiled:
        monkeypatch.setattr(massieu.monitor.pass_reader, "is_compiled", lambda model: True)
    watched = train(model, [WORDS] * 3)
    monkeypatch.undo()
    (sentence,) = said(caplog)
    assert "massieu.watch stopped reading Transformer at step" in sentence
    assert "RuntimeError: it broke; the training goes on" in sentence
    assert "\n" not in sentence
    assert len(watched.readings) <= 1
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        plain(WORDS).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_pass_of_no_attention_later_in_the_training_is_logged(caplog):
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.passes = small(), 0

        def forward(self, ids):
            self.passes += 1
            return self.inner(ids) if self.passes != 2 else self.inner.embedding(ids)

    watched = train(Skips(), [WORDS] * 3)
    assert [reading.step for reading in watched.readings] == [0]
    assert [("stopped reading Skips at step 1" in each) for each in said(caplog)] == [True]


def test_one_process_that_fails_still_takes_part_in_what_all_exchange(monkeypatch, caplog):
    exchanged = []

    def gather(all_sums):
        exchanged.append(len(all_sums))
        return all_sums

    monkeypatch.setattr(massieu.monitor.observation, "add_call", lambda *args: 1 / 0)
    watched = train(small(), [WORDS] * 3, gather=gather)
    assert exchanged == [0, 0, 0]
    assert watched.readings == []
    assert len(said(caplog)) == 1


def test_a_warning_of_ours_is_no_error_where_warnings_are(tmp_path):
    """Each of these warned into the training: eval mode, a failing log, a CSV of another run, a full disk."""
    code = """
import sys, warnings
import torch, massieu
warnings.simplefilter("error")
model = massieu.nn.Transformer(16, num_layers=1, num_heads=2, vocabulary=10).eval()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def loop(**options):
    with massieu.watch(model, every=1, **options) as watched:
        for _ in range(6):
            model(torch.tensor([[1, 2, 3]])).square().mean().backward()
            optimizer.step()
    return watched
loop()
model.train()
print(len(loop(log=lambda reading: 1 / 0).readings), len(loop(log=sys.argv[1]).readings))
"""
    path = tmp_path / "run.csv"
    path.write_text("step,entropy/layer07/min,flags\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "-c", code, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["6", "6"]
    for words in ("is in eval mode", "failed at step 0 with ZeroDivisionError", "run.csv has 3 columns"):
        assert done.stderr.count(words) == 1


@pytest.mark.parametrize("part", [False, True])
def test_data_parallel_is_refused(part):
    model = nn.DataParallel(small())
    model = nn.Sequential(model, nn.Identity()) if part else model
    with pytest.raises(UserError, match="DataParallel"):
        massieu.watch(model)


HIDDEN = """
import sys, torch
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "massieu":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide())
model = torch.load(sys.argv[1], weights_only=False)
torch.manual_seed(0)
print(float(model(torch.ones(1, 4, dtype=torch.long)).sum().detach()), "massieu" in sys.modules)
"""


def test_a_model_that_is_saved_while_watched_loads_where_massieu_is_not_installed(tmp_path):
    model = multihead().eval()
    expected = float(model(torch.ones(1, 4, dtype=torch.long)).sum().detach())
    names = list(model.state_dict())
    with massieu.watch(model.train(), every=1) as watched:
        model(WORDS)
        torch.save(model.eval(), tmp_path / "model.pt")
        twin = copy.deepcopy(model)
        twin(WORDS)
        assert list(twin.state_dict()) == list(model.state_dict()) == names
        assert len(watched.readings) == 1
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", HIDDEN, str(tmp_path / "model.pt")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    value, known = done.stdout.split()
    assert float(value) == pytest.approx(expected, rel=1e-5)
    assert known == "False"


@pytest.fixture
def usual_field_limit():
    """The limit of csv is global to the process, and readers of documents raise it."""
    before = csv.field_size_limit(131072)
    yield csv.field_size_limit()
    csv.field_size_limit(before)


def test_a_csv_with_the_flags_of_many_heads_is_read(tmp_path, usual_field_limit):
    place = Place("decoder", 0, "h.0.attn", HEADS)
    broken = Reading(5, (place,), {"broken_rows": torch.ones(1, HEADS, dtype=torch.float64)})
    flags = massieu.monitor.flags.Flags().update(broken)
    assert len(flags) == HEADS
    sink = open_sink(tmp_path / "run.csv")
    sink(Reading(5, (place,), broken.heads, {}, flags))
    sink.close()
    (_, row) = (tmp_path / "run.csv").read_text().splitlines()
    assert len(row) > usual_field_limit
    log = read_log(tmp_path / "run.csv")
    assert (log.steps, log.broken, len(log.raised)) == ([5], 0, HEADS)
    assert [flag["reason"] for flag in log.flags] == [flag.reason for flag in flags]


GOOD = Reading(3, (Place("decoder", 0, "h", 2),), {"entropy": torch.ones(1, 2)}, {"token_cosine": torch.ones(1)})
FLAG = {
    "name": "f",
    "stack": "decoder",
    "layer": 0,
    "head": None,
    "value": 1.0,
    "threshold": 2.0,
    "reason": "r",
    "reference": "x",
}


@pytest.mark.parametrize(
    "change",
    [
        {"places": [["decoder", 0, "h", 300_000_000]]},
        {"places": [["decoder", 0, "h", 3e8]]},
        {"places": [["decoder", 0, "h", -1]]},
        {"places": [["decoder", "0", "h", 2]]},
        {"places": [["decoder", 0, "h", 2]] * 2},
        {"step": float("inf")},
        {"step": 1.5},
        {"step": True},
        {"step": -1},
        {"step": 10**30},
        {"layers": {"token_cosine": [1.0, 2.0]}},
        {"layers": {"token_cosine": [10**400]}},
        {"heads": {"entropy": [[[1.0], 2.0]]}},
        {"flags": [{**FLAG, "layer": "0"}]},
        {"flags": [{**FLAG, "layer": float("inf")}]},
        {"flags": [{**FLAG, "head": [1]}]},
        {"flags": [{**FLAG, "name": ["f"]}]},
        {"flags": [{**FLAG, "state": "lost"}]},
        {"flags": [{**FLAG, "reason": None}]},
    ],
)
def test_a_line_that_claims_what_it_does_not_hold_is_a_bad_line(change, tmp_path):
    path = tmp_path / "run.jsonl"
    lines = [json.dumps(GOOD.to_dict()), json.dumps({**GOOD.to_dict(), "step": 4, **change})]
    path.write_text("\n".join(lines).replace("Infinity", "1e999") + "\n")
    log = read_log(path)
    assert (log.steps, log.broken) == ([3], 1)
    log.to_dict()


@pytest.mark.parametrize("line", ["[" * 100_000 + "]" * 100_000, '{"step": ' * 100_000, "[]", "3", "null", "\x00"])
def test_a_line_that_is_no_reading_is_a_bad_line(line, tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(f"{json.dumps(GOOD.to_dict())}\n{line}\n")
    assert (read_log(path).steps, read_log(path).broken) == ([3], 1)


@pytest.mark.parametrize(
    "row", ["1e999,1,", "-1,1,", "x,1,", "4,what,", "4,1,[]]", '4,1,"[{""name"": 3}]"', "4,1", '4,1,"[']
)
def test_a_row_that_is_no_reading_is_a_bad_line(row, tmp_path):
    path = tmp_path / "run.csv"
    path.write_text(f"step,entropy/layer00/min,flags\n3,1.0,\n{row}\n")
    log = read_log(path)
    assert (log.steps, log.broken) == ([3], 1)


def test_sentences_go_to_a_logger_that_can_be_silenced(caplog):
    caplog.set_level(logging.ERROR, logger="massieu.watch")
    train(small(), [WORDS, WORDS[:0]])
    assert said(caplog) == []
