"""Hostile texts: broken encodings, records, tables and archives, pipes, devices, odd names and places.

Each case writes a text and inspects the embedded model on it. Whatever the text: one sentence and exit code 2, or an
inspection of what could be read, in which everything that could not be read is counted; nothing hangs.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import random
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attack.children import Ended, complaint, run, warm_up

__all__ = ["COUNT", "attack"]

GOOD = ("Call me Ishmael.", "Some years ago, never mind how long precisely.", "It was a dark night.")
REFUSED = "refused"
"""Expected instead of a number of documents: one sentence. None: either a sentence or an inspection."""

Expected = int | str | None
Harm = Callable[["Case"], Expected]
HARMS: list[Harm] = []
ARCHIVES: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("gz", gzip.compress),
    ("bz2", bz2.compress),
    ("xz", lzma.compress),
]
CONTROL = "\x1b[2J\x07\x9b31m\u202e[bold]x[/]"


@dataclass
class Case:
    """A text that a case may write.

    Attributes:
        place: folder of the case.
        random: its choices.
        paths: what is passed with ``--text``.
        more: further arguments.
        bad: records that must be counted as bad; None if any number may be.
    """

    place: Path
    random: random.Random
    paths: list[str]
    more: list[str]
    bad: int | None = None

    def write(self, content: bytes | str, name: str = "text.txt") -> Path:
        """Write a file and name it."""
        path = self.place / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        self.paths.append(str(path))
        return path

    def lines(self, *more: str, name: str = "text.jsonl") -> None:
        """Write good records and others, in a random order."""
        every = [*(json.dumps({"text": text}) for text in GOOD), *more]
        self.random.shuffle(every)
        self.write("\n".join(every) + "\n", name)

    def parquet(self, columns: dict[str, Any], name: str = "text.parquet") -> Path:
        """Write a table."""
        import pyarrow
        import pyarrow.parquet

        path = self.place / name
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
        self.paths.append(str(path))
        return path

    def flip(self, content: bytes) -> bytes:
        """Change one byte, not among the first."""
        changed = bytearray(content)
        changed[self.random.randrange(12, len(content))] ^= 1 << self.random.randrange(8)
        return bytes(changed)


def harm(damage: Harm) -> Harm:
    """Add a damage to the list."""
    HARMS.append(damage)
    return damage


def plain(texts: Sequence[str] = GOOD) -> str:
    """Documents as plain text."""
    return "\n\n".join(texts) + "\n"


def attack(seed: int, count: int) -> Iterator[str | None]:
    """Run the cases: every damage once, then again with other choices."""
    warm_up()
    with tempfile.TemporaryDirectory() as home:
        for number in range(count):
            place = Path(home, str(number))
            place.mkdir()
            broken = _broken(seed, number, place)
            shutil.rmtree(place, ignore_errors=True)
            yield broken


def _broken(seed: int, number: int, place: Path) -> str | None:
    damage = HARMS[number % len(HARMS)]
    case = Case(place, random.Random(f"{seed}-{number}"), [], [])
    expected = damage(case)
    texts = [word for path in case.paths for word in ("--text", path)]
    shown = [] if case.random.random() < 0.2 else ["--json"]
    ended = run(["inspect", "--heads-only", *shown, *case.more, *texts], place)
    why = complaint(ended) or _wrong(ended, expected, case.bad, bool(shown))
    return None if why is None else f"{damage.__name__} (case {number} of seed {seed}) {why}"


def _wrong(ended: Ended, expected: Expected, bad: int | None, is_json: bool) -> str | None:
    if ended.code == 2:
        said = ended.err.strip().splitlines()[-1][:300]
        return f"was refused ({said})" if isinstance(expected, int) else None
    if ended.code != 0:
        return f"ended with {ended.code}"
    if expected == REFUSED:
        return "was not refused"
    if not is_json:
        return None
    text = json.loads(ended.out)["facts"]["text"]
    if isinstance(expected, int) and text["documents"] != expected:
        return f"read {text['documents']} documents instead of {expected}"
    found = text["bad_records"]["total"]
    return f"counted {found} bad records instead of {bad}" if bad is not None and found != bad else None


# Plain text.


@harm
def nothing(case: Case) -> Expected:
    case.write(case.random.choice(["", "\n", " \n\t\n", "\ufeff", "\r\n" * 1000, "\x0b\x0c", "\u3000\u2028"]))
    return REFUSED


@harm
def zeros_alone(case: Case) -> Expected:
    case.write(b"\0" * case.random.choice([1, 100]))
    return None


@harm
def zeros_inside(case: Case) -> Expected:
    case.write("Call\0me\n\nIsh\0mael")
    return 2


@harm
def control_characters(case: Case) -> Expected:
    case.write(plain([f"{CONTROL} {text}" for text in GOOD]))
    return 3


@harm
def utf_16(case: Case) -> Expected:
    case.write(plain().encode(case.random.choice(["utf-16", "utf-16-le", "utf-16-be", "utf-32"])))
    return None


@harm
def latin_1(case: Case) -> Expected:
    case.write(b"caf\xe9 is bad\n\n" + plain().encode())
    case.bad = 1
    return 3


@harm
def lone_bytes(case: Case) -> Expected:
    bad = [b"\x80", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\xff", b"\xe2\x82", b"\xf4\x90\x80\x80"]
    case.write(case.random.choice(bad) + b" bad\n\n" + plain().encode())
    case.bad = 1
    return 3


@harm
def cut_inside_of_a_sign(case: Case) -> Expected:
    case.write(plain().encode() + b"\n" + "\U0001f600".encode()[: case.random.randrange(1, 4)])
    case.bad = 1
    return 3


@harm
def only_bad_bytes(case: Case) -> Expected:
    case.write(bytes(case.random.randrange(128, 256) for _ in range(1000)))
    return REFUSED


@harm
def mark_of_the_byte_order(case: Case) -> Expected:
    case.write("\ufeff" + plain())
    return 3


@harm
def marks_inside(case: Case) -> Expected:
    case.write("\n\n".join(f"\ufeff{text}\ufeff" for text in GOOD))
    return 3


@harm
def line_ends_of_windows(case: Case) -> Expected:
    case.write(plain().replace("\n", "\r\n"))
    return 3


@harm
def line_ends_of_old_machines(case: Case) -> Expected:
    case.write(plain().replace("\n", case.random.choice(["\r", "\u2028", "\x85", "\x0c"])))
    return None


@harm
def one_line_of_megabytes(case: Case) -> Expected:
    case.more += ["--max-length", "256"]
    case.write("a" * case.random.choice([9 << 20, 20 << 20]))
    return None


@harm
def one_line_of_megabytes_beside_good_ones(case: Case) -> Expected:
    case.write(plain() + "\n" + "a" * (9 << 20))
    case.bad = 1
    return 3


@harm
def one_word_without_end(case: Case) -> Expected:
    case.more += ["--max-length", "256"]
    case.write(case.random.choice(["a", "\U00013000", "\u0301", " a", "\n"]) * 20_000 + "b")
    return None


@harm
def document_beyond_the_window(case: Case) -> Expected:
    case.write(plain(["word " * 3000]))
    return REFUSED


@harm
def special_tokens_alone(case: Case) -> Expected:
    case.write("<|endoftext|>" * case.random.choice([1, 50]))
    return REFUSED


@harm
def special_tokens_inside(case: Case) -> Expected:
    case.write("\n\n".join(f"<|endoftext|>{text}<|endoftext|>" for text in GOOD))
    return 3


@harm
def piles_of_accents(case: Case) -> Expected:
    case.write("\n\n".join("e" + "\u0301" * 60 for _ in range(3)))
    return 3


@harm
def joined_signs(case: Case) -> Expected:
    case.write("\n\n".join("\U0001f468\u200d\U0001f469\u200d\U0001f467\u202e\u2066" * 4 for _ in range(3)))
    return 3


@harm
def signs_that_do_not_exist(case: Case) -> Expected:
    case.write("\n\n".join("\ufdd0\uffff\U0010ffff\ue000 x" for _ in range(3)))
    return 3


@harm
def many_small_documents(case: Case) -> Expected:
    case.write("\n\n".join("abc"[number % 3] for number in range(400)))
    return 400


@harm
def one_letter(case: Case) -> Expected:
    case.write("a")
    return 1


# JSON lines.


@harm
def json_nested_deep(case: Case) -> Expected:
    sign = case.random.choice(["[", '{"text":', '{"a":['])
    case.lines(sign * 100_000)
    case.bad = 1
    return 3


@harm
def json_nested_deep_and_closed(case: Case) -> Expected:
    case.lines('{"text": "a", "more": ' + "[" * 100_000 + "]" * 100_000 + "}")
    case.bad = 1
    return 3


@harm
def json_broken(case: Case) -> Expected:
    broken = ["{", '{"text": "a', "nul", '{"text": "a"} x', "'a'", '{"text": "\\x"}', '{"text": "\t\\u12"}', "\0"]
    case.lines(*case.random.sample(broken, 3))
    case.bad = 3
    return 3


@harm
def json_number_of_many_digits(case: Case) -> Expected:
    case.lines('{"text": "a", "n": %s}' % ("9" * 100_000))
    case.bad = None
    return None


@harm
def json_halves_of_pairs(case: Case) -> Expected:
    case.lines('{"text": "a \\ud800 b"}', '{"text": "\\udc00"}')
    case.bad = 2
    return 3


@harm
def json_numbers_that_are_none(case: Case) -> Expected:
    case.lines('{"text": NaN}', '{"text": Infinity}', '{"text": 1e999}')
    case.bad = 3
    return 3


@harm
def json_of_other_kinds(case: Case) -> Expected:
    case.lines(
        *case.random.sample(["[]", "3", "null", "true", '[{"text": "a"}]', '{"text": null}', '{"text": [1]}', "{}"], 4)
    )
    case.bad = 4
    return 3


@harm
def json_without_the_column(case: Case) -> Expected:
    case.more += ["--column", case.random.choice(["nosuch", CONTROL, "", "a" * 10_000, "=1+1"])]
    case.lines()
    return REFUSED


@harm
def json_with_equal_names(case: Case) -> Expected:
    case.lines('{"text": 3, "text": "the last one counts"}')
    case.bad = 0
    return 4


@harm
def json_with_a_mark(case: Case) -> Expected:
    case.write("\ufeff" + "\n".join(json.dumps({"text": text}) for text in GOOD), "text.jsonl")
    return 3


@harm
def json_in_utf_16(case: Case) -> Expected:
    case.write("\n".join(json.dumps({"text": text}) for text in GOOD).encode("utf-16"), "text.jsonl")
    return REFUSED


@harm
def json_cut_short(case: Case) -> Expected:
    content = "\n".join(json.dumps({"text": text}) for text in GOOD)
    case.write(content[:-3], "text.jsonl")
    case.bad = 1
    return 2


@harm
def json_of_empty_texts(case: Case) -> Expected:
    case.write('{"text": ""}\n{"text": " "}\n""\n', "text.jsonl")
    return REFUSED


@harm
def json_with_many_names(case: Case) -> Expected:
    case.lines(json.dumps({"text": "a", **{f"{number}": number for number in range(20_000)}}))
    return 4


@harm
def json_in_one_huge_line(case: Case) -> Expected:
    case.lines(json.dumps({"text": "a" * (9 << 20)}))
    case.bad = 1
    return 3


@harm
def json_with_control_characters_as_name(case: Case) -> Expected:
    case.write("{" * 3 + "\n", f"a{CONTROL[:5]}.jsonl")
    return REFUSED


# Tables.


@harm
def table_with_an_open_quote(case: Case) -> Expected:
    case.write('text\nCall me\n"Ishmael\nand more\n', case.random.choice(["text.csv", "text.tsv"]))
    case.bad = 1
    return 1


@harm
def table_of_ragged_rows(case: Case) -> Expected:
    case.write("a,text\n1,one text\n2\n3,three texts,4,5\n", "text.csv")
    return None


@harm
def table_with_zeros(case: Case) -> Expected:
    case.write(b"text\nCall\0me\nIshmael is my name\n", "text.csv")
    return None


@harm
def table_without_the_column(case: Case) -> Expected:
    case.write("a,b\n1,2\n", "text.csv")
    return REFUSED


@harm
def table_without_rows(case: Case) -> Expected:
    case.write(case.random.choice(["", "text\n", "text", "\n\n", "\ufeff"]), "text.csv")
    return REFUSED


@harm
def table_with_equal_names(case: Case) -> Expected:
    case.write("text,text\none text,2\n", "text.csv")
    return None


@harm
def table_with_a_huge_field(case: Case) -> Expected:
    case.write("text\nCall me\n" + "a" * (9 << 20) + "\n", "text.csv")
    return None


@harm
def table_in_latin_1(case: Case) -> Expected:
    case.write(b"text\nCall me\ncaf\xe9\n", "text.csv")
    case.bad = 1
    return 1


@harm
def table_with_a_formula_as_name(case: Case) -> Expected:
    case.write("=cmd|' /C calc'!A0,text\n1,one text\n", "text.csv")
    return 1


@harm
def table_with_a_name_of_control_characters(case: Case) -> Expected:
    case.write(f"{CONTROL},b\n1,2\n", "text.csv")
    return REFUSED


@harm
def table_of_quotes(case: Case) -> Expected:
    case.write("text\n" + '"' * case.random.choice([1, 3, 1001, 100_001]) + "\n", "text.csv")
    return None


# Compressed files.


@harm
def archive_cut_short(case: Case) -> Expected:
    kind, pack = case.random.choice(ARCHIVES)
    content = pack(plain(GOOD * 50).encode())
    case.write(content[: case.random.randrange(1, len(content) - 1)], f"text.txt.{kind}")
    return None


@harm
def archive_with_a_flipped_bit(case: Case) -> Expected:
    kind, pack = case.random.choice(ARCHIVES)
    case.write(case.flip(pack(plain(GOOD * 50).encode())), f"text.txt.{kind}")
    return None


@harm
def archive_that_is_none(case: Case) -> Expected:
    case.write(case.random.randbytes(1000), f"text.{case.random.choice(['txt', 'jsonl', 'csv'])}.gz")
    return REFUSED


@harm
def archive_of_another_kind_that_is_none(case: Case) -> Expected:
    case.write(case.random.randbytes(1000), f"text.txt.{case.random.choice(['bz2', 'xz', 'zst'])}")
    return REFUSED


@harm
def plain_text_as_archive(case: Case) -> Expected:
    case.write(plain(), f"text.txt.{case.random.choice(['gz', 'bz2', 'xz', 'zst'])}")
    return REFUSED


@harm
def archive_of_nothing(case: Case) -> Expected:
    case.write(case.random.choice([b"", gzip.compress(b""), gzip.compress(b"\n\n")]), "text.txt.gz")
    return REFUSED


@harm
def archive_of_one_endless_line(case: Case) -> Expected:
    """A bomb: small as a file, large as a line; it is kept from memory by the limit of a record, or read."""
    case.more += ["--max-length", "256"]
    case.write(gzip.compress(b"a" * (24 << 20)), case.random.choice(["text.txt.gz", "text.jsonl.gz", "text.csv.gz"]))
    return None


@harm
def archive_of_members(case: Case) -> Expected:
    case.write(b"".join(gzip.compress(f"{text}\n\n".encode()) for text in GOOD), "text.txt.gz")
    return 3


@harm
def archive_with_garbage_behind(case: Case) -> Expected:
    case.write(gzip.compress(plain().encode()) + case.random.randbytes(50), "text.txt.gz")
    return None


@harm
def archive_in_an_archive(case: Case) -> Expected:
    case.write(gzip.compress(gzip.compress(plain().encode())), "text.txt.gz")
    return None


# Parquet.


@harm
def parquet_that_is_none(case: Case) -> Expected:
    contents = [b"", b"PAR1", b"PAR1" * 50, case.random.randbytes(2000), b"PAR1" + b"\xff" * 20 + b"PAR1"]
    case.write(case.random.choice(contents), "text.parquet")
    return REFUSED


@harm
def parquet_cut_short(case: Case) -> Expected:
    path = case.parquet({"text": list(GOOD)})
    content = path.read_bytes()
    path.write_bytes(content[: case.random.randrange(1, len(content) - 1)])
    return REFUSED


@harm
def parquet_with_a_flipped_bit(case: Case) -> Expected:
    path = case.parquet({"text": [*GOOD] * 20})
    path.write_bytes(case.flip(path.read_bytes()))
    return None


@harm
def parquet_of_other_kinds(case: Case) -> Expected:
    kinds: list[list[Any]] = [[1, 2], [None, None], [["a"], []], [b"\xff", b"a"], [1.5, float("nan")], [{"a": 1}], []]
    case.parquet({"text": case.random.choice(kinds)})
    return REFUSED


@harm
def parquet_with_nothing_in_some_rows(case: Case) -> Expected:
    case.parquet({"text": [*GOOD, None, None]})
    return None


@harm
def parquet_without_the_column(case: Case) -> Expected:
    case.parquet({CONTROL: [1], "other": ["a"]})
    return REFUSED


# Places.


@harm
def folder_of_nothing(case: Case) -> Expected:
    (case.place / "folder").mkdir()
    (case.place / "folder" / case.random.choice(["a.pdf", ".hidden.txt", "noextension"])).write_text(plain())
    case.paths.append(str(case.place / "folder"))
    return REFUSED


@harm
def pipe_that_nobody_writes(case: Case) -> Expected:
    os.mkfifo(case.place / "pipe")
    case.paths.append(str(case.place / "pipe"))
    return REFUSED


@harm
def folder_with_pipes_and_links(case: Case) -> Expected:
    folder = case.place / "folder"
    folder.mkdir()
    os.mkfifo(folder / "pipe.txt")
    (folder / "loop.txt").symlink_to(folder / "loop.txt")
    (folder / "gone.txt").symlink_to(folder / "nowhere")
    (folder / "good.txt").write_text(plain())
    case.paths.append(str(folder))
    return None


@harm
def device(case: Case) -> Expected:
    case.paths.append(case.random.choice(["/dev/zero", "/dev/null", "/dev/full", "/dev/urandom"]))
    return REFUSED


@harm
def address_of_a_server(case: Case) -> Expected:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(case.place / "socket"))
    case.paths.append(str(case.place / "socket"))
    return REFUSED


@harm
def path_to_nothing(case: Case) -> Expected:
    path = case.place / "link"
    path.symlink_to(case.random.choice([path, Path("nowhere")]))
    names = ["nowhere.txt", "x" * 300, f"{CONTROL}.txt", "a\0b", "", "*.nosuch", "[", "[!", "**", "~nosuchuser/a.txt"]
    case.paths.append(case.random.choice([str(path), *names]))
    return REFUSED


@harm
def address_that_leads_nowhere(case: Case) -> Expected:
    addresses = [
        "nosuch://a.txt",
        "http://127.0.0.1:9/a.txt",
        "zip://a.txt::nowhere.zip",
        "file:///nowhere",
        "::",
        "s3://",
    ]
    case.paths.append(case.random.choice(addresses))
    return REFUSED


@harm
def name_of_odd_characters(case: Case) -> Expected:
    names: list[Any] = [
        f"{CONTROL.replace('/', '')}.txt",
        "a\nb.txt",
        "[red].txt",
        b"\xff\xfe.txt",
        "=1+1.txt",
        "-x.txt",
    ]
    name = os.fsdecode(case.random.choice(names))
    (case.place / name).write_text(plain())
    case.paths.append(str(case.place / name))
    return None


@harm
def the_same_twice(case: Case) -> Expected:
    path = case.write(plain())
    case.paths.append(str(path))
    return 3


@harm
def good_beside_bad(case: Case) -> Expected:
    case.write(plain())
    case.write(b"\xff bad", "more.txt")
    case.bad = 1
    return 3


COUNT = max(78, len(HARMS))
