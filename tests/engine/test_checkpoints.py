"""What was read is in the checkpoint, once, and goes on from there."""

import errno
import math
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import psutil
import pytest
from clusters import Processes, pieces_done, wait_until, write_text

from massieu import assets, cli
from massieu.checks import UserError
from massieu.corpus import Corpus
from massieu.corpus.shards import group_shards, text_shards
from massieu.engine import Checkpoint, CheckpointWarning, Local
from massieu.engine.workers import Failure, Packed, merge_packed, read_shards
from massieu.inspection import inspect_model
from massieu.inspection.heads import HeadStatistics
from massieu.inspection.options import Options
from massieu.inspection.partial_result import merge_partials
from massieu.inspection.reader import NotObservable, Reader, RemoteReader
from massieu.models.loading import load
from massieu.models.origin import Origin

TEXTS = [f"Some years ago, never mind how long precisely, {i} whales." for i in range(40)]


@pytest.fixture(scope="module")
def reader():
    loaded = load(str(assets.MODEL))
    return Reader(loaded.model, loaded.tokenizer, Options(experiments="heads"), name="embedded")


class Stop(Exception):  # noqa: N818  # it is what the test does
    """The process ends here."""


class Stopping:
    """A reader that stops before one of its pieces, as a process that ends."""

    def __init__(self, reader, pieces, error=Stop):
        self.reader, self.pieces, self.error = reader, pieces, error
        self.identity, self.read_now = reader.identity, 0

    def __getattr__(self, name):
        return getattr(self.reader, name)

    def read(self, shard, **options):
        if self.read_now == self.pieces:
            raise self.error
        self.read_now += 1
        return self.reader.read(shard, **options)


def test_a_run_that_was_broken_off_goes_on_and_counts_each_document_once(reader, tmp_path):
    splits = list(text_shards(TEXTS, 4))
    path = tmp_path / "new" / "checkpoint"
    with pytest.raises(Stop):
        Local().fold(Stopping(reader, 6), splits, checkpoint=Checkpoint(path, seconds=0))
    assert pieces_done(path) == 6
    rest = Stopping(reader, 100)
    found = Local().fold(rest, splits, checkpoint=Checkpoint(path, resume=True))
    whole = Local().fold(reader, splits)
    assert rest.read_now == 4
    assert found.counts == whole.counts
    assert found.heads.table().entropy.to_numpy() == pytest.approx(whole.heads.table().entropy.to_numpy(), rel=1e-12)


def test_an_interrupt_keeps_what_was_read_and_says_so(reader, tmp_path):
    splits, path = list(text_shards(TEXTS, 4)), tmp_path / "checkpoint"
    with pytest.raises(KeyboardInterrupt, match=f"what was read is in {path}; the same command with --resume goes on"):
        Local().fold(Stopping(reader, 3, KeyboardInterrupt), splits, checkpoint=Checkpoint(path, seconds=1e9))
    assert pieces_done(path) == 3


def test_before_the_first_checkpoint_resuming_begins_at_the_beginning(reader, tmp_path):
    found = Local().fold(reader, list(text_shards(TEXTS, 4)), checkpoint=Checkpoint(tmp_path / "none", resume=True))
    assert found.counts.documents == len(TEXTS)
    assert list(tmp_path.iterdir()) == []  # a short run writes none


def broken_off(reader, path):
    with pytest.raises(Stop):
        Local().fold(Stopping(reader, 2), list(text_shards(TEXTS, 4)), checkpoint=Checkpoint(path, seconds=0))
    return path


def test_a_checkpoint_of_the_same_run_is_not_written_over(reader, tmp_path):
    path = broken_off(reader, tmp_path / "checkpoint")
    with pytest.raises(
        ValueError, match="says how far an unfinished run of the same has come; go on from it with --res"
    ):
        Local().fold(reader, list(text_shards(TEXTS, 4)), checkpoint=Checkpoint(path))


