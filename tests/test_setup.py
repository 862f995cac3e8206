"""Installing never fails for want of a compiler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_working_compiler_the_build_goes_on_and_says_so(compiler, tmp_path):
    folders = ["--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp")]
    ended = subprocess.run(
        [sys.executable, "setup.py", "build_ext", *folders],
        cwd=ROOT,
        env={**os.environ, "CC": compiler, "CXX": compiler, "LDSHARED": compiler},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert "the compiled kernel was not built" in ended.stderr + ended.stdout
    assert not list(tmp_path.rglob("libmassieu*"))
