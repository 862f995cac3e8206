"""Progress of inspections and commands: a bar in terminals and notebooks, lines in a log."""

import io
import sys
from types import SimpleNamespace

import pytest

from massieu import inspect_model
from massieu.checks import UserError
from massieu.outputs import progress as progress_module
from massieu.outputs.progress import command_progress, progress_bar


class Screen(io.StringIO):
    """A stream with or without a terminal."""

    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal


def drawn(monkeypatch, *, terminal=True, notebook=False, test=False, progress=None, delay=0.0):
    """Return the output of a few steps on stderr."""
    screen = Screen(terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress_module, "DELAY", delay)
    if test:
        monkeypatch.setenv("PYTEST_CURRENT_TEST", "this one")
    else:
        monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)
    shell = SimpleNamespace(kernel=object()) if notebook else None
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    with progress_bar(progress) as tell:
        if tell is None:
            return ""
        for done in range(1, 5):
            tell("reading", done, 4)
            tell("tokens", 100 * done, 0)
        tell("experiments", 0, 0)
    return screen.getvalue()


def test_a_terminal_and_a_notebook_get_a_bar(monkeypatch):
    for place in ({"terminal": True}, {"terminal": False, "notebook": True}):
        text = drawn(monkeypatch, **place)
        assert "reading" in text
        assert "4/4" in text
        assert "experiments" in text


def test_nothing_is_drawn_within_the_first_two_seconds(monkeypatch):
    assert progress_module.DELAY == 2.0
    assert "reading" not in drawn(monkeypatch, delay=2.0)


def test_pipes_tests_and_progress_false_get_none(monkeypatch):
    assert drawn(monkeypatch, terminal=False) == ""
    assert drawn(monkeypatch, test=True) == ""
    assert drawn(monkeypatch, progress=False) == ""


def test_a_requested_bar_is_drawn_anywhere_and_at_once(monkeypatch):
    assert "reading" in drawn(monkeypatch, terminal=False, test=True, progress=True, delay=2.0)


def test_a_function_is_called_and_anything_else_is_refused(capsys):
    calls = []
    inspect_model(texts=["Call me Ishmael."], experiments="heads", progress=lambda *step: calls.append(step))
    assert ("reading", 1, 1) in calls
    with pytest.raises(UserError):
        inspect_model(texts=["Call me Ishmael."], experiments="heads", progress="bar")
    assert capsys.readouterr().err == ""
    inspect_model(texts=["Call me Ishmael."], experiments="heads", progress=True)
    assert "reading" in capsys.readouterr().err


def test_lines_of_a_log_tell_how_fast_it_goes_and_how_long_it_takes(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(progress_module.time, "perf_counter", lambda: clock[0])
    with command_progress(quiet=False) as tell:
        for done in (0, 100, 200):
            clock[0] = done / 5
            tell("tokens", 50 * done, 0)
            tell("reading", done, 4000)
        tell("experiments", 0, 0)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "loading ...",
        "reading ...",
        "reading: 100 of 4,000, 5.0 documents/s, 250 tokens/s, 0:13:00 left ...",
        "reading: 200 of 4,000, 5.0 documents/s, 250 tokens/s, 0:12:40 left ...",
        "experiments ...",
    ]