def test_a_checkpoint_of_another_run_is_refused_and_stays(reader, tmp_path):
    path = broken_off(reader, tmp_path / "checkpoint")
    before = path.read_bytes()
    other = Reader(reader.model, reader.tokenizer, Options(experiments="heads", rows=8))
    with pytest.raises(ValueError, match="was made by another run: the option rows is 32 in one and 8 in the other"):
        Local().fold(other, list(text_shards(TEXTS, 4)), checkpoint=Checkpoint(path, resume=True))
    with pytest.raises(ValueError, match="was made for another text"):
        Local().fold(reader, list(text_shards(TEXTS[1:], 4)), checkpoint=Checkpoint(path, resume=True))
    with pytest.raises(ValueError, match="must not be there yet, got a file that is no checkpoint of this run; remove"):
        Local().fold(other, list(text_shards(TEXTS, 4)), checkpoint=Checkpoint(path))
    assert path.read_bytes() == before


def test_a_file_of_the_user_is_neither_written_over_nor_removed(tmp_path, capsys):
    notes = tmp_path / "notes.txt"
    notes.write_text("precious")
    for more in ([], ["--resume"]):
        assert cli.main(["inspect", "--heads-only", "-q", "--checkpoint", str(notes), *more]) == 2
        assert "notes.txt" in capsys.readouterr().err
    assert notes.read_text() == "precious"


def test_a_checkpoint_that_cannot_be_written_is_one_sentence(reader, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError, match="the checkpoint .*file/checkpoint cannot be written below .*file; name a file"
    ):
        Checkpoint(tmp_path / "file" / "checkpoint")


def full(monkeypatch) -> None:
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Reader, "save", fail)


def test_a_full_disk_is_told_once_and_the_run_goes_on(reader, tmp_path, monkeypatch):
    splits, path = list(text_shards(TEXTS, 4)), tmp_path / "folder" / "checkpoint"
    full(monkeypatch)
    said = "checkpoint cannot be written .*No space left on device.*; make room there, .*; the run goes on without it"
    with pytest.warns(CheckpointWarning, match=said) as caught:
        found = Local().fold(reader, splits, checkpoint=Checkpoint(path, seconds=0))
    assert len(caught) == 1
    assert found.counts == Local().fold(reader, splits).counts


def test_an_interrupt_on_a_full_disk_says_that_nothing_was_kept(reader, tmp_path, monkeypatch):
    full(monkeypatch)
    with pytest.raises(KeyboardInterrupt, match="checkpoint cannot be written .*No space left on device") as caught:
        Local().fold(
            Stopping(reader, 2, KeyboardInterrupt),
            list(text_shards(TEXTS, 4)),
            checkpoint=Checkpoint(tmp_path / "checkpoint"),
        )
    assert "--resume" not in str(caught.value)


def test_the_command_tells_a_full_disk_in_one_line(tmp_path, monkeypatch, capsys):
    full(monkeypatch)
    text = write_text(tmp_path / "text.jsonl", 40)
    options = ["--heads-only", "--split-bytes", "1000", "--checkpoint-every", "0"]
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert cli.main(["inspect", "--text", str(text), "--out", str(tmp_path / "out"), *options]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "checkpoint" in line]
    assert len(told) == 1
    assert told[0].startswith(
        f"massieu: the checkpoint {tmp_path / 'out' / 'checkpoint.safetensors'} cannot be written"
    )
    assert (tmp_path / "out" / "report.html").exists()


def test_an_interrupt_after_the_reading_names_the_checkpoint(reader, tmp_path):
    def said(kept):
        with pytest.raises(KeyboardInterrupt) as interrupt, kept.mentioned():
            raise KeyboardInterrupt
        return str(interrupt.value)

    kept = Checkpoint(tmp_path / "checkpoint", seconds=0)
    assert said(kept) == ""
    Local().fold(reader, list(text_shards(TEXTS, 4)), checkpoint=kept)
    assert "--resume goes on from it" in said(kept)
    assert said(Checkpoint(kept.path, resume=True)) == said(kept)
    assert said(Checkpoint(kept.path)) == ""  # of whom it is nobody knows yet


def test_to_resume_may_be_said_beside_a_checkpoint(tmp_path):
    kept = Checkpoint(tmp_path / "checkpoint", seconds=0)
    corpus = Corpus.from_texts(TEXTS, shard_bytes=100)
    inspect_model(texts=corpus, experiments="heads", checkpoint=kept)
    found = inspect_model(texts=corpus, experiments="heads", checkpoint=kept, resume=True)
    assert found.facts["text"]["documents"] == len(TEXTS)
    assert kept.path.exists()


