"""What an import costs and what it loads, each in a process of its own."""

import subprocess
import sys
import time

import pytest

LOADED = "import sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
EVERY_NAME = "import massieu; [getattr(massieu, name) for name in massieu.__all__]"


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("code", ["import massieu", EVERY_NAME])
def test_import_loads_nothing_beyond_torch_and_numpy(code):
    allowed = {*run("-c", f"import torch, numpy; {LOADED}").split(), *sys.stdlib_module_names, "massieu"}
    assert set(run("-c", f"{code}; {LOADED}").split()) - allowed == set()


def test_import_adds_at_most_half_a_second_to_torch():
    code = f"import time, torch; start = time.perf_counter(); {EVERY_NAME}; print(time.perf_counter() - start)"
    assert min(float(run("-c", code)) for _ in range(3)) <= 0.5


def test_help_answers_in_half_a_second():
    def seconds() -> float:
        start = time.perf_counter()
        assert "doctor" in run("-m", "massieu", "--help")
        return time.perf_counter() - start

    assert min(seconds() for _ in range(3)) <= 0.5


def test_help_does_not_import_torch():
    code = f"from massieu.cli import command_line; command_line().format_help(); {LOADED}"
    assert "torch" not in run("-c", code).split()


@pytest.mark.parametrize("call", ["attend(x, x, x).output", "row_statistics(x, x).entropy", "mass_count(x, x)"])
def test_the_first_call_may_come_from_a_compiled_function(call):
    program = f"""
import torch, massieu
x = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(0))
function = lambda x: massieu.{call}
compiled = torch.compile(function, backend="eager")(x)
assert torch.equal(compiled, function(x))
"""
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
