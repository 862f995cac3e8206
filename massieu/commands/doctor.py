"""``massieu doctor``: print installed versions, the kernel in use and the attention modules that can be observed."""

from __future__ import annotations

import argparse
import json
import platform
from typing import Any

import massieu
from massieu.checks import visible
from massieu.commands import Command, check_packages
from massieu.commands.arguments import add_loading, loading, path

__all__ = ["add", "run"]


def add(command: Command) -> None:
    """Declare the arguments."""
    parser = command(
        "doctor", run, "print installed versions, the kernel in use and the attention modules that can be observed"
    )
    parser.add_argument(
        "model", nargs="?", type=path, metavar="MODEL", help="folder, package or Hugging Face id (default: no model)"
    )
    add_loading(parser)


def run(options: argparse.Namespace) -> int:
    """Print versions, the kernel, and the attention modules of a model that can be observed."""
    import numpy
    import torch

    from massieu import kernels

    facts: dict[str, Any] = {
        "massieu": massieu.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "threads": torch.get_num_threads(),
        "kernel": kernels.backend(),
        "reason": kernels.reason(),
    }
    code = 0
    if options.model:
        check_packages("transformers")
        from massieu.inspection.observable_calls import observable_calls

        coverage = observable_calls(options.model, **loading(options))
        facts |= coverage
        code = 3 if coverage["missing"] or not coverage["modules"] else 0
    if options.json:
        print(json.dumps(facts))
    else:
        for name, fact in facts.items():
            lines = fact if isinstance(fact, list) else [fact]
            for i, line in enumerate(lines):
                print(f"{'' if i else name:<8} {visible(str(line))}")
    return code