def test_a_text_that_was_written_again_is_another_text(reader, tmp_path):
    path, text = tmp_path / "checkpoint", tmp_path / "text.jsonl"
    text.write_text("".join(f'"{line}"\n' for line in TEXTS))
    os.utime(text, (1, 1))

    def splits():
        return group_shards(Corpus(text, shard_bytes=300).shards(), 300)

    with pytest.raises(Stop):
        Local().fold(Stopping(reader, 2), splits(), checkpoint=Checkpoint(path, seconds=0))
    keys = [shard.key for shard in splits()]
    text.write_text(text.read_text().replace("years", "weeks"))
    assert [shard.key for shard in splits()] == keys  # of the same size
    with pytest.raises(ValueError, match="was made for another text"):
        Local().fold(reader, splits(), checkpoint=Checkpoint(path, resume=True))
    os.utime(text, (1, 1))  # the control
    assert Local().fold(reader, splits(), checkpoint=Checkpoint(path, resume=True)).counts.documents == len(TEXTS)


@pytest.mark.parametrize(("seconds", "said"), [(0, True), (1e9, False)])
@pytest.mark.parametrize("kind", [UserError, NotObservable])
def test_an_error_names_the_checkpoint_that_was_written_before_it(kind, seconds, said, reader, tmp_path):
    splits, path = list(text_shards(TEXTS, 4)), tmp_path / "checkpoint"
    with pytest.raises(kind, match="^line 7 is none") as caught:
        Local().fold(Stopping(reader, 3, kind("line 7 is none")), splits, checkpoint=Checkpoint(path, seconds=seconds))
    end = f"; what was read is in {path}; the same command with --resume goes on from it"
    assert (str(caught.value) == f"line 7 is none{end}") == said
    assert path.exists() == said


