"""Logs of a watched run: what they hold, and what is left of them after a crash."""

import csv
import errno
import gc
import json
import math
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from monitor.expected_messages import logs

import massieu
from massieu.checks import MissingPackageError, UserError
from massieu.monitor import Flag, Place, Reading, open_sink
from massieu.monitor.line_file import LineFile
from massieu.monitor.logs import Log, read_log

PLACES = (Place("decoder", 0, "h.0.attn", 2), Place("decoder", 1, "h.1.attn", 3))
FLAG = Flag("logit growth", "decoder", 1, 2, 120.0, 100.0, 'scores "saturate", he said', "Dehghani et al. 2023")
ROOT = Path(__file__).resolve().parents[2]
ENDINGS = ["jsonl", "csv"]


def reading(step=0, flags=(), places=PLACES, entropy=1.0):
    heads = torch.full((len(places), 3), entropy, dtype=torch.float64) + torch.arange(3) / 7
    heads[0, 2] = torch.nan
    cosine = torch.full((len(places),), 0.25, dtype=torch.float64)
    cosine[0] = torch.nan
    return Reading(step, places, {"entropy": heads}, {"token_cosine": cosine}, tuple(flags))


def write(path, readings):
    sink = open_sink(path)
    for each in readings:
        sink(each)
    sink.close()


def test_json_lines_hold_every_digit_of_every_head(tmp_path):
    first = reading(3, [FLAG])
    write(tmp_path / "run.jsonl", [first])
    again = Reading.from_dict(json.loads((tmp_path / "run.jsonl").read_text()))
    assert again.to_dict() == first.to_dict()
    assert again.flags == (FLAG,)
    assert torch.equal(again.heads["entropy"].nan_to_num(-1), first.heads["entropy"].nan_to_num(-1))


@pytest.mark.parametrize("per_head", [False, True])
def test_a_csv_is_the_table_of_the_series(tmp_path, per_head):
    pandas = pytest.importorskip("pandas")
    readings = [reading(0), reading(5, [FLAG])]
    sink = open_sink(str(tmp_path / "run.csv"), per_head=per_head)
    for each in readings:
        sink(each)
    table = pandas.read_csv(tmp_path / "run.csv", index_col="step")
    assert list(table.index) == [0, 5]
    wanted = pandas.DataFrame([each.series(per_head) for each in readings], index=table.index)
    pandas.testing.assert_frame_equal(table.drop(columns="flags"), wanted, check_exact=True)
    assert json.loads(table["flags"][5])[0]["reason"] == FLAG.reason
    assert ("entropy/layer01/head02" in table) == per_head


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_log_is_read_as_it_was_written(tmp_path, ending):
    readings = [reading(0), reading(5, [FLAG]), reading(10)]
    path = tmp_path / f"run.{ending}"
    write(path, readings)
    log = read_log(path)
    assert log.steps == [0, 5, 10]
    assert log.rows == [
        {name: value for name, value in each.series().items() if not math.isnan(value)} for each in readings
    ]
    assert [(flag["step"], flag["label"], flag["reason"]) for flag in log.flags] == [(5, "layer01", FLAG.reason)]
    assert (log.restarts, log.broken) == (0, 0)


@pytest.mark.parametrize("ending", ENDINGS)
def test_whatever_is_left_of_the_last_line_is_dropped_and_the_log_goes_on(tmp_path, ending):
    path = tmp_path / f"run.{ending}"
    write(path, [reading(0), reading(5)])
    whole = path.read_bytes()
    last = whole[: whole[:-1].rfind(b"\n") + 1]
    for cut in (len(whole) - 1, len(whole) - 20, len(last) + 1, len(last)):
        path.write_bytes(whole[:cut])
        assert read_log(path).steps == [0]
        write(path, [reading(5), reading(10)])
        assert read_log(path).steps == [0, 5, 10]
        assert read_log(path).broken == 0
        assert path.read_bytes().startswith(last)


def test_half_of_a_header_is_written_anew(tmp_path):
    path = tmp_path / "run.csv"
    path.write_text("step,entr")
    write(path, [reading(0)])
    assert read_log(path).steps == [0]


def test_a_half_line_longer_than_a_block_is_dropped(tmp_path):
    path = tmp_path / "run.jsonl"
    write(path, [reading(0)])
    with path.open("a") as file:
        file.write("x" * 200_000)
    write(path, [reading(5)])
    assert len(path.read_text().splitlines()) == 2


