"""The command line answers on stdout, complains in one sentence on stderr, and exits with 0 or 2."""

import functools
import json
import os
import platform
import signal
import subprocess
import sys
import time

import numpy
import pytest
import torch

import massieu
from massieu import cli, kernels
from massieu.commands import bench, doctor, interrupts


def test_the_doctor_names_what_is_installed_and_the_kernel(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts == {
        "massieu": massieu.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "threads": torch.get_num_threads(),
        "kernel": kernels.backend(),
        "reason": kernels.reason(),
    }


def test_the_doctor_prints_one_fact_a_line_for_people(capsys):
    assert cli.main(["doctor"]) == 0
    assert f"torch    {torch.__version__}" in capsys.readouterr().out.splitlines()


def test_the_version_is_printed_on_stdout(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"massieu {massieu.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "massieu: the following arguments are required: COMMAND; see massieu --help"),
        (["doctr"], "massieu: argument COMMAND: invalid choice: 'doctr'"),
        (["doctor", "gpt2", "again"], "massieu: unrecognized arguments: again; see massieu --help"),
        (["bench", "--jso"], "massieu: unrecognized arguments: --jso; see massieu --help"),
    ],
)
def test_bad_usage_is_answered_with_one_sentence_and_exit_code_two(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(complaint)
    assert err.count("\n") == 1


def test_the_help_of_bench_names_every_benchmark(capsys):
    from benchmarks.runner import benchmarks

    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    listed = " ".join(capsys.readouterr().out.split()).split("some of ")[1].split(";")[0].split(", ")
    assert listed == list(benchmarks())


BENCHMARKS = "def main(names, *, json): print(names, json); return 2 if 'typo' in names else None"


def test_bench_hands_names_and_format_to_the_benchmarks_of_the_repository(tmp_path, monkeypatch, capsys):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").write_text(BENCHMARKS)
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "benchmarks", raising=False)
    assert cli.main(["bench", "attend", "memory", "--json"]) == 0
    assert cli.main(["bench", "typo"]) == 2
    del sys.modules["benchmarks"]
    assert capsys.readouterr().out == "['attend', 'memory'] True\n['typo'] False\n"


def test_bench_without_a_repository_says_where_to_run_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    assert cli.main(["bench"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "run it from a clone of the repository" in err
    assert err.count("\n") == 1


signals = pytest.mark.skipif(os.name != "posix", reason="sends signals")


@pytest.fixture
def handled():
    """Let interrupts be handled as by a program in the foreground, or otherwise; afterwards as they were."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield functools.partial(signal.signal, signal.SIGINT)
    signal.signal(signal.SIGINT, before)


@signals
@pytest.mark.parametrize("error", [ImportError, OSError, ValueError, RuntimeError, AttributeError])
def test_an_interrupt_that_a_library_takes_for_an_error_is_an_interrupt(error, handled, monkeypatch, capsys):
    def run(options):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
        except KeyboardInterrupt:
            raise error("cannot import name 'half' from partially initialized module 'whole'") from None

    monkeypatch.setattr(doctor, "run", run)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "massieu: interrupted; nothing was written\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@signals
def test_an_interrupt_that_is_ignored_is_none(handled, monkeypatch):
    handled(signal.SIG_IGN)  # as in the background of a shell
    monkeypatch.setattr(doctor, "run", lambda options: os.kill(os.getpid(), signal.SIGINT) or 0)
    assert cli.main(["doctor"]) == 0
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_an_error_after_an_interrupt_that_is_over_is_an_error(handled, monkeypatch):
    def run(options):
        raise ValueError("a sentence")

    monkeypatch.setattr(interrupts, "_CAME", [signal.SIGINT])
    monkeypatch.setattr(doctor, "run", run)
    with pytest.raises(ValueError, match="a sentence"):  # it does not come from massieu, so it is shown in full
        cli.main(["doctor"])


INTERRUPTED = """
import sys
from massieu import cli
from massieu.commands import doctor

def run(options):
    exec("import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(10)")

doctor.run = run
sys.exit(cli.main(["doctor"]))
"""


@signals
def test_an_interrupt_inside_generated_code_ends_with_the_same_code(tmp_path):
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    ended = subprocess.run(
        [sys.executable, "-m", "interrupted"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs begin with it ignored
    )
    assert ended.returncode == 130
    assert ended.stderr == b"massieu: interrupted; nothing was written\n"


def test_a_kernel_that_does_not_exist_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setenv("MASSIEU_KERNEL", "typo")
    kernels.selection.loaded.cache_clear()
    assert cli.main(["doctor"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "massieu: MASSIEU_KERNEL must be one of torch, avx512, avx2, portable, got typo; leave it unset for the fastest\n"
    )
