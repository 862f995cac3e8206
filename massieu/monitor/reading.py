"""Statistics of one training step, convertible to a table, to a line of JSON and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from massieu.checks import UserError

__all__ = ["Flag", "Place", "Reading", "is_recordable", "summary"]

LARGEST = 10_000_000  # numbers of one quantity; a damaged line of a log may claim more


class Place(NamedTuple):
    """An attention call of the model.

    Attributes:
        stack: "encoder", "decoder" or "cross", as in :class:`massieu.taps.AttentionCall`.
        layer: its number in the stack.
        name: path of the attention module; ``path[1]`` for its second call in one pass.
        heads: number of its heads.
    """

    stack: str
    layer: int
    name: str
    heads: int


@dataclass(frozen=True)
class Flag:
    """A threshold crossed in a reading, or crossed back.

    Attributes:
        name: name of the rule, such as "entropy collapse".
        stack: stack of the layer.
        layer: number of the layer in the stack.
        head: number of the head; None for the whole layer.
        value: value of the quantity in this reading.
        threshold: crossed threshold.
        reason: observation and its meaning, in one sentence.
        reference: source that describes it.
        state: "raised" when the threshold was crossed, "cleared" when it was crossed back.
    """

    name: str
    stack: str
    layer: int
    head: int | None
    value: float
    threshold: float
    reason: str
    reference: str
    state: Literal["raised", "cleared"] = "raised"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for ``json.dumps(..., allow_nan=False)``, as :meth:`Reading.to_dict` does."""
        return {key: _plain([x])[0] if isinstance(x, float) else x for key, x in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Flag:
        """Rebuild a flag from :meth:`to_dict`; other values raise ValueError, KeyError or TypeError."""
        flag = cls(**{**values, **{name: _numbers([values[name]])[0] for name in ("value", "threshold")}})
        words = (flag.name, flag.stack, flag.reason, flag.reference)
        if not all(isinstance(each, str) for each in words) or flag.state not in ("raised", "cleared"):
            raise ValueError(f"a flag of {words} that is {flag.state!r}")
        _count(flag.layer)
        _count(0 if flag.head is None else flag.head)
        return flag

    def __str__(self) -> str:
        head = "" if self.head is None else f" head {self.head}"
        return f"{self.name} {self.state} in {self.stack} layer {self.layer}{head}: {self.reason} [{self.reference}]"


@dataclass(frozen=True, eq=False)
class Reading:
    """The state of a model at one step of its training.

    Attributes:
        step: number of the step, from zero.
        places: the attention calls, in the order of the model: row ``i`` of every tensor belongs to ``places[i]``.
        heads: by quantity, float64 ``(places, heads)``; nan where undefined and behind the last head of a place.
        layers: by quantity, float64 ``(places,)``.
        flags: flags raised or cleared at this step.
        recorded: by name, the latest number of :meth:`Watch.record` since the reading before, to the end of this step.

    Example:
        >>> place = Place("decoder", 3, "h.3.attn", heads=2)
        >>> reading = Reading(100, (place,), {"entropy": torch.tensor([[0.5, 1.5]])}, {"token_cosine": torch.ones(1)})
        >>> reading.series()["entropy/layer03/median"], reading.series()["token_cosine/layer03"]
        (1.0, 1.0)
        >>> Reading.from_dict(reading.to_dict()).series(per_head=True)["entropy/layer03/head01"]
        1.5
    """

    step: int
    places: tuple[Place, ...]
    heads: Mapping[str, Tensor] = field(default_factory=dict)
    layers: Mapping[str, Tensor] = field(default_factory=dict)
    flags: tuple[Flag, ...] = ()
    recorded: dict[str, float] = field(default_factory=dict)

    @property
    def labels(self) -> tuple[str, ...]:
        """Short names of the places: ``layer03``, or ``decoder.layer03`` in a model with several stacks."""
        several = len({place.stack for place in self.places}) > 1
        return tuple(f"{f'{place.stack}.' if several else ''}layer{place.layer:02d}" for place in self.places)

    def series(self, per_head: bool = False) -> dict[str, float]:
        """Return numbers by flat names, the same names at every reading; nan where undefined.

        Quantities of heads are ``quantity/layer03/min``, ``/median`` and ``/max`` over the heads of a place, with
        ``per_head`` also ``quantity/layer03/head07``; those of layers ``quantity/layer03``. Recorded values keep their
        name.
        """
        found = dict(self.recorded)
        for name, values in self.heads.items():
            for place, label, row in zip(self.places, self.labels, values.tolist(), strict=True):
                own = row[: place.heads]
                found |= {f"{name}/{label}/{key}": value for key, value in summary(own).items()}
                if per_head:
                    found |= {f"{name}/{label}/head{head:02d}": value for head, value in enumerate(own)}
        for name, values in self.layers.items():
            found |= {f"{name}/{label}": value for label, value in zip(self.labels, values.tolist(), strict=True)}
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for ``json.dumps(..., allow_nan=False)``; nan becomes None, infinities strings."""
        rows = {
            name: [_plain(row[: place.heads]) for place, row in zip(self.places, values.tolist(), strict=True)]
            for name, values in self.heads.items()
        }
        recorded = dict(zip(self.recorded, _plain(list(self.recorded.values())), strict=True))
        return {
            "step": self.step,
            **({"recorded": recorded} if recorded else {}),
            "places": [list(place) for place in self.places],
            "heads": rows,
            "layers": {name: _plain(values.tolist()) for name, values in self.layers.items()},
            "flags": [flag.to_dict() for flag in self.flags],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Reading:
        """Rebuild a reading from :meth:`to_dict`."""
        try:
            places = tuple(_place(*place) for place in values["places"])
            heads = {name: _table(rows, places) for name, rows in values["heads"].items()}
            layers = {name: _tensor(_numbers(row, len(places))) for name, row in values["layers"].items()}
            flags = tuple(Flag.from_dict(flag) for flag in values["flags"])
            recorded = {_recordable(name): _numbers([x])[0] for name, x in values.get("recorded", {}).items()}
            return cls(_count(values["step"]), places, heads, layers, flags, recorded)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise UserError(
                f"a reading must have step, places, heads, layers and flags as to_dict writes them, got {error!r};"
                " read a log that massieu.watch wrote"
            ) from error


def is_recordable(name: str) -> bool:
    """Return whether a recorded value may have this name, beside the columns of a log.

    Example:
        >>> is_recordable("loss"), is_recordable("entropy/layer00"), is_recordable("step")
        (True, False, False)
    """
    return name.isidentifier() and name not in ("step", "flags")


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return minimum, median and maximum of the values that are not nan.

    Example:
        >>> summary([4.0, float("nan"), 1.0, 2.0, 3.0])
        {'min': 1.0, 'median': 2.5, 'max': 4.0}
    """
    known = torch.tensor([value for value in values if not math.isnan(value)], dtype=torch.float64)
    if not len(known):
        return dict.fromkeys(("min", "median", "max"), math.nan)
    # Not Tensor.median, which takes the lower of two in the middle; quantile would make nan of infinities.
    ordered, middle = known.sort().values, len(known) // 2
    median = ordered[middle] if len(known) % 2 else ordered[middle - 1 : middle + 1].mean()
    return {"min": ordered[0].item(), "median": median.item(), "max": ordered[-1].item()}


def _plain(values: Sequence[float]) -> list[float | str | None]:
    return [None if math.isnan(value) else str(value) if math.isinf(value) else value for value in values]


def _numbers(values: Sequence[float | str | None], length: int = 1) -> list[float]:
    """Invert ``_plain`` for a list of this length."""
    if len(values) != length:
        raise ValueError(f"{length} numbers expected, got {len(values)}")
    return [math.nan if value is None else float(value) for value in values]


def _count(value: Any) -> int:
    """Return a whole number from zero that fits an integer tensor."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise ValueError(f"a number from zero expected, got {value!r}")
    return value


def _recordable(name: str) -> str:
    if not is_recordable(name):
        raise ValueError(f"the name of a recorded value expected, got {name!r}")
    return name


def _place(stack: str, layer: int, name: str, heads: int) -> Place:
    if not isinstance(stack, str) or not isinstance(name, str):
        raise ValueError(f"names of a place expected, got {stack!r} and {name!r}")
    return Place(stack, _count(layer), name, _count(heads))


def _table(rows: Sequence[Any], places: Sequence[Place]) -> Tensor:
    """Pad rows of different lengths with nan."""
    known = [_numbers(row, place.heads) for row, place in zip(rows, places, strict=True)]
    most = max(map(len, known), default=0)
    if most * len(known) > LARGEST:
        raise ValueError(f"{len(known)} places of up to {most} heads are more than {LARGEST} numbers")
    return _tensor([[*row, *[math.nan] * (most - len(row))] for row in known])


def _tensor(values: Sequence[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