WRITER = """
import sys, torch
from massieu.monitor.reading import Place, Reading
from massieu.monitor.log_sinks import open_sink
sink = open_sink([f"{sys.argv[1]}/run.jsonl", f"{sys.argv[1]}/run.csv"])
places = tuple(Place("decoder", layer, f"h.{layer}", 16) for layer in range(24))
values = {name: torch.rand(24, 16, dtype=torch.float64) for name in "abcdefgh"}
for step in range(int(sys.argv[2]), 10**9):
    sink(Reading(step, places, values))
"""


def start(folder, step):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", WRITER, str(folder), str(step)], env=environment)


def wait_until(path, size, process):
    begin = time.monotonic()
    while not path.exists() or path.stat().st_size < size:
        assert process.poll() is None
        assert time.monotonic() - begin < 60
        time.sleep(0.01)


def test_a_process_killed_while_writing_leaves_whole_lines_and_its_successor_appends(tmp_path):
    logs = [tmp_path / "run.jsonl", tmp_path / "run.csv"]
    before = []
    for _ in range(2):
        sizes = [path.stat().st_size if path.exists() else 0 for path in logs]
        process = start(tmp_path, len(before))
        try:
            for path, size in zip(logs, sizes, strict=True):
                wait_until(path, size + 300_000, process)
                with pytest.raises(UserError, match="is being written already"):
                    open_sink(path)
        finally:
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
        found = [read_log(path) for path in logs]
        for log in found:
            assert log.steps == list(range(len(log.steps)))
            assert len(log.steps) > len(before)
            assert log.broken == 0
        # The second log of a list may lack the last reading; the next run then writes it to the first once more.
        assert 0 <= len(found[0].steps) - len(found[1].steps) <= 1
        assert [log.restarts for log in found] == [int(bool(before))] * 2
        before = found[1].steps


def claimed(path):
    """Whether another process is refused."""
    code = f"from massieu.monitor.log_sinks import open_sink; open_sink({str(path)!r})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    return found.returncode != 0 and "is being written already" in found.stderr


def test_a_log_stays_claimed_while_its_own_process_reads_it(tmp_path):
    path = tmp_path / "run.jsonl"
    sink = open_sink(path)
    sink(reading(0))
    read_log(path)
    path.read_bytes()
    assert claimed(path)
    sink.close()
    assert not claimed(path)


def test_a_log_is_opened_once(tmp_path):
    path = tmp_path / "run.jsonl"
    with pytest.raises(UserError, match="is being written already"):
        open_sink([path, path])
    write(path, [reading(0)])  # what was opened is closed again
    assert read_log(path).steps == [0]


def test_a_log_that_nobody_holds_any_more_is_free(tmp_path):
    sink = open_sink(tmp_path / "run.jsonl")
    del sink
    gc.collect()
    write(tmp_path / "run.jsonl", [reading(0)])


