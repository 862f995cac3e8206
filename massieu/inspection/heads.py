"""The heads table: what every head's rows are on average over a text, from one pass in constant memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from massieu.accumulators.serialization import stored
from massieu.accumulators.streams import Extremes, Means, Shares
from massieu.checks import UserError
from massieu.corpus.passages import Batch
from massieu.taps import AttentionCall
from massieu.taps.call_statistics import broken_rows, exact_rows, rows_stood_for, sampled_positions, sampled_rows

if TYPE_CHECKING:
    import pandas

__all__ = ["HeadStatistics", "head_class"]

MEANS = (
    "log_normalizer",
    "entropy",
    "normalized_entropy",
    "perplexity",
    "effective_atoms",
    "peak",
    "score_mean",
    "score_variance",
    "score_range",
    "mass90",
    "sink_mass",
    "self_mass",
    "previous_mass",
    "next_mass",
)
EXTREMES = ("score_max", "entropy", "peak")
FEWEST_ATOMS = 32  # a row with fewer cannot reach class IV, so it says nothing about classes


@stored()
@dataclass
class LayerOfHeads:
    """Accumulators of all heads of one attention call.

    Attributes:
        name: path of the attention module.
        means: of :data:`MEANS`, ``(statistics, heads)``.
        extremes: of :data:`EXTREMES`.
        shares: of the keys that hold nine tenths of the mass, in rows with enough keys to tell a class.
        keys: of each head, the sum over those rows of the number of keys that they see.
        empty: rows of each head that see no key.
        broken: rows of each head that see keys and have statistics that are not finite.
        rows: rows that count, those included.
        notes: sentences on what does not apply.
        by_passage: the means with each passage as a document of its own; None if that is not needed.
    """

    name: str
    means: Means
    extremes: Extremes
    shares: Shares
    keys: Tensor
    empty: Tensor
    broken: Tensor
    rows: int = 0
    notes: set[str] = field(default_factory=set)
    by_passage: Means | None = None

    @classmethod
    def of(cls, name: str, heads: int, by_passage: bool) -> LayerOfHeads:
        shape, none = (len(MEANS), heads), torch.zeros(heads, dtype=torch.long)
        extremes = Extremes.none((len(EXTREMES), heads))
        found = cls(name, Means(shape), extremes, Shares((heads,)), none.double(), none, none)
        found.by_passage = Means(shape) if by_passage else None
        return found

    @property
    def heads(self) -> int:
        return self.means.sum.shape[-1]

    def add_shares(self, whole: Mapping[str, Tensor], taken: Tensor, weight: Tensor) -> None:
        """Add sampled rows, each with the number of rows that it stands for."""
        keys = whole["atoms"].cpu().double()
        shares = whole["mass90_share"].cpu().masked_fill(~taken | (keys < FEWEST_ATOMS), torch.nan)
        weight = weight.expand(shares.shape)
        self.keys = self.keys + (weight * keys).masked_fill(shares.isnan(), 0.0).sum((0, 2))
        self.shares.add(shares.transpose(0, 1).flatten(1), weight.transpose(0, 1).flatten(1))

    def add_extremes(self, exact: Mapping[str, Tensor], used: Tensor) -> None:
        """Add the extremes of the rows that count."""
        # A row with a single atom, such as the first one of a causal model, has no choice: it is no extreme.
        alone = exact["normalized_entropy"].isnan()
        left_out = ~used.to(alone.device)
        hidden = {name: left_out if name == "score_max" else left_out | alone for name in EXTREMES}
        extremes = [exact[name].masked_fill(hidden[name], torch.nan).cpu() for name in EXTREMES]
        self.extremes.add(torch.stack([values.transpose(0, 1).flatten(1) for values in extremes]))

    def merge(self, other: LayerOfHeads) -> None:
        self.means.merge(other.means)
        self.extremes.merge(other.extremes)
        self.shares.merge(other.shares)
        self.keys = self.keys + other.keys
        self.rows += other.rows
        self.empty = self.empty + other.empty
        self.broken = self.broken + other.broken
        self.notes = self.notes | other.notes
        if self.by_passage is None or other.by_passage is None:
            self.by_passage = None
        else:
            self.by_passage.merge(other.by_passage)


@stored("sampled", "by_passage", "layers")
class HeadStatistics:
    """Receives attention calls of a tapped model and keeps sums that give the heads table.

    Args:
        rows: number of rows of each passage that are looked at whole, for the 90% mass and the range of the scores;
            each weighs as much as the rows that it stands for. None for all of them. Everything else counts every row.
        by_passage: whether to keep what is needed for standard errors that treat a passage as one draw.
    """

    def __init__(self, rows: int | None = 32, *, by_passage: bool = False) -> None:
        if rows is not None and (not isinstance(rows, int) or rows < 1):
            raise UserError(f"rows must be a positive whole number or None, got {rows!r}; None looks at every row")
        self.sampled = rows
        self.by_passage = by_passage
        self.layers: dict[tuple[str, int], LayerOfHeads] = {}

    def receive(self, call: AttentionCall, batch: Batch) -> None:
        """Take in one call on one batch."""
        name = f"{call.name}[{call.number}]" if call.number else call.name
        layer = self.layers.setdefault((call.stack, call.layer), LayerOfHeads.of(name, call.shape[1], self.by_passage))
        layer.notes |= set(_notes(call))
        with torch.no_grad():
            self._add(layer, call, batch)

    def _add(self, layer: LayerOfHeads, call: AttentionCall, batch: Batch) -> None:
        exact = exact_rows(call)
        used = _used(layer, call, batch, exact)
        position, taken = self._sample(call, batch, used)
        whole, weight = sampled_rows(call, position), rows_stood_for(used, taken)
        layer.add_shares(whole, taken, weight)
        layer.add_extremes(exact, used)
        total, count = _sums(exact, used, whole, taken, weight)
        # Models of images may cut each into windows, one after the other.
        windows = (len(batch.documents), -1)
        total, count = (x.unflatten(0, windows).sum(1) for x in (total, count))
        for entry, (document, parts) in enumerate(zip(batch.documents, batch.parts, strict=True)):
            layer.means.add(document, total[entry], count[entry], parts=parts)
            if layer.by_passage is not None:
                layer.by_passage.add(0, total[entry], count[entry])

    def _sample(self, call: AttentionCall, batch: Batch, used: Tensor) -> tuple[Tensor, Tensor]:
        """Rows to look at whole, ``(batch, rows)``, and which of them count, ``(batch, heads, rows)``."""
        begin, lengths = batch.extent(call.stack, len(used), used.shape[-1])
        position = sampled_positions(lengths, self.sampled)
        there, position = position >= 0, (begin[:, None] + position).clamp_min(0)
        return position, there[:, None] & used.gather(-1, position[:, None].expand(-1, used.shape[1], -1))

    def merge(self, other: HeadStatistics) -> None:
        """Add what was found on other documents; the other stays as it is."""
        if not other.by_passage:
            self.drop_passages()
        for key, theirs in other.layers.items():
            self.layers.setdefault(key, LayerOfHeads.of(theirs.name, theirs.heads, self.by_passage)).merge(theirs)

    def close(self) -> None:
        """End all documents: what comes next are others, by whatever numbers they go."""
        for layer in self.layers.values():
            layer.means.close()

    def drop_passages(self) -> None:
        """Drop what only standard errors by passage need."""
        self.by_passage = False
        for layer in self.layers.values():
            layer.by_passage = None

    @property
    def notes(self) -> list[str]:
        """Sentences on what does not apply to these heads."""
        found = sorted({note for layer in self.layers.values() for note in layer.notes})
        empty = sum(int(layer.empty.max()) for layer in self.layers.values())
        if empty:
            found.append(f"{empty} attention rows see no token at all; they are left out of every mean.")
        broken = torch.cat([layer.broken for layer in self.layers.values()]) if self.layers else torch.zeros(0)
        if bool(broken.any()):
            found.append(
                f"{int((broken > 0).sum())} of {len(broken)} heads have attention rows whose scores are not finite;"
                " broken_rows counts them, and they are left out of every value."
            )
        return found

    def table(self) -> pandas.DataFrame:
        """One row per head; means with their standard errors beside them, by passage if that was kept."""
        import pandas

        records = []
        for (stack, number), layer in sorted(self.layers.items()):
            layer.means.close()
            means = layer.means if layer.by_passage is None else layer.by_passage
            mean, error = means.mean(), means.standard_error()
            largest, smallest = layer.extremes.largest, layer.extremes.smallest
            median, classes = layer.shares.median(), head_class(layer.shares)
            length = layer.keys / layer.shares.counts.sum(-1)
            for head in range(mean.shape[-1]):
                record: dict[str, object] = {"stack": stack, "layer": number, "name": layer.name, "head": head}
                record["rows"] = layer.rows - int(layer.empty[head] + layer.broken[head])
                record["broken_rows"] = int(layer.broken[head])
                for i, name in enumerate(MEANS):
                    record[name], record[f"{name}_se"] = mean[i, head].item(), error[i, head].item()
                record["score_max"] = _finite(largest[EXTREMES.index("score_max"), head])
                record["entropy_min"] = _finite(smallest[EXTREMES.index("entropy"), head])
                record["peak_max"] = _finite(largest[EXTREMES.index("peak"), head])
                record["mass90_share"] = median[head].item()
                record["head_class"] = classes[head]
                record["class_length"] = length[head].item()
                records.append(record)
        return pandas.DataFrame.from_records(records)


def _used(layer: LayerOfHeads, call: AttentionCall, batch: Batch, exact: Mapping[str, Tensor]) -> Tensor:
    """Rows that count and have statistics, boolean ``(batch, heads, queries)``; the others are counted."""
    log_z = exact["log_normalizer"]
    counted = batch.counted(call.stack, len(log_z), log_z.shape[-1])
    if call.present is not None:
        counted = counted & call.present.cpu()
    broken = broken_rows(call, exact).cpu()
    empty = log_z.isnan().cpu() & ~broken
    layer.rows += int(counted.sum())
    layer.empty = layer.empty + (counted[:, None] & empty).sum((0, 2))
    layer.broken = layer.broken + (counted[:, None] & broken).sum((0, 2))
    return counted[:, None] & ~broken & ~empty


def _sums(
    exact: Mapping[str, Tensor], used: Tensor, whole: Mapping[str, Tensor], taken: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Sums of :data:`MEANS` over rows and the numbers of rows in them, each ``(batch, statistics, heads)``."""
    totals, counts, absent = [], [], torch.full(used.shape, torch.nan)
    for name in MEANS:
        values, mask = (whole[name], taken) if name in whole else (exact.get(name, absent), used)
        values = values.double().cpu()
        there = mask & ~values.isnan()
        total, count = values.masked_fill(~there, 0.0).sum(-1), there.sum(-1)
        totals.append(total * weight[..., 0] if name in whole else total)
        counts.append(count * weight[..., 0] if name in whole else count)
    return torch.stack(totals, 1), torch.stack(counts, 1)


