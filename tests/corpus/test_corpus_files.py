"""Which files a corpus has: folders, wildcards, places elsewhere; what cannot be found is one sentence."""

import ast
import gzip
import io
import json
import os
import pickle
import subprocess
import sys
import threading
import zipfile

import fsspec
import fsspec.implementations.memory
import pyarrow
import pytest
from pyarrow import parquet

from massieu.checks import MissingPackageError, UserError
from massieu.corpus import BadRecords, Corpus


@pytest.fixture
def folder(tmp_path):
    for name in (
        "b.txt",
        "a.jsonl",
        "deep/er/c.csv",
        "deep/d.md",
        ".hidden.txt",
        ".git/e.txt",
        "image.png",
        "LICENSE",
        "f.gz",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text\n1\n" if name.endswith("csv") else '"1"\n')
    return tmp_path


@pytest.fixture
def memory():
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def names(*paths):
    return [file.name for file in Corpus(paths).files]


def texts(corpus, bad_records=None):
    return [document.text for shard in corpus.shards() for document in shard.read(bad_records)]


def test_a_folder_gives_all_files_below_it_with_known_extensions(folder):
    assert names(folder) == ["a.jsonl", "b.txt", "deep/d.md", "deep/er/c.csv"]
    assert names(f"{folder}/") == names(folder)


def test_wildcards_give_files_and_what_is_below_folders(folder):
    assert names(f"{folder}/*.txt") == ["b.txt"]
    assert names(f"{folder}/?.*") == ["a.jsonl", "b.txt"]
    assert names(f"{folder}/**/*.[cm]*") == ["d.md", "er/c.csv"]
    assert names(f"{folder}/d*") == ["d.md", "er/c.csv"]
    (folder / ".git" / "x[1].txt").write_text("x")
    assert names(f"{folder}/.git/x[1].txt") == ["x[1].txt"]
    assert names(f"{folder}/.git/*.txt") == ["e.txt", "x[1].txt"]


def test_a_file_counts_once_however_it_is_named(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "link.txt").symlink_to(folder / "b.txt")
    assert names("b.txt", folder / "b.txt", "./deep/../b.txt", f"file://{folder}/b.txt", "link.txt", "*.txt") == [
        "b.txt"
    ]
    assert names("b.txt", "a.jsonl") == ["b.txt", "a.jsonl"]
    assert names("b.txt", ".") == ["b.txt", "a.jsonl", "deep/d.md", "deep/er/c.csv"]


def test_a_file_without_extension_is_text_if_it_is_named(folder):
    assert texts(Corpus(folder / "LICENSE")) == ['"1"']


def test_files_may_lie_elsewhere(memory):
    for number in range(3):
        with memory.open(f"/books/part-{number}.txt", "wb") as file:
            file.write(f"one of {number}\n\ntwo of {number}".encode())
    everything = [f"{word} of {number}" for number in range(3) for word in ("one", "two")]
    assert names("memory://books") == ["part-0.txt", "part-1.txt", "part-2.txt"]
    for path in ("memory://books", "memory://books/*.txt", "memory://*/part*"):
        assert texts(Corpus(path, shard_bytes=5)) == everything
    assert [file.path for file in Corpus("memory://books/*-1.txt").files] == ["memory://books/part-1.txt"]


def test_a_corpus_is_called_by_what_was_asked_for(folder, memory, monkeypatch):
    memory.pipe("/books/a.txt", b"one")
    monkeypatch.chdir(folder)
    for paths, name in (
        (["."], folder.name),
        (["deep/.."], folder.name),
        (["b.txt", f"{folder}/b.txt", "*.jsonl"], "b.txt, *.jsonl"),
        (["memory://books/"], "books"),
    ):
        assert Corpus(paths).name == name
    for number in range(9):
        (folder / f"{number}.txt").write_text("a")
    assert Corpus([f"{number}.txt" for number in range(9)]).name.endswith("7.txt, ...")


def test_a_file_knows_its_version_where_its_place_tells(memory, folder, tmp_path):
    memory.pipe("/a.txt", b"one")
    (shard,) = Corpus("memory://a.txt").shards()
    memory.pipe("/a.txt", b"two")
    (again,) = Corpus("memory://a.txt").shards()
    assert shard.key == again.key
    assert shard.version != again.version
    assert Corpus(folder / "b.txt").files[0].version == f"mtime {os.stat(folder / 'b.txt').st_mtime}"
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.txt", "one")
    assert Corpus(f"zip://a.txt::{tmp_path}/a.zip").files[0].version.startswith("CRC ")


def test_two_readers_of_one_place_do_not_disturb_each_other(memory):
    with memory.open("/a.jsonl", "wb") as file:
        file.write(b"".join(b'"%d"\n' % i for i in range(20)))
    (shard,) = Corpus("memory://a.jsonl").shards()
    assert all(one.text == other.text for one, other in zip(shard.read(), shard.read(), strict=True))


def test_files_without_fast_lines_are_read_through_a_buffer(memory, monkeypatch):
    """As those of a store that is not on this machine: fsspec fetches their blocks."""
    content = b"".join(b'"number %d"\n' % i for i in range(100))

    class Far(fsspec.spec.AbstractBufferedFile):
        def _fetch_range(self, start, end):
            return content[start:end]

    with memory.open("/a.jsonl", "wb") as file:
        file.write(content)
    monkeypatch.setattr(type(memory), "open", lambda self, path, mode, block_size: Far(self, path, mode, block_size))
    found = texts(Corpus("memory://a.jsonl", shard_bytes=100))
    assert found == [f"number {i}" for i in range(100)]


class Harbour(fsspec.implementations.memory.MemoryFileSystem):
    """A file system with hosts, as those of ftp, sftp and hdfs: the URL names one, and paths do not."""

    protocol = "harbour"
    cachable = True

    def __init__(self, host="", **options):
        super().__init__(**options)
        self.host = host

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + fsspec.utils.infer_storage_options(path)["path"].strip("/")

    @staticmethod
    def _get_kwargs_from_urls(path):
        return {"host": fsspec.utils.infer_storage_options(path).get("host", "")}

    def open(self, path, mode="rb", **options):
        return io.BytesIO(f"a ship from {self.host} on {path}".encode())


def in_another_process(shards):
    """What the texts of shards are in a process that is given nothing but the shards."""
    code = (
        "import fsspec, pickle, sys; sys.path[:0] = sys.argv[1:];"
        "shards = pickle.load(sys.stdin.buffer); print([d.text for shard in shards for d in shard.read()])"
    )
    folders = [os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__)), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", code, *folders], input=pickle.dumps(shards), capture_output=True, check=True, cwd="/"
    )
    return ast.literal_eval(done.stdout.decode())