def test_a_worker_that_outlives_the_training_does_not_keep_its_log(tmp_path):
    """Workers of a DataLoader are forks: they hold what was open."""
    path, ready, end = tmp_path / "run.jsonl", os.pipe(), os.pipe()
    sink = open_sink(path)
    child = os.fork()
    if child == 0:  # lives until the other end is closed
        os.close(end[1])
        os.write(ready[1], b".")
        os.read(end[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        sink.close()
        write(path, [reading(0)])
    finally:
        for each in (*ready, *end):
            os.close(each)
        os.waitpid(child, 0)


@pytest.mark.parametrize("ending", ENDINGS)
def test_half_a_line_that_the_disk_took_is_taken_back(tmp_path, monkeypatch, ending):
    path, really = tmp_path / f"run.{ending}", os.write
    sink = open_sink(path)
    sink(reading(0))
    before, calls = path.read_bytes(), []

    def full(file, data):
        calls.append(len(data))
        if len(calls) == 1:
            return really(file, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with logs("could not be written: No space left on device; it will miss readings"):
        sink(reading(5))
    monkeypatch.undo()
    assert len(calls) == 2
    assert path.read_bytes() == before
    sink(reading(10))
    log = read_log(path)
    assert (log.steps, log.broken) == ([0, 10], 0)


def test_a_header_that_found_no_room_is_written_with_the_next_reading(tmp_path, monkeypatch):
    def full(file, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sink = open_sink(tmp_path / "run.csv")
    monkeypatch.setattr(os, "write", full)
    with logs("No space left on device"):
        sink(reading(0))
    monkeypatch.undo()
    sink(reading(5))
    sink(reading(10))
    log = read_log(tmp_path / "run.csv")
    assert (log.steps, log.broken) == ([5, 10], 0)


def test_a_full_disk_costs_readings_but_not_the_training():
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    lines = LineFile(Path("/dev/full"))
    with logs("/dev/full could not be written: No space left on device; it will miss readings"):
        lines.write("{}")
    lines.write("{}")  # said once
    lines.close()


def test_other_columns_are_left_alone_and_the_training_goes_on(tmp_path):
    path = tmp_path / "run.csv"
    write(path, [reading(0)])
    before, seen = path.read_bytes(), []
    sink = open_sink([path, seen.append])
    with logs(
        "at step 5 with UserError: .*run.csv has 10 columns and this run 6 .* is only in one of them.*log to"
        " another file.*the training goes on",
    ):
        sink(reading(5, places=PLACES[:1]))
    sink(reading(10, places=PLACES[:1]))  # said once
    sink.close()
    assert path.read_bytes() == before
    assert [each.step for each in seen] == [5, 10]


def test_columns_in_another_order_are_left_alone(tmp_path):
    path = tmp_path / "run.csv"
    write(path, [reading(0)])
    lines = path.read_text().splitlines()
    columns = lines[0].split(",")
    path.write_text(",".join([columns[0], columns[2], columns[1], *columns[3:]]) + "\n")
    with logs("their order differs"):
        open_sink(path)(reading(5))


def test_a_log_that_raises_is_mentioned_once_and_is_tried_again():
    seen = []

    class Network:
        def __call__(self, found):
            if found.step < 10:
                raise ConnectionError("no route")
            seen.append(found.step)

        def close(self):
            raise TimeoutError

    model = massieu.nn.Transformer(8, 1, 2, vocabulary=10)
    watched = massieu.watch(model, every=5, log=Network())
    with logs("failed") as said:
        for _ in range(16):
            model(torch.tensor([[1, 2, 3]]))
            watched.step()
        watched.close()
    assert said == [
        "log=Network failed at step 0 with ConnectionError: no route; the training goes on, and Watch.readings"
        " keeps the readings that this log misses"
    ]
    assert seen == [10, 15]
    assert [each.step for each in watched.readings] == [0, 5, 10, 15]


def test_a_layer_that_runs_later_is_missing_in_a_csv_and_is_mentioned(tmp_path):
    sink = open_sink(tmp_path / "run.csv")
    sink(reading(0, places=PLACES[:1]))
    with logs("no column for entropy/layer01/min.*log to a .jsonl file"):
        sink(reading(5))
    rows = list(csv.reader((tmp_path / "run.csv").read_text().splitlines()))
    assert [len(row) for row in rows] == [6, 6, 6]


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_run_that_begins_anew_supersedes_what_follows_its_first_step(tmp_path, ending):
    path = tmp_path / f"run.{ending}"
    write(path, [reading(0), reading(5), reading(10, [FLAG])])
    write(path, [reading(5, entropy=2.0), reading(10, entropy=2.0)])
    log = read_log(path)
    assert log.steps == [0, 5, 10]
    assert [row["entropy/layer00/min"] for row in log.rows] == [1.0, 2.0, 2.0]
    assert log.flags == []
    assert log.restarts == 1


@pytest.mark.parametrize("ending", ENDINGS)
def test_flags_of_before_a_restart_count_no_more_unless_they_are_raised_anew(tmp_path, ending):
    path, other = tmp_path / f"run.{ending}", Flag(**{**vars(FLAG), "head": 1})
    write(path, [reading(0, [FLAG, other]), reading(5)])
    write(path, [reading(10, [other]), reading(15)])
    log = read_log(path)
    assert log.steps == [0, 5, 10, 15]
    assert [(flag["step"], flag["head"]) for flag in log.flags] == [(0, 2), (0, 1), (10, 1)]
    assert [(flag["step"], flag["head"]) for flag in log.raised] == [(10, 1)]
    assert (log.restarts, log.broken) == (1, 0)
    write(path, [reading(5)])
    assert (read_log(path).raised, read_log(path).restarts) == ([], 2)


def test_a_run_that_was_restarted_and_is_well_shows_no_flag(tmp_path):
    path, words = tmp_path / "run.jsonl", torch.tensor([[1, 2, 3, 4]])
    rules = [massieu.monitor.Rule("warm", "entropy", ">", bound, bound, "it is warm", "") for bound in (0.1, 99.0)]
    model = massieu.nn.Transformer(8, 1, 2, vocabulary=10)
    for start, rule in zip((0, 3), rules, strict=True):
        with massieu.watch(model, every=1, log=path, start=start, rules=[rule]) as watched:
            for _ in range(3):
                model(words)
                watched.step()
        assert bool(watched.flags) == (start == 0)
    log = read_log(path)
    assert log.steps == [0, 1, 2, 3, 4, 5]
    assert log.raised == []
    assert log.flags != []


def test_a_csv_of_two_runs_is_a_table(tmp_path):
    pandas = pytest.importorskip("pandas")
    for step in (0, 5):
        write(tmp_path / "run.csv", [reading(step)])
    assert list(pandas.read_csv(tmp_path / "run.csv")["step"]) == [0, 5]


def test_a_growing_log_is_followed_line_by_line(tmp_path):
    path = tmp_path / "run.jsonl"
    sink = open_sink(path)
    sink(reading(0))
    log = Log(path)
    assert log.update()
    assert not log.update()
    sink(reading(5))
    with path.open("a") as file:
        file.write('{"step": 7')
    assert log.update()
    assert log.steps == [0, 5]
    path.write_text("")
    log.update()
    assert log.steps == []


def test_raised_flags_are_those_not_cleared(tmp_path):
    path = tmp_path / "run.jsonl"
    cleared = Flag(**{**vars(FLAG), "state": "cleared"})
    other = Flag(**{**vars(FLAG), "head": 1})
    write(path, [reading(0, [FLAG, other]), reading(5, [cleared])])
    assert [(flag["head"], flag["step"]) for flag in read_log(path).raised] == [(1, 0)]


def test_stacks_have_different_names(tmp_path):
    places = (Place("encoder", 0, "e.0", 2), Place("cross", 0, "c.0", 3))
    path = tmp_path / "run.csv"
    write(path, [reading(0, [Flag(**{**vars(FLAG), "stack": "cross", "layer": 0})], places)])
    log = read_log(path)
    assert log.flags[0]["label"] == "cross.layer00"
    assert "entropy/encoder.layer00/max" in log.rows[0]


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("none.jsonl", None, "cannot be read: No such file"),
        ("run.jsonl", "", "holds no reading so far"),
        ("run.jsonl", '{"step": 1', "holds no reading so far"),
        ("run.jsonl", "what\n[]\n", "holds no reading in its 2 lines"),
        ("run.csv", "a,b\n1,2\n", "must begin with the columns of massieu.watch.* got 'a,b'"),
        ("run.csv", "step,a,flags\n0,1,\n", "must begin with the columns of massieu.watch.* got 'step,a,flags'"),
        ("run.csv", "step,entropy/layer00/min,flags\nx,1,\n0,1\n", "holds no reading in its 2 lines"),
        ("run.txt", "", "ends in .jsonl or .csv"),
    ],
)
def test_a_log_that_is_none_gets_one_sentence(tmp_path, name, text, sentence):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=sentence):
        read_log(tmp_path / name)


@pytest.mark.parametrize(
    ("log", "sentence"),
    [
        ("run.txt", "log must be a path"),
        (3, "log must be a path"),
        ("nowhere/run.csv", "no folder nowhere"),
        ("taken.jsonl", "Is a directory"),
    ],
)
def test_a_log_that_cannot_be_written_gets_one_sentence(tmp_path, monkeypatch, log, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.jsonl").mkdir()
    with pytest.raises(UserError, match=sentence):
        open_sink(log)


def test_a_closed_log_says_so(tmp_path):
    sink = open_sink(tmp_path / "run.jsonl")
    sink.close()
    sink.close()
    with logs("run.jsonl is closed"):
        sink(reading(0))


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_tool_that_is_missing_is_named(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingPackageError, match=name):
        open_sink(name)


class Run:
    """Stands in for wandb and trackio, which are not installed everywhere."""

    def __init__(self, name, running):
        run, self.calls = (object() if running else None), []
        # In trackio, run is a module.
        self.run = run if name == "wandb" else types.ModuleType("run")
        if name == "trackio":
            self.context_vars = types.SimpleNamespace(current_run=types.SimpleNamespace(get=lambda: run))

    def __getattr__(self, name):
        if name.startswith("_") or name == "context_vars":
            raise AttributeError(name)

        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return self

        return call


@pytest.mark.parametrize("name", ["wandb", "trackio"])
@pytest.mark.parametrize("running", [True, False])
def test_a_run_of_the_user_is_written_to_and_left_open(monkeypatch, name, running):
    tool = Run(name, running)
    monkeypatch.setitem(sys.modules, name, tool)
    sink = open_sink(name)
    sink(reading(7, [FLAG]))
    sink.close()
    done = [call[0] for call in tool.calls]
    assert ("init" in done) == ("finish" in done) == (not running)
    _, (numbers,), options = next(call for call in tool.calls if call[0] == "log")
    assert numbers["massieu/entropy/layer00/min"] == 1.0
    assert numbers["massieu/flags/raised"] == 1
    assert numbers.get("massieu/step", options.get("step")) == 7
    assert all(math.isfinite(value) for value in numbers.values())


def test_tensorboard_gets_finite_numbers_by_name_and_step():
    seen = []
    writer = types.SimpleNamespace(add_scalar=lambda *call: seen.append(call), flush=lambda: seen.append("flush"))
    sink = open_sink(writer, per_head=True)
    sink(reading(7))
    sink.close()
    assert ("massieu/entropy/layer00/head00", 1.0, 7) in seen
    assert seen[-1] == "flush"
    assert all(math.isfinite(value) for _, value, _ in seen[:-1])


def test_tensorboard_itself_reads_the_curves(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    sink = open_sink("tensorboard")
    sink(reading(7))
    sink.close()
    events = EventAccumulator(str(next((tmp_path / "runs").iterdir())))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("massieu/entropy/layer00/min")] == [(7, 1.0)]


def written(folder):
    """What TensorBoard reads in the only run of a folder: steps and values by tag, and texts by tag."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    tags = events.Tags()
    scalars = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags["scalars"]}
    texts = {
        tag: [event.tensor_proto.string_val[0].decode() for event in events.Tensors(tag)] for tag in tags["tensors"]
    }
    return scalars, texts


def test_tensorboard_gets_a_short_set_of_curves_and_flags_as_sentences(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = massieu.nn.Transformer(8, 3, 2, vocabulary=10)
    low = massieu.monitor.Rule("low entropy", "entropy", "<", 10.0, 11.0, "it is made to be raised", "nobody")
    with massieu.watch(model, every=1, log="tensorboard", console=False, rules=[low]) as watched:
        model(torch.tensor([[1, 2, 3]]))
        watched.record(loss=2.5)
    scalars, texts = written(next((tmp_path / "runs").iterdir()))
    assert all(tag.startswith("massieu/") for tag in (*scalars, *texts))
    assert scalars["massieu/loss"] == [(0, 2.5)]
    reading = watched.readings[0]
    largest = pytest.approx(float(reading.heads["score_max"].max()))
    assert scalars["massieu/score_max/max"] == [(0, largest)]
    medians = [f"massieu/normalized_entropy/layer0{layer}/median" for layer in range(3)]
    assert [scalars[name] for name in medians]
    assert len(scalars) <= len(massieu.monitor.RULES) + len(medians) + 3  # the loss and two counts of flags
    assert scalars["massieu/flags/raised"] == [(0, 6.0)]
    ((tag, (words,)),) = texts.items()
    assert tag.startswith("massieu/flags")
    value = reading.flags[0].value
    assert words == (
        "low entropy raised in layer00 (heads 0, 1), layer01 (heads 0, 1), layer02 (heads 0, 1): it is made to be"
        f" raised (head 0 of layer00 has entropy {value:.3g}, below 10) [nobody]"
    )


@pytest.mark.parametrize("options", [{"heads": True}, {"quantities": ("entropy",)}])
def test_whoever_names_quantities_or_heads_gets_all_curves_of_them(options):
    names, model = [], massieu.nn.Transformer(8, 1, 2, vocabulary=10)
    writer = types.SimpleNamespace(add_scalar=lambda name, *_: names.append(name), flush=lambda: None)
    with massieu.watch(model, every=1, log=writer, console=False, **options):
        model(torch.tensor([[1, 2, 3]]))
    assert {f"massieu/entropy/layer00/{key}" for key in ("min", "median", "max")} <= set(names)


def test_a_watched_run_writes_to_everything_at_once(tmp_path):
    model = massieu.nn.Transformer(8, 1, 2, vocabulary=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    logs = [tmp_path / "run.jsonl", str(tmp_path / "run.csv"), seen.append, [tmp_path / "more.jsonl"]]
    with massieu.watch(model, every=2, log=logs) as watched:
        for _ in range(4):
            model(torch.tensor([[1, 2, 3]])).square().mean().backward()
            optimizer.step()
    assert [each.step for each in seen] == [0, 2]
    for name in ("run.jsonl", "run.csv", "more.jsonl"):
        log = read_log(tmp_path / name)
        assert log.steps == [0, 2]
        wanted = watched.readings[1].series()
        assert log.rows[1] == {key: value for key, value in wanted.items() if not math.isnan(value)}
