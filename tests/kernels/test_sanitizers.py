"""The compiled kernel's own driver under the sanitizers: no access beyond an array, no undefined behavior, no race."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from massieu.kernels import compiled

NATIVE = Path(compiled.__file__).with_name("native")
DRIVER = Path(__file__).parents[1] / "native" / "driver.cpp"
COMPILER = os.environ.get("CXX", "g++")
MEMORY = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
THREADS = ["-fsanitize=thread"]
WIDE = {
    "AVX512": (64, ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"]),
    "AVX2": (32, ["-mavx2", "-mfma"]),
}


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(x) for x in command], capture_output=True, text=True, timeout=300, check=False)


def compiled_driver(folder: Path, sanitizer: list[str], vector_bytes: int = 16, options: tuple[str, ...] = ()) -> Path:
    """Driver and kernel with a sanitizer. Without OpenMP, whose own threads a sanitizer does not understand."""
    if shutil.which(COMPILER) is None or not NATIVE.is_dir():
        pytest.skip("there is no compiler, or the source of the kernel is not here")
    flags = ["-std=gnu++17", "-O1", "-g1", "-pthread", f"-I{NATIVE}", *sanitizer]
    nothing = folder / "nothing.cpp"
    nothing.write_text("int main() { return 0; }\n")
    if run(COMPILER, *flags, nothing, "-o", folder / "nothing").returncode or run(folder / "nothing").returncode:
        pytest.skip(f"programs with {sanitizer[0]} cannot be built or run here")
    # To the dispatcher every build is the portable one: the others would have to be compiled too.
    macros = ["-DMASSIEU_BUILD=portable", f"-DMASSIEU_VECTOR_BYTES={vector_bytes}"]
    jobs = [(NATIVE / "build.cpp", [*macros, *options]), (NATIVE / "dispatch.cpp", []), (DRIVER, [])]
    for source, more in jobs:
        done = run(COMPILER, *flags, *more, "-c", source, "-o", folder / f"{source.stem}.o")
        assert done.returncode == 0, done.stderr
    done = run(COMPILER, *flags, *(folder / f"{source.stem}.o" for source, _ in jobs), "-o", folder / "driver")
    assert done.returncode == 0, done.stderr
    return folder / "driver"


@pytest.mark.parametrize("build", ["portable", "best"])
def test_no_access_beyond_an_array_and_no_undefined_behavior(tmp_path, build):
    capability = torch.backends.cpu.get_cpu_capability()
    if build == "best" and capability not in WIDE:
        pytest.skip("the portable build is the best that this processor runs")
    size, options = WIDE[capability] if build == "best" else (16, [])
    driver = compiled_driver(tmp_path, MEMORY, size, tuple(options))
    done = run(driver, "cases", 60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("60 cases") == 3
    # The controls: one element beyond an array, and one number beyond its range.
    assert "heap-buffer-overflow" in run(driver, "overread").stderr
    assert "signed integer overflow" in run(driver, "overflow").stderr


def test_two_threads_do_not_race(tmp_path):
    driver = compiled_driver(tmp_path, THREADS)
    done = run(driver, "cases", 20)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("20 cases") == 3
    assert "data race" in run(driver, "race").stderr
