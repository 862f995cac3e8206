"""What tests of training share."""

import pytest

from massieu.context import learning, task_named


@pytest.fixture
def only_training(monkeypatch):
    """Leave out what follows, where a test does not look at it."""
    monkeypatch.setattr(learning, "compare", lambda *arguments, **options: None)
    monkeypatch.setattr(learning, "separate", lambda *arguments: None)


@pytest.fixture
def task():
    return task_named("linear", dim=2, noise=0.5)