def test_files_of_an_archive_are_read_also_in_another_process(tmp_path, monkeypatch):
    for name, word in (("one.zip", "one"), ("two.zip", "two")):
        with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("in/a.txt", f"{word}\n\nof a")
            archive.writestr("in/b.jsonl", f'"{word} of b"\n')
            archive.writestr(".hidden.txt", "never")
    monkeypatch.chdir(tmp_path)
    for path in (
        "zip://in/*::one.zip",
        "zip://::one.zip",
        f"zip://in::{tmp_path}/one.zip",
        "simplecache::zip://::one.zip",
    ):
        corpus = Corpus(path, shard_bytes=3)
        assert texts(corpus) == ["one", "of a", "one of b"]
        assert [file.name for file in corpus.files] == ["a.txt", "b.jsonl"]
    corpus = Corpus(["zip://in/a.txt::one.zip", "zip://in/a.txt::two.zip", "zip://in/*.txt::one.zip"])
    assert [file.name for file in corpus.files] == ["a.txt::one.zip", "a.txt::two.zip"]
    assert texts(corpus) == ["one", "of a", "two", "of a"] == in_another_process(corpus.shards())
    (tmp_path / "moved").mkdir()
    for name in ("one.zip", "two.zip"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    moved = Corpus([f"zip://in/a.txt::{tmp_path}/moved/{word}.zip" for word in ("one", "two")])
    assert [shard.key for shard in moved.shards()] == [shard.key for shard in corpus.shards()]
    (tmp_path / "moved" / "one.zip").unlink()
    (tmp_path / "moved" / "one.zip").mkdir()
    with pytest.raises(ValueError, match="zip://in/a.txt::moved/one.zip cannot be read: "):
        Corpus("zip://in/a.txt::moved/one.zip")


def test_a_cache_before_a_place_is_used_and_names_the_same_file(memory, tmp_path):
    memory.pipe("/m/x.txt", b"one")
    corpus = Corpus(["simplecache::memory://m/x.txt", "memory://m/x.txt"])
    assert texts(corpus) == ["one"]
    assert type(corpus.files[0].elsewhere.system).__name__ == "SimpleCacheFileSystem"
    assert corpus.shards()[0].key == Corpus("memory://m/x.txt").shards()[0].key


def test_the_host_of_a_place_is_not_forgotten(memory, monkeypatch):
    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "harbour", Harbour)
    for name in ("a.txt", "b.txt"):
        memory.pipe(f"/books/{name}", b"its size")
    corpus = Corpus("harbour://nantucket:2121/books")
    expected = [f"a ship from nantucket on /books/{name}.txt" for name in "ab"]
    assert texts(corpus) == expected
    assert [file.name for file in corpus.files] == ["a.txt", "b.txt"]
    assert in_another_process(corpus.shards()) == expected
    for path in ("harbour://nantucket/books/*.txt", "harbour://nantucket/books/"):
        assert [shard.key for shard in Corpus(path).shards()] == [shard.key for shard in corpus.shards()]
    two = Corpus(["harbour://ahab:secret@nantucket/books/a.txt", "harbour://bedford/books/a.txt"])
    assert [file.path for file in two.files] == [
        "harbour://ahab@nantucket/books/a.txt",
        "harbour://bedford/books/a.txt",
    ]
    assert texts(two) == [f"a ship from {host} on /books/a.txt" for host in ("nantucket", "bedford")]


