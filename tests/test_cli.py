"""The command line: results on stdout, errors as one sentence on stderr, exit codes."""

import errno
import functools
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time

import numpy
import pytest
import torch

import massieu
from massieu import cli, kernels
from massieu.checks import MissingPackageError, NotObservable, UserError
from massieu.commands import bench, doctor, interrupts
from massieu.engine import LostCluster


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
        (["doctr"], "massieu: argument COMMAND: invalid choice: 'doctr' (did you mean doctor?)"),
        (["doctor", "gpt2", "again"], "massieu doctor: unrecognized arguments: again; see massieu doctor --help"),
        (["bench", "--jso"], "massieu bench: unrecognized arguments: --jso (did you mean --json?); see massieu bench"),
        (["inspect", "--txt", "a"], "massieu inspect: unrecognized arguments: --txt (did you mean --text?); see"),
        (
            ["inspect", "--engine", "dusk"],
            "massieu inspect: argument --engine: invalid choice: 'dusk' (did you mean da",
        ),
        (["--versoin"], "massieu: unrecognized arguments: --versoin (did you mean --version?); see massieu --help"),
        (["inspect", "--limit", "1" * 5000], "massieu inspect: argument --limit: expected a positive whole number"),
        (["inspect", "--limit", str(10**30)], "massieu inspect: argument --limit: expected a positive whole number of"),
        (["inspect", "--sample", "nan"], "massieu inspect: argument --sample: expected a finite number, got nan"),
        (["watch", "a\x1b[2J\0.csv"], r"massieu watch: argument LOG: expected a path or a name, got a\x1b[2J\x00.csv"),
        (["compare", "a", "b", "--out", "a\udcff"], r"massieu compare: argument --out: expected a path or a name in"),
        (["\x1b[2J"], r"massieu: argument COMMAND: invalid choice: '\x1b[2J'"),
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
    listed = " ".join(capsys.readouterr().out.split()).split("some of ")[1].split(" (default")[0].split(", ")
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


def raising(error):
    """A command that ends with the error."""

    def run(options):
        raise error

    return run


def system_error(number, *names):
    return OSError(number, os.strerror(number), *names)


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (UserError("expected a, got b; write a"), 2, "massieu: expected a, got b; write a\n"),
        (MissingPackageError("needs c; pip install c"), 2, "massieu: needs c; pip install c\n"),
        (NotObservable("nothing can be observed"), 3, "massieu: nothing can be observed\n"),
        (LostCluster("the scheduler is lost"), 4, "massieu: the scheduler is lost\n"),
        (system_error(errno.EACCES, "closed"), 2, "massieu: closed cannot be read or written: Permission denied;"),
        (
            system_error(errno.ENAMETOOLONG, "a" * 300),
            2,
            f"massieu: {'a' * 300} cannot be read or written: File name too",
        ),
        (system_error(errno.ENOSPC), 2, "massieu: the output cannot be read or written: No space left on device;"),
        (UserError("no file \x1b[2J\n"), 2, "massieu: no file \\x1b[2J\\n\n"),
        (
            TypeError("unhashable type: 'list'"),
            70,
            "massieu: this is a defect of massieu, not of your input (TypeError:",
        ),
        (ValueError("Overflow when unpacking long long"), 70, "massieu: this is a defect of massieu, not of your"),
        (OSError("no errno"), 70, "massieu: this is a defect of massieu, not of your input (OSError: no errno);"),
    ],
)
def test_the_class_of_an_error_decides_the_exit_code_and_is_told_in_one_line(
    error, code, sentence, monkeypatch, capsys
):
    monkeypatch.setattr(doctor, "run", raising(error))
    assert cli.main(["doctor"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(sentence)
    assert err.count("\n") == 1


@pytest.mark.parametrize("error", [UserError("a sentence"), KeyError("a sentence")])
def test_debug_shows_the_traceback_before_the_sentence(error, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "run", raising(error))
    assert cli.main(["doctor", "--debug"]) == (2 if isinstance(error, UserError) else 70)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1].startswith("massieu: ")


def declared(command):
    """Return the arguments of a command."""
    (commands,) = (action for action in cli.command_line()._actions if action.dest not in ("help", "version"))
    return commands.choices[command]._actions


@pytest.mark.parametrize("command", [module.__name__.rpartition(".")[2] for module in cli.COMMANDS])
def test_every_command_takes_debug_and_json_and_shows_the_default_of_every_value(command):
    known = {option: action for action in declared(command) for option in action.option_strings or [action.dest]}
    assert {"--debug", "--json"} <= set(known)
    for option, action in known.items():
        optional = action.nargs in ("?", "*") or (action.option_strings and action.nargs != 0)
        if optional:
            assert re.search(r"\(default: [^)]+\)", action.help), option
        if optional and isinstance(action.default, (int, float, str)):
            assert f"(default: {action.default}" in action.help, option


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["verify", "c-14", "--list"], "C14"),
        (["learn", "lineal"], "linear"),
        (["inspect", "--fail-on", "entropi < 1"], "entropy"),
    ],
)
def test_a_misspelled_word_is_answered_with_the_one_that_was_meant(arguments, meant, capsys):
    assert cli.main(arguments) == 2
    assert f"(did you mean {meant}?)" in capsys.readouterr().err


