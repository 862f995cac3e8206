"""Installing never fails for want of a compiler."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def build(compiler: str, folder: Path) -> str:
    """What building with this compiler prints."""
    folders = ["--build-lib", str(folder / "lib"), "--build-temp", str(folder / "temp")]
    names = ("CC", "CXX", "LDSHARED", "LDCXXSHARED")
    ended = subprocess.run(
        [sys.executable, "setup.py", "build_ext", *folders],
        cwd=ROOT,
        env={**os.environ, **dict.fromkeys(names, compiler)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stderr + ended.stdout


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_working_compiler_the_build_goes_on_and_says_so(compiler, tmp_path):
    assert "the compiled kernel was not built" in build(compiler, tmp_path)
    assert not list(tmp_path.rglob("libmassieu*"))


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="only x86 has more than one build")
def test_an_instruction_set_that_the_compiler_does_not_know_costs_only_its_own_build(tmp_path):
    compiler = tmp_path / "compiler"
    # Writes down what it was asked, and refuses AVX-512.
    compiler.write_text(
        f"""#!/bin/sh
echo "$*" >> {tmp_path}/asked
case "$*" in *-mavx512f*) exit 1;; esac
while [ "$1" ]; do [ "$1" = -o ] && mkdir -p "$(dirname "$2")" && touch "$2"; shift; done
"""
    )
    compiler.chmod(0o755)
    assert "the compiled kernel goes without avx512" in build(str(compiler), tmp_path)
    asked = (tmp_path / "asked").read_text().splitlines()
    (dispatch,) = [line for line in asked if "dispatch.cpp" in line]
    assert "-DMASSIEU_HAS_AVX2" in dispatch
    assert "-DMASSIEU_HAS_AVX512" not in dispatch
    (link,) = [line for line in asked if "libmassieu.so" in line]
    assert "avx2" in link
    assert "avx512" not in link
    assert (tmp_path / "lib" / "massieu" / "kernels" / "libmassieu.so").exists()