class Breaking(io.RawIOBase):
    """A file whose connection ends."""

    def __init__(self, content):
        self.content, self.reads = io.BytesIO(content), 0

    def readable(self):
        return True

    def seekable(self):
        return True

    def seek(self, *place):
        return self.content.seek(*place)

    def tell(self):
        return self.content.tell()

    def readinto(self, buffer):
        got = self.content.readinto(memoryview(buffer)[:1000])
        self.reads += 1
        if not got or self.reads > 2:
            raise ConnectionResetError("the cable was\ncut")
        return got


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.txt.gz", "a.parquet"])
def test_a_place_that_fails_while_a_file_is_read_is_one_sentence(name, memory, monkeypatch):
    content = b"text\n" + b'"word"\n\n' * 500
    if name.endswith("parquet"):
        parquet.write_table(pyarrow.table({"text": [f"whale {i}" for i in range(999)]}), file := io.BytesIO())
        content = file.getvalue()
    memory.pipe(f"/{name}", gzip.compress(content)[:-4] if name.endswith("gz") else content)
    monkeypatch.setattr(type(memory), "open", lambda self, path, *_, **__: Breaking(self.store[path].getvalue()))
    with pytest.raises(ValueError, match=f"memory://{name} cannot be read: the cable was cut; check") as caught:
        texts(Corpus(f"memory://{name}", strict=name.endswith("txt")))
    assert isinstance(caught.value.__cause__, ConnectionResetError)


