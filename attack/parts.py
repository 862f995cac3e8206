"""Mutated partial results: merging them with a valid one must raise a UserError, or give correct numbers.

Half of the mutations have a digest that was computed again, as an attacker would. A digest cannot tell a forged number
that a reading could have given, so these mutations make what no reading gives: other kinds, shapes, signs or names.
"""

from __future__ import annotations

import copy
import json
import random
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attack.tiny import make_model, make_text

__all__ = ["COUNT", "attack"]

COUNT = 350
ODD: tuple[Any, ...] = (None, True, -1, 1e999, "x", [], [[]], {}, {"dict": [[[], 1]]}, {"tensor": ["x"]}, {"Part": {}})
"""Values of types that no field has."""


@dataclass
class Content:
    """The content of a file.

    Attributes:
        header: the JSON object in the metadata.
        tensors: the tensors by their names.
    """

    header: dict[str, Any]
    tensors: dict[str, Tensor]


def attack(seed: int, count: int) -> Iterator[str | None]:
    """Merge a valid partial result with mutated ones."""
    from massieu.models.loading import load

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = load(str(make_model(folder / "model"))).model
        for text in ("first", "second"):
            _inspect(folder, text)
        sound = folder / "first" / "partial.safetensors"
        expected = _merged(sound, folder / "second", model)
        for number in range(count):
            case = f"{seed}-{number}"
            changed, what = _mutated(sound, random.Random(case))
            path = folder / "changed.safetensors"
            path.write_bytes(changed)
            outcome = _outcome(path, folder / "second", model, expected)
            yield None if outcome is None else f"case {case}: {what}: {outcome}"


def _inspect(folder: Path, name: str) -> None:
    from massieu.corpus import Corpus
    from massieu.inspection import inspect_model

    text = make_text(folder / f"{name}.jsonl", name)
    with text.open("a") as file:
        file.write("not JSON\n")
    inspect_model(str(folder / "model"), Corpus(text)).save(folder / name, figures=False)


def _merged(path: Path, other: Path, model: nn.Module) -> dict[str, Any]:
    """Return all values of a merged inspection."""
    from massieu.inspection.merging import merge_runs

    found = merge_runs([path, other], model=model).to_dict()
    del found["facts"]["seconds"]
    return found


def _outcome(path: Path, other: Path, model: nn.Module, expected: dict[str, Any]) -> str | None:
    """Return the failure, or None."""
    from massieu.checks import UserError

    try:
        found = _merged(path, other, model)
    except UserError:
        return None
    except Exception:
        return f"a traceback, {traceback.format_exc()[-400:]!r}"
    different = [key for key, value in expected.items() if found[key] != value]
    return f"other numbers without an error, in {', '.join(different)}" if different else None


def _mutated(path: Path, chance: random.Random) -> tuple[bytes, str]:
    """Return a file with one mutation, and a description."""
    from safetensors import safe_open
    from safetensors.torch import save

    from massieu.inspection.partial_files import digest_of

    if chance.random() < 0.2:
        return _raw(path.read_bytes(), chance)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    content = Content(json.loads(metadata["massieu"]), tensors)
    change = chance.choice(CHANGES)
    what = f"{change.__name__[1:]}, {change(content, chance)}"
    metadata["massieu"] = json.dumps(content.header, separators=(",", ":"))
    if chance.random() < 0.6:
        metadata["digest"] = digest_of(metadata["massieu"], content.tensors)
        what = f"{what}, with a new digest"
    return save({name: x.contiguous() for name, x in content.tensors.items()}, metadata=metadata), what


