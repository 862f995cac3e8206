"""Layers load when they are used, each case in a process of its own."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("code", "loaded"),
    [
        ("import massieu; massieu.attend", False),
        ("import massieu; massieu.nn.Transformer", True),
        ("from massieu.nn import Transformer", True),
    ],
)
def test_layers_load_when_they_are_used(code, loaded):
    shown = "import sys; print('massieu.nn' in sys.modules, 'torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", f"{code}; {shown}"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(loaded), "False"]


def test_layers_are_listed():
    import massieu

    assert "nn" in dir(massieu)