def test_what_is_wrong_with_the_use_of_a_document_is_not_said_of_the_file(folder):
    def consume():
        for shard in Corpus(folder / "b.txt").shards():
            for document in shard.read():
                raise OSError(document.text)

    with pytest.raises(OSError, match='^"1"$'):
        consume()


class Web(fsspec.implementations.memory.MemoryFileSystem):
    """A server that sends whole files only, and does not say so."""

    protocol = ("http", "https")

    class Ranges(fsspec.spec.AbstractBufferedFile):
        def _fetch_range(self, start, end):
            if start or end < self.size:
                raise ValueError("The HTTP server doesn't appear to support range requests.")
            return self.fs.store[self.path].getvalue()

    class Stream(Breaking):
        def readinto(self, buffer):
            return self.content.readinto(buffer)

        def seek(self, *place):
            raise ValueError("Cannot seek streaming HTTP file")

    def open(self, path, mode="rb", block_size=None, **options):
        if block_size == 0:
            return self.Stream(self.store[path].getvalue())
        return self.Ranges(self, path, mode, block_size)


def test_a_server_that_sends_no_ranges_is_read_from_the_beginning(memory, monkeypatch):
    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "http", Web)
    Web._strip_protocol = classmethod(lambda cls, path: "/" + path.split("://")[-1].strip("/"))
    content = b"".join(b'"number %d"\n' % i for i in range(30_000))
    memory.pipe("/host/a.jsonl", content)
    corpus = Corpus("http://host/a.jsonl", shard_bytes=1000)
    assert len(corpus.shards()) == 1
    assert texts(corpus) == [f"number {i}" for i in range(30_000)]
    memory.pipe("/host/a.parquet", content)
    with pytest.raises(ValueError, match="http://host/a.parquet cannot be read: .*seek"):
        Corpus("http://host/a.parquet").shards()


def test_standard_input_is_read_once_and_its_splits_hold_it(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\nb\n\nc \xff\n\nd")))
    bad_records = BadRecords()
    corpus = Corpus(["-", "-"], shard_bytes=2)
    assert texts(corpus, bad_records) == ["a\nb", "d"]
    assert texts(corpus) == ["a\nb", "d"]
    assert [(bad.place, bad.reason) for bad in bad_records.first] == [("-:document 2", "not UTF-8")]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff")))
    with pytest.raises(ValueError, match="- must be a text file in UTF-8, and document 1 is not; convert it"):
        texts(Corpus("-", strict=True))


@pytest.mark.skipif(sys.platform == "win32", reason="no named pipes")
def test_a_pipe_that_nobody_writes_is_refused_after_a_while(tmp_path, monkeypatch):
    from massieu.corpus import opening

    monkeypatch.setattr(opening, "PATIENCE", 0.2)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UserError, match="pipe cannot be read: nothing has opened it for writing within 0.2 seconds"):
        list(Corpus(pipe).shards())


@pytest.mark.skipif(sys.platform == "win32", reason="no named pipes")
def test_a_pipe_whose_writer_comes_late_is_read(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Timer(0.5, pipe.write_text, args=("one\n\ntwo",))
    writer.start()
    assert [document.text for shard in Corpus(pipe).shards() for document in shard.read()] == ["one", "two"]
    writer.join()


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="no such device")
def test_a_device_is_refused(tmp_path):
    """An endless one would never be read to its end."""
    with pytest.raises(UserError, match="/dev/zero must be a file, or a pipe of plain text, got a device"):
        Corpus("/dev/zero")


@pytest.mark.skipif(sys.platform == "win32", reason="no named pipes")
def test_a_pipe_is_read_like_standard_input(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("one\n\ntwo",))
    writer.start()
    corpus = Corpus(pipe)
    assert texts(corpus) == ["one", "two"]
    assert texts(corpus) == ["one", "two"]
    writer.join()


