"""The command line answers on stdout, complains in one sentence on stderr, and exits with 0 or 2."""

import json
import platform
import sys

import numpy
import pytest
import torch

import massieu
from massieu import cli, kernels
from massieu.commands import bench


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


def test_a_kernel_that_does_not_exist_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setenv("MASSIEU_KERNEL", "typo")
    kernels.selection.loaded.cache_clear()
    assert cli.main(["doctor"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "massieu: MASSIEU_KERNEL must be one of torch, avx512, avx2, portable, got typo; leave it unset for the fastest\n"
    )
