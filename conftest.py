"""What holds for the tests and for the examples in docstrings alike."""

from typing import Any

import pytest
import torch

import massieu


def pytest_configure() -> None:
    # The tests run in parallel processes: more threads in each would only compete.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _names_that_every_example_knows(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace.update(torch=torch, massieu=massieu)