@pytest.mark.skipif(sys.platform == "win32", reason="no named pipes")
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt.gz"])
def test_a_pipe_of_anything_but_text_is_refused(name, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name} must be a file, or a pipe of plain text, got a pipe of .*; write it"):
        Corpus(tmp_path / name)
    (tmp_path / "b.txt").write_text("one")
    assert names(tmp_path) == ["b.txt"]  # in a folder nobody waits for it


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="all names are Unicode")
def test_a_name_that_is_not_utf8_can_be_read_sampled_and_reported(tmp_path):
    name = os.fsdecode(b"nam\xff.txt")
    (tmp_path / name).write_text("one")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    for path in (tmp_path, tmp_path / name):
        corpus, bad_records = Corpus(path, sample=1.0), BadRecords()
        assert texts(corpus, bad_records) == ["one"]
        assert corpus.files[-1].name == "nam?.txt"
        assert all(shard.key for shard in corpus.shards())
        json.dumps([bad_records.to_dict(), corpus.name], ensure_ascii=False).encode()


def test_an_empty_path_is_not_this_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match='a path must name a file or a folder, got an empty one; "." is this folder'):
        Corpus(["b.txt", ""])


def test_a_wildcard_may_ask_for_hidden_files_and_for_those_without_extension(folder):
    for name in ("out/part-00000", "out/part-00001", "out/_SUCCESS", "out/.part.crc"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("one")
    assert names(f"{folder}/out/part-*") == ["part-00000", "part-00001"]
    assert names(f"{folder}/o*/part-0000[01]") == ["part-00000", "part-00001"]
    assert names(f"{folder}/LIC*") == ["LICENSE"]
    assert names(f"{folder}/.h*") == [".hidden.txt"]
    assert names(f"{folder}/.*/e.txt") == ["e.txt"]
    for path in (f"{folder}/out/*", f"{folder}/out/**", f"{folder}/o*", f"{folder}/imag*"):
        with pytest.raises(ValueError, match="must hold a file that can be read, and there is none"):
            Corpus(path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("none.txt", "none.txt cannot be read: No such file or directory; check the path and its permissions"),
        ("empty", "empty must hold a file that can be read, and there is none; known are .txt, .md, .jsonl"),
        ("*.jsonl", "jsonl must hold a file that can be read, and there is none; known are"),
        ("a.pdf", "a.pdf must have an extension that says what it holds, got .pdf; known are .txt"),
        ("a.parquet.gz", "a.parquet.gz must have an extension that says what it holds, got .parquet.gz; known are"),
    ],
)
def test_what_cannot_be_found_is_one_sentence(path, message, tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("a.pdf", "a.parquet.gz"):
        (tmp_path / name).write_text("a")
    with pytest.raises(ValueError, match=message) as caught:
        Corpus(f"{tmp_path}/{path}")
    assert "\n" not in str(caught.value)


def test_a_place_that_needs_another_package_or_that_nobody_knows_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ValueError, match="s3://bucket/a.txt cannot be read: Install s3fs to access S3; check"):
        Corpus("s3://bucket/a.txt")
    with pytest.raises(ValueError, match="nowhere://a.txt cannot be read: Protocol not known: nowhere; check"):
        Corpus("nowhere://a.txt")


@pytest.mark.parametrize(("name", "package"), [("a.txt", "fsspec"), ("a.parquet", "pyarrow"), ("a.txt.zst", "pyarrow")])
def test_without_a_package_a_sentence_names_the_extra(name, package, tmp_path, monkeypatch):
    (tmp_path / name).write_text("a")
    for module in (package, "fsspec.core" if package == "fsspec" else "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackageError, match=f"{package}.*inspect"):
        texts(Corpus(tmp_path / name))


def test_a_file_that_vanishes_is_one_sentence(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    corpus = Corpus(path)
    path.unlink()
    with pytest.raises(ValueError, match="a.txt cannot be read: No such file or directory"):
        texts(corpus)