def head_class(shares: Shares) -> list[str | None]:
    """Ramsauer's class of each head: by the median share of its atoms that hold nine tenths of the mass.

    I: more than half of them, II: more than an eighth, III: more than a thirty-second, IV: fewer; None if no row was
    long enough to tell.

    Source:
        Ramsauer et al. 2020, section 3, with the row's own number of atoms in place of the sequence length.

    Example:
        >>> shares = Shares((2,))
        >>> shares.add(torch.tensor([[0.9], [0.02]]))
        >>> head_class(shares)
        ['I', 'IV']
    """
    over = [shares.exceeds(edge) for edge in (1 / 2, 1 / 8, 1 / 32)]
    seen = shares.counts.sum(-1) > 0
    names = []
    for head in range(len(seen)):
        rank = sum(not bool(edge[head]) for edge in over)
        names.append(("I", "II", "III", "IV")[rank] if seen[head] else None)
    return names


def _finite(value: Tensor) -> float:
    return value.item() if bool(value.isfinite()) else float("nan")


def _notes(call: AttentionCall) -> list[str]:
    found = []
    if call.softcap is not None:
        found.append(
            f"Scores are capped at {call.softcap:g} by a tanh, so they are not linear in the query: the attention is no"
            " exponential family, and identities such as entropy = log Z - query . gradient do not hold. The figures"
            " describe the capped scores."
        )
    if call.sink is not None:
        found.append(
            "A learned sink takes part in every row as one more atom with value zero; it counts in every figure but the"
            " range of the scores, which is that of the keys."
        )
    if call.scores is not None:
        found.append(
            "Queries and keys of this model are out of sight; its rows were read from the scores that it builds itself."
        )
    elif call.log_weight is not None and call.log_weight.is_floating_point():
        found.append("A position bias is added to the scores; it is a log weight of the measure and counts in log Z.")
    return found
