"""Every contract test takes a measure and natural parameters of its family."""

import pytest
from menagerie import ROWS, Row
from torch import Tensor

from massieu import Measure


@pytest.fixture(params=ROWS, ids=lambda row: row.name.replace(" ", "-"))
def row(request: pytest.FixtureRequest) -> Row:
    return request.param


@pytest.fixture
def measure(row: Row) -> Measure:
    return row.measure


@pytest.fixture
def natural(row: Row) -> Tensor:
    return row.natural
