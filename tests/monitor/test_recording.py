"""Values that a training records beside its readings: in logs, views and tables."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy
import pytest
import torch

import massieu
from massieu.monitor import Place, Reading, open_sink, read_log

WORDS = torch.tensor([[1, 2, 3, 4]])


def losses(steps, every=1, **options):
    """A training that records its loss behind each update; the watch and the losses."""
    torch.manual_seed(0)
    model, found = massieu.nn.Transformer(16, 1, 2, vocabulary=10), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with massieu.watch(model, every=every, console=False, **options) as watched:
        for _ in range(steps):
            loss = model(WORDS).square().mean()
            loss.backward()
            optimizer.step()
            watched.record(loss=loss)
            found.append(loss.item())
    return watched, found


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_the_loss_of_a_step_is_logged_with_the_reading_of_the_same_step(tmp_path, ending):
    path = tmp_path / f"run.{ending}"
    watched, found = losses(5, every=2, log=path)
    assert len(set(found)) == 5
    log = read_log(path)
    assert (log.steps, log.broken) == ([0, 2, 4], 0)
    assert [row["loss"] for row in log.rows] == found[::2]
    assert log.to_dict()["series"]["loss"] == found[::2]
    assert [each.recorded["loss"] for each in watched.readings] == found[::2]


def test_a_callable_gets_each_reading_with_its_loss():
    seen = []
    _, found = losses(3, log=lambda reading: seen.append((reading.step, reading.recorded["loss"])))
    assert seen == list(enumerate(found))


def test_the_history_has_a_column_for_the_loss():
    pytest.importorskip("pandas")
    watched, found = losses(4)
    assert watched.history["loss"].tolist() == found


def test_the_history_knows_the_loss_of_a_step_that_has_not_ended():
    pytest.importorskip("pandas")
    model = massieu.nn.Transformer(16, 1, 2, vocabulary=10)
    with massieu.watch(model, every=1) as watched:
        model(WORDS)
        watched.record(loss=2.5)
        assert watched.history["loss"].tolist() == [2.5]


@pytest.mark.parametrize(
    "value", [2, 2.5, True, numpy.float32(2.5), torch.tensor(2.5), torch.tensor([2.5], requires_grad=True)]
)
def test_numbers_of_every_kind_are_recorded(value):
    model = massieu.nn.Transformer(16, 1, 2, vocabulary=10)
    with massieu.watch(model, every=1) as watched:
        model(WORDS)
        watched.record(loss=value)
    assert watched.readings[0].recorded == {"loss": float(torch.as_tensor(value).detach())}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"loss": torch.ones(3)}, r"loss must .* shape \(3,\)"),
        ({"loss": None}, "loss must .* NoneType"),
        ({"a/b": 1.0}, "name .* 'a/b'"),
        ({"step": 1}, "name .* 'step'"),
        ({"flags": 1}, "name .* 'flags'"),
    ],
)
def test_what_cannot_be_recorded_is_one_sentence(values, sentence):
    watched = massieu.watch(massieu.nn.Transformer(16, 1, 2, vocabulary=10))
    with pytest.raises(massieu.checks.UserError, match=sentence):
        watched.record(**values)
    watched.close()


def test_a_tensor_whose_device_failed_does_not_end_the_training():
    class Failed(torch.Tensor):
        def __float__(self):
            raise RuntimeError("CUDA error: device-side assert triggered")

        def detach(self):
            return self

        def clone(self):
            return self

    model = massieu.nn.Transformer(16, 1, 2, vocabulary=10)
    with massieu.watch(model, every=1) as watched:
        model(WORDS)
        watched.record(loss=torch.tensor(1.0).as_subclass(Failed))
    assert math.isnan(watched.readings[0].recorded["loss"])


@pytest.mark.parametrize("recorded", [[1.0], {"a/b": 1.0}, {"step": 1.0}, {"loss": "what"}, {"loss": [1.0]}, 7])
def test_a_line_with_other_recorded_values_is_refused(recorded):
    reading = Reading(3, (Place("decoder", 0, "h", 1),), {"entropy": torch.ones(1, 1)}, recorded={"loss": 2.5})
    values = reading.to_dict()
    assert Reading.from_dict(values).recorded == {"loss": 2.5}
    with pytest.raises(massieu.checks.UserError, match="a reading must"):
        Reading.from_dict({**values, "recorded": recorded})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_written_and_read_back(tmp_path, value):
    reading = Reading(3, (Place("decoder", 0, "h", 1),), {"entropy": torch.ones(1, 1)}, recorded={"loss": value})
    sink = open_sink(tmp_path / "run.jsonl")
    sink(reading)
    sink.close()
    assert read_log(tmp_path / "run.jsonl").rows[0].get("loss", math.nan) == pytest.approx(value, nan_ok=True)


def test_the_weights_are_those_of_a_run_that_records_nothing():
    code = (
        "import sys, torch, massieu\n"
        "torch.manual_seed(0)\n"
        "model = massieu.nn.Transformer(16, 1, 2, vocabulary=10)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "watched = massieu.watch(model, every=1) if sys.argv[1] == 'watched' else None\n"
        "for _ in range(3):\n"
        "    loss = model(torch.tensor([[1, 2, 3]])).square().mean()\n"
        "    if watched: watched.record(loss=loss)\n"
        "    loss.backward(); optimizer.step()\n"
        "print(sum(p.double().sum().item() for p in model.parameters()))\n"
    )
    ends = [
        subprocess.run([sys.executable, "-c", code, kind], check=True, capture_output=True, text=True).stdout
        for kind in ("watched", "alone")
    ]
    assert ends[0] == ends[1]