def _raw(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    """Return bytes that are truncated, overwritten, reordered, or have another header length."""
    length = int.from_bytes(data[:8], "little")
    place = chance.randrange(8, len(data))
    other = chance.randrange(8, 8 + length)
    claimed = chance.choice([0, 1, length - 1, length + 8, len(data), 1 << 40, (1 << 64) - 1])
    return chance.choice(
        [
            (data[:place], f"cut at byte {place}"),
            (data[:other], f"cut in the header at byte {other}"),
            (data + bytes(chance.randrange(1, 100)), "zeros at its end"),
            (data[:place] + bytes(8) + data[place + 8 :], f"zeros at byte {place}"),
            (data[:place] + data[place + 1 :], f"without byte {place}"),
            (claimed.to_bytes(8, "little") + data[8:], f"a header of {claimed} bytes"),
            (data[:8] + data[8 : 8 + length].replace(b"F64", b"I64", 1) + data[8 + length :], "another dtype"),
            (data[:8] + data[8 : 8 + length].replace(b'"data_offsets":[', b'"data_offsets":[1', 1), "other offsets"),
            (chance.randbytes(200), "random bytes"),
            (b"", "no bytes"),
        ]
    )


def _dtype(content: Content, chance: random.Random) -> str:
    name = chance.choice([name for name in content.tensors if ".passages." not in name])
    x = content.tensors[name]
    other = chance.choice(
        [kind for kind in (torch.float32, torch.int64, torch.bfloat16, torch.bool) if kind != x.dtype]
    )
    content.tensors[name] = x.to(other)
    return f"{name} as {other}"


def _shape(content: Content, chance: random.Random) -> str:
    name = chance.choice([name for name, x in content.tensors.items() if x.numel()])
    x = content.tensors[name]
    ways: list[Callable[[], Tensor]] = [lambda: x[None], lambda: x[..., None], lambda: x.new_zeros(0)]
    ways += [lambda: x[:-1], lambda: torch.cat([x, x])] if x.dim() else []
    content.tensors[name] = chance.choice(ways)().clone()
    return f"{name} from {tuple(x.shape)} to {tuple(content.tensors[name].shape)}"


def _sum(content: Content, chance: random.Random) -> str:
    """Put nan into a tensor, or a negative number into one of counts."""
    floating = [name for name, x in content.tensors.items() if x.is_floating_point() and x.numel()]
    counts = [name for name in floating if name.endswith((".count", ".counts"))]
    name = chance.choice(counts if chance.random() < 0.4 else floating)
    value = -1.0 if name in counts and chance.random() < 0.7 else float("nan")
    x = content.tensors[name] = content.tensors[name].clone()
    x.view(-1)[chance.randrange(x.numel())] = value
    return f"{value} in {name}"


def _swap(content: Content, chance: random.Random) -> str:
    """Swap two tensors of different shapes or dtypes."""
    one = chance.choice([*content.tensors])
    x = content.tensors[one]
    other = chance.choice([name for name, y in content.tensors.items() if (y.shape, y.dtype) != (x.shape, x.dtype)])
    content.tensors[one], content.tensors[other] = content.tensors[other], x
    return f"{one} and {other}"


def _names(content: Content, chance: random.Random) -> str:
    """Remove, rename or add a tensor."""
    name, way = chance.choice([*content.tensors]), chance.choice(["removed", "renamed", "added", "used twice"])
    if way in ("removed", "renamed"):
        x = content.tensors.pop(name)
    if way in ("renamed", "added"):
        content.tensors[f"{name}.x"] = x if way == "renamed" else torch.zeros(3)
    if way == "used twice":
        text = json.dumps(content.header)
        other = chance.choice([other for other in content.tensors if other != name])
        content.header = json.loads(text.replace(f'"{other}"', f'"{name}"'))
    return f"{name} {way}"


def _token(content: Content, chance: random.Random) -> str:
    """Give a passage a token that no model has."""
    name = chance.choice([name for name in content.tensors if name.endswith("input_ids")])
    x = content.tensors[name] = content.tensors[name].clone()
    x.view(-1)[chance.randrange(x.numel())] = chance.choice([-1, 1 << 20, 1 << 40])
    return name


def _number(content: Content, chance: random.Random) -> str:
    """Make a whole number of the header negative, far too large, or a fraction."""
    places = [
        place for place in _places(content.header["partial"]) if type(_at(content.header["partial"], place)) is int
    ]
    place = chance.choice(places)
    value: float = chance.choice([-1, 0.5, 1e999, -(1 << 70)])
    _put(content.header["partial"], place, value)
    return f"{_spelled(place)} = {value}"


def _kind(content: Content, chance: random.Random) -> str:
    """Put a value of another type anywhere in the header."""
    place = chance.choice([place for place in _places(content.header["partial"]) if place])
    before = _at(content.header["partial"], place)
    value = chance.choice([value for value in ODD if type(value) is not type(before)])
    _put(content.header["partial"], place, copy.deepcopy(value))
    return f"{_spelled(place)} = {value}"


def _field(content: Content, chance: random.Random) -> str:
    """Remove, rename or add a key of the header."""
    partial = content.header["partial"]
    place = chance.choice([place for place in _places(partial) if isinstance(_at(partial, place), dict)])
    owner = _at(partial, place)
    name, way = chance.choice([*owner]), chance.choice(["removed", "renamed", "added"])
    value = owner.pop(name) if way != "added" else 0
    if way != "removed":
        owner[f"{name}_"] = value
    return f"{_spelled(place)}.{name} {way}"


def _identity(content: Content, chance: random.Random) -> str:
    """Claim another model or other options."""
    identity = content.header["partial"]["PartialResult"]["identity"]["Identity"]
    name = chance.choice(["model", "tokenizer", "options", "schema"])
    if name == "options":
        pair = chance.choice([pair for pair in identity["options"]["dict"] if pair[0] != "long_documents"])
        pair[1] = 7
        return f"option {pair[0]} = 7"
    identity[name] = "0" * 64
    return f"another {name}"


def _top(content: Content, chance: random.Random) -> str:
    """Change the header around the partial result."""
    name = chance.choice(["schema", "finite", "partial", "corpus"])
    value: Any = chance.choice([None, 7, "massieu.partial/1", [], {}, {"list": []}])
    if name == "finite" and value is None:
        del content.header["finite"]
    else:
        content.header[name] = value
    return f"{name} = {value}"


CHANGES = (_dtype, _shape, _sum, _swap, _names, _token, _number, _kind, _field, _identity, _top)

Place = tuple[str | int, ...]


def _places(value: Any, place: Place = ()) -> Iterator[Place]:
    """Yield the paths of all values in a JSON value."""
    yield place
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _places(value[key], (*place, key))


def _at(value: Any, place: Place) -> Any:
    for key in place:
        value = value[key]
    return value


def _put(value: Any, place: Place, new: Any) -> None:
    _at(value, place[:-1])[place[-1]] = new


def _spelled(place: Place) -> str:
    return ".".join(map(str, place))