def test_massieu_alone_prints_its_commands_and_the_help_explains_every_exit_code(capsys):
    assert cli.main([]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for module in cli.COMMANDS:
        assert f"\n    {module.__name__.rpartition('.')[2]} " in out
    words = " ".join(out.split())
    for code in (0, 1, *range(2, 6), cli.DEFECT, cli.INTERRUPTED, cli.CLOSED):
        assert re.search(rf"[:;] {code} [a-z]", words), code


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "-q", "--out", ""],
        ["inspect", "--out", "", "--checkpoint", ""],
        ["inspect", "--checkpoint", " "],
        ["inspect", ""],
        ["inspect", "--text", ""],
        ["compare", "a", "b", "--out", ""],
        ["merge", "a", "b", "--out", ""],
        ["verify", "C14", "--out", ""],
        ["watch", "log.csv", "--html", ""],
        ["learn", "linear", "--out", ""],
    ],
)
def test_an_empty_path_is_refused_before_anything_is_done(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert "expected a path or a name, got an empty text; is a variable unset?" in err
    assert err.count("\n") == 1


full_disk = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")


@full_disk
@pytest.mark.parametrize("arguments", [["doctor"], ["--help"], ["inspect", "--help"], ["--version"]])
def test_standard_output_on_a_full_disk_is_one_sentence(arguments):
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "massieu", *arguments], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert ended.returncode == 2
    assert ended.stderr == (
        "massieu: the output cannot be read or written: No space left on device;"
        " check the path, its permissions and the disk\n"
    )


@pytest.mark.skipif(os.name != "posix", reason="closes a descriptor by the shell")
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("doctor >&-", 0),
        ("inspect -q --heads-only --limit 1 >&-", 0),
        ("inspect --heads-only --limit 1 2>&-", 0),
        ("inspct 2>&-", 2),
        ("inspect --heads-only --text - <&-", 2),
    ],
)
def test_a_closed_stream_is_no_defect(arguments, code):
    ended = subprocess.run(
        ["sh", "-c", f"exec {shlex.quote(sys.executable)} -m massieu {arguments}"], capture_output=True, text=True
    )
    assert ended.returncode == code, ended.stderr
    assert "defect" not in ended.stderr


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, cli.SPINS["GOMP_SPINCOUNT"]),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, None),
    ],
)
def test_threads_do_not_spin_for_long_unless_the_user_says_so(given, expected, monkeypatch, capsys):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delitem(sys.modules, "torch")  # as before a command has loaded it
    assert cli.main([]) == 0
    assert os.environ.get("GOMP_SPINCOUNT") == expected
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)


def test_the_threads_of_a_program_that_has_loaded_torch_wait_as_it_wants(monkeypatch, capsys):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert cli.main([]) == 0
    assert "GOMP_SPINCOUNT" not in os.environ


signals = pytest.mark.skipif(os.name != "posix", reason="sends signals")


@pytest.fixture
def handled():
    """Set the handler of interrupts; restore it afterwards."""
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


def test_an_error_after_an_interrupt_that_is_over_is_an_error(handled, monkeypatch, capsys):
    monkeypatch.setattr(interrupts, "_RECEIVED", [signal.SIGINT])
    monkeypatch.setattr(doctor, "run", raising(ValueError("a sentence")))
    assert cli.main(["doctor"]) == cli.DEFECT
    assert "ValueError: a sentence" in capsys.readouterr().err


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
    kernels.dispatch.loaded.cache_clear()
    assert cli.main(["doctor"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == ("massieu: MASSIEU_KERNEL must be one of 'torch', 'avx512', 'avx2', 'portable', got 'typo'\n")
