"""Single flipped bits in partial results and checkpoints: each must raise a UserError."""

from __future__ import annotations

import random
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from attack.tiny import make_model, make_text

__all__ = ["COUNT", "attack"]

COUNT = 60
CORPUS = "c" * 64


def attack(seed: int, count: int) -> Iterator[str | None]:
    """Flip one bit of a partial result or of a checkpoint, and read it."""
    from massieu.corpus.shards import Shard
    from massieu.inspection.partial_files import load_checkpoint, load_partial, save_checkpoint, save_partial
    from massieu.inspection.reader import Reader
    from massieu.models.loading import load

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        loaded = load(str(make_model(folder / "model")))
        texts = make_text(folder / "text", "flips").read_text().replace('"', "").splitlines()
        partial = Reader(loaded.model, loaded.tokenizer).read(Shard.of_texts(tuple(texts)))
        save_partial(partial, folder / "part")
        save_checkpoint(folder / "checkpoint", partial, {0, 1, 4}, CORPUS)
        readers: dict[str, Callable[[Path], object]] = {
            "part": load_partial,
            "checkpoint": lambda path: load_checkpoint(path, partial.identity, CORPUS),
        }
        for which, read in readers.items():
            read(folder / which)  # the control
        for number in range(count):
            case = f"{seed}-{number}"
            which = ("part", "checkpoint")[number % 2]
            data = (folder / which).read_bytes()
            bit = _bit(data, random.Random(case))
            outcome = _outcome(_flipped(data, bit), folder / "flipped", readers[which])
            yield None if outcome is None else f"case {case}: bit {bit} of a {which}: {outcome}"


def _bit(data: bytes, chance: random.Random) -> int:
    """Return a random bit, of header and tensors equally often."""
    begin = 8 + int.from_bytes(data[:8], "little")
    return chance.randrange(8 * begin) if chance.random() < 0.5 else chance.randrange(8 * begin, 8 * len(data))


def _flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _outcome(data: bytes, path: Path, read: Callable[[Path], object]) -> str | None:
    """Return the failure, or None."""
    from massieu.checks import UserError

    path.write_bytes(data)
    try:
        read(path)
    except UserError:
        return None
    except Exception:
        return f"a traceback, {traceback.format_exc()[-400:]!r}"
    return "it was read without an error"