def test_a_text_that_comes_one_by_one_has_no_checkpoint(tmp_path):
    with pytest.raises(TypeError, match="a checkpoint needs a text that can be read again"):
        inspect_model(texts=iter(TEXTS), experiments="heads", checkpoint=tmp_path / "checkpoint")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"resume": True}, "resume goes on from a checkpoint, got none"),
        ({"checkpoint": Path()}, "a checkpoint must be a file, got the folder"),
    ],
)
def test_a_checkpoint_needs_a_place(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        inspect_model(texts=TEXTS, experiments="heads", **options)


@pytest.mark.parametrize("seconds", [-1, math.inf, math.nan])
def test_time_between_checkpoints_is_finite_and_not_negative(seconds):
    with pytest.raises(ValueError, match="seconds must be finite"):
        Checkpoint(Path("a"), seconds=seconds)


def test_tensors_have_neither_engine_nor_checkpoint(reader):
    with pytest.raises(ValueError, match="an engine or a checkpoint needs texts, got inputs"):
        inspect_model(reader.model, inputs=[], engine="local")


def test_resume_without_a_place_is_refused(capsys):
    assert cli.main(["inspect", "--resume"]) == 2
    assert "--resume goes on from a checkpoint, got no place" in capsys.readouterr().err


def test_a_finished_run_leaves_no_checkpoint(tmp_path):
    path = tmp_path / "checkpoint"
    corpus = Corpus.from_texts(TEXTS, shard_bytes=100)
    inspect_model(texts=corpus, experiments="heads", checkpoint=path)
    assert not path.exists()
    kept = Checkpoint(path, seconds=0)
    inspect_model(texts=corpus, experiments="heads", checkpoint=kept)
    assert pieces_done(path) == len(corpus.shards())  # who made it removes it
    kept.remove()
    assert not path.exists()


def test_packed_partial_results_merge(reader):
    splits = list(enumerate(text_shards(TEXTS, 10)))
    remote = RemoteReader(Origin(None), reader.options, reader.identity, has_enough_documents=True)
    first, second = read_shards("run", remote, splits[:2]), read_shards("run", remote, splits[2:])
    assert isinstance(first, Packed)
    merged = merge_packed([first, second])
    assert sys.getsizeof(merged) > len(merged.data)
    expected = merge_partials(remote.open("here").read(shard) for _, shard in splits)
    assert merged.open().counts == expected.counts
    failure = Failure(UserError, "a sentence", "")
    assert merge_packed([first, failure, second]) is failure


@pytest.mark.parametrize(
    ("engine", "sent", "code", "word"),
    [
        ("local", signal.SIGINT, 130, "interrupted"),
        ("local", signal.SIGTERM, 143, "terminated"),
        ("dask", signal.SIGINT, 130, "interrupted"),
    ],
)
def test_an_interrupt_or_a_termination_ends_everything_and_keeps_a_checkpoint(engine, sent, code, word, tmp_path):
    text = write_text(tmp_path / "text.jsonl", 20_000)
    out = tmp_path / "out"
    options = ["--heads-only", "--batch-size", "4", "--split-bytes", "1000", "--checkpoint-every", "0.2"]
    options += ["--engine", engine, *(["--workers", "2"] if engine == "dask" else [])]
    command = [sys.executable, "-m", "massieu", "inspect", "--text", str(text), "--out", str(out), *options]
    # A group of its own, to which a terminal would send the signal.
    running = subprocess.Popen(
        command,
        env=Processes().environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        text=True,
    )
    try:
        wait_until((out / "checkpoint.safetensors").exists)
        family = psutil.Process(running.pid).children(recursive=True)
        os.killpg(running.pid, sent)
        _, err = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == code
    said = f"massieu: {word}; what was read is in {out / 'checkpoint.safetensors'}; the same command with --resume"
    assert err.splitlines()[-1].startswith(said)
    assert "Traceback" not in err
    assert [path.name for path in out.iterdir()] == ["checkpoint.safetensors"]
    assert len(family) >= (2 if engine == "dask" else 0)
    assert psutil.wait_procs(family, timeout=10)[1] == []


def test_an_interrupt_in_the_middle_of_a_merge_leaves_the_checkpoint_before_it(reader, tmp_path, monkeypatch):
    path, splits, merge, calls = (
        broken_off(reader, tmp_path / "a"),
        list(text_shards(TEXTS, 4)),
        HeadStatistics.merge,
        [],
    )

    def interrupted(self, other):
        calls.append(other)
        if len(calls) == 4:  # counts were merged before
            raise KeyboardInterrupt
        merge(self, other)

    with monkeypatch.context() as patched:
        patched.setattr(HeadStatistics, "merge", interrupted)
        with pytest.raises(KeyboardInterrupt, match="--resume goes on from it"):
            Local().fold(reader, splits, checkpoint=Checkpoint(path, resume=True, seconds=1e9))
    assert pieces_done(path) == 2
    found = Local().fold(reader, splits, checkpoint=Checkpoint(path, resume=True))
    assert found.counts == Local().fold(reader, splits).counts


def test_two_runs_do_not_share_a_checkpoint(reader, tmp_path):
    splits, path = list(text_shards(TEXTS, 4)), tmp_path / "checkpoint"
    other = Reader(reader.model, reader.tokenizer, Options(experiments="heads", rows=8))

    class Slow(Stopping):
        """A reader beside which another run writes to the same place."""

        def read(self, shard, **options):
            if self.read_now == 3 and not path.exists():
                with pytest.raises(Stop):
                    Local().fold(Stopping(other, 2), splits, checkpoint=Checkpoint(path, seconds=0))
            return super().read(shard, **options)

    mine = Checkpoint(path, seconds=1e9)
    found = Local().fold(Slow(reader, 100), splits, checkpoint=mine)
    assert found.counts.documents == len(TEXTS)
    mine.remove()
    assert pieces_done(path) == 2
    path.unlink()
    with pytest.raises(
        ValueError, match="checkpoint was written by another run meanwhile; give each run a file of its"
    ):
        Local().fold(Stopping(Slow(reader, 100), 5, KeyboardInterrupt), splits, checkpoint=mine)
    assert pieces_done(path) == 2
    assert "resume" not in mine.remedy


def test_a_kill_while_it_is_written_leaves_one_file_that_the_next_takes(reader, tmp_path, monkeypatch):
    path = broken_off(reader, tmp_path / "checkpoint")
    (tmp_path / ".checkpoint.part").write_bytes(b"half of a checkpoi")
    Local().fold(reader, list(text_shards(TEXTS, 4)), checkpoint=Checkpoint(path, resume=True))
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint"]
