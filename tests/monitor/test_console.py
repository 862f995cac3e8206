"""Flags on the console: one line each, once, on stderr, and never the end of a training."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import massieu
from massieu.monitor import Flag, Place, Reading
from massieu.monitor.console import Console
from massieu.monitor.display import MOST
from massieu.monitor.flags import Rule

ROOT = Path(__file__).resolve().parents[2]
WORDS = torch.tensor([[1, 2, 3, 4]])
SHARP = Rule("low entropy", "entropy", "<", 10.0, 11.0, "it is made to be raised", "nobody")


def train(model, steps, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with massieu.watch(model, every=1, **options) as watched:
        for _ in range(steps):
            model(WORDS).square().mean().backward()
            optimizer.step()
    return watched


def reading(step, *heads, layer=0, name="logit growth", layers=1, state="raised"):
    places = tuple(Place("decoder", number, f"h.{number}", 64) for number in range(layers))
    flags = tuple(Flag(name, "decoder", layer, head, 120.0, 100.0, "scores saturate", "x", state) for head in heads)
    return Reading(step, places, flags=flags)


def test_a_flag_is_one_line_on_stderr_and_is_not_repeated_at_later_steps(capsys):
    torch.manual_seed(0)
    watched = train(massieu.nn.Transformer(16, 1, 4, vocabulary=10), 3, rules=[SHARP])
    assert [len(each.flags) for each in watched.readings] == [4, 0, 0]
    out, err = capsys.readouterr()
    assert out == ""
    value = watched.readings[0].flags[0].value
    assert err == (
        "massieu: step 0: low entropy in layer00 (heads 0, 1, 2, 3): it is made to be raised"
        f" (head 0 of layer00 has entropy {value:.3g}, below 10)\n"
    )


def test_without_console_nothing_is_printed(capsys, tmp_path):
    train(massieu.nn.Transformer(16, 1, 4, vocabulary=10), 2, rules=[SHARP], console=False, log=tmp_path / "run.csv")
    assert capsys.readouterr() == ("", "")


def test_a_head_is_named_when_its_own_flag_is_first_raised_and_never_again(capsys):
    console = Console(True)
    console.show(reading(0, 2))
    console.show(reading(1, 2, state="cleared"))
    console.show(reading(2, 2, 5))
    console.show(reading(3, 2))
    assert capsys.readouterr().err.splitlines() == [
        "massieu: step 0: logit growth in layer00 (head 2): scores saturate",
        "massieu: step 2: logit growth in layer00 (head 5)",  # the reason is said once
    ]


def test_many_heads_and_layers_are_counted_in_one_line(capsys):
    console, count = Console(True), MOST + 3
    flags = tuple(flag for layer in range(count) for flag in reading(0, *range(9), layer=layer).flags)
    console.show(Reading(0, reading(0, layers=count).places, flags=flags))
    (line,) = capsys.readouterr().err.splitlines()
    assert "layer00 (9 heads), layer01 (9 heads)" in line
    assert f"layer0{MOST - 1} (9 heads) and 3 more layers: scores saturate" in line
    assert f"layer0{MOST}" not in line


def test_the_name_of_the_flag_is_colored_in_a_terminal_and_control_characters_are_visible(monkeypatch):
    pytest.importorskip("rich")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stderr", Terminal())
    Console(True).show(reading(0, 1, name="[red]bad\x1b[2J"))
    assert "step 0: \x1b[1;31m[red]bad\\x1b[2J\x1b[0m in layer00" in sys.stderr.getvalue()


def test_a_console_that_is_closed_does_not_end_the_training(monkeypatch):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    assert len(train(massieu.nn.Transformer(16, 1, 4, vocabulary=10), 2, rules=[SHARP]).readings) == 2


def test_without_rich_the_line_is_plain(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    Console(True).show(reading(7, 1))
    assert capsys.readouterr().err == "massieu: step 7: logit growth in layer00 (head 1): scores saturate\n"


def test_a_progress_bar_is_left_whole(capsys):
    tqdm = pytest.importorskip("tqdm")
    bar = tqdm.tqdm(total=10, desc="training", file=sys.stderr, mininterval=0)
    bar.update(3)
    capsys.readouterr()
    Console(True).show(reading(7, 1))
    bar.close()
    lines = capsys.readouterr().err.replace("\r", "\n").split("\n")
    assert "massieu: step 7: logit growth in layer00 (head 1): scores saturate" in lines


def test_only_the_first_process_prints(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    Console(True).show(reading(7, 1))
    assert capsys.readouterr().err == ""


def test_the_end_says_where_the_log_is_and_how_to_look_at_it(capsys, tmp_path):
    path = tmp_path / "run.jsonl"
    train(massieu.nn.Transformer(16, 1, 4, vocabulary=10), 2, log=path, rules=[])
    assert capsys.readouterr().err == f"massieu: 2 readings; massieu watch {path} shows the log\n"


def test_a_script_that_does_not_close_its_watch_keeps_the_last_reading(tmp_path):
    code = (
        "import torch, massieu\n"
        "model = massieu.nn.Transformer(16, 1, 4, vocabulary=10)\n"
        f"watched = massieu.watch(model, every=1, log={str(tmp_path / 'run.jsonl')!r})\n"
        "loss = model(torch.tensor([[1, 2, 3]])).square().mean()\n"
        "watched.record(loss=2.5)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert massieu.monitor.read_log(tmp_path / "run.jsonl").rows[0]["loss"] == 2.5
