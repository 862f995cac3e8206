"""The same text for all engines, what this process finds in it, and clusters that end with their test."""

import pytest
from clusters import MINILM, QUICK, SHARD_BYTES, Processes, write_text

from massieu.corpus import Corpus
from massieu.engine import Dask
from massieu.inspection import inspect_model


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "text.jsonl")


@pytest.fixture(scope="session")
def alone(text):
    """What this process finds in the heads."""
    return inspect_model(MINILM, Corpus(text, shard_bytes=SHARD_BYTES), experiments="heads", **QUICK).to_dict()


@pytest.fixture
def processes():
    """Processes of the test; they are ended at its end, each by its number."""
    started = Processes()
    try:
        yield started
    finally:
        started.end()


@pytest.fixture(scope="session")
def engine():
    """A cluster of one process, for what needs no more."""
    with Dask(workers=1) as started:
        yield started
