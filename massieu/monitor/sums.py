"""Sums over the rows and tokens of one forward pass; those of several processes merge to those of the joined batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from massieu.geometry.clouds import effective_dimension, mean_cosine
from massieu.monitor.quantities import HEADS, LAYERS
from massieu.monitor.reading import Place, Reading
from massieu.statistics import probabilities
from massieu.taps import AttentionCall
from massieu.taps.call_statistics import (
    broken_rows,
    exact_rows,
    rows_stood_for,
    sampled_positions,
    sampled_rows,
    scores_at,
)

__all__ = ["PlaceSums", "add_call", "add_tokens", "present_rows", "to_reading"]

ROWS = 16  # of each sequence, where whole rows are needed
TOKENS = 64  # of each sequence, for its effective rank
EXACT = (
    *("log_normalizer", "entropy", "normalized_entropy", "perplexity", "effective_atoms", "score_variance"),
    *("peak", "sink_mass"),
)


@dataclass
class PlaceSums:
    """Mergeable sums of one attention call.

    Attributes:
        place: the attention call.
        total: by quantity, float64: sums over rows ``(heads,)``, over rows of inner products of the departures from
            uniform ``(heads, heads)``, or over sequences ``()``.
        count: by quantity, number of terms of each sum, of the same shape.
        largest: by quantity, the largest value, ``(heads,)``.
        known: by quantity, values of the weights, which all processes share.
    """

    place: Place
    total: dict[str, Tensor] = field(default_factory=dict)
    count: dict[str, Tensor] = field(default_factory=dict)
    largest: dict[str, Tensor] = field(default_factory=dict)
    known: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, total: Tensor, count: Tensor) -> None:
        total, count = total.double().cpu(), count.double().cpu()
        self.total[name] = self.total[name] + total if name in self.total else total
        self.count[name] = self.count[name] + count if name in self.count else count

    def merge(self, other: PlaceSums) -> None:
        """Add the sums of another process for the same place."""
        for name, total in other.total.items():
            self.add(name, total, other.count[name])
        for name, value in other.largest.items():
            self.largest[name] = torch.maximum(self.largest[name], value) if name in self.largest else value

    def value(self, name: str) -> Tensor | None:
        """Return a quantity, ``(heads,)`` or ``()``; None without terms."""
        if name in self.known or name in self.largest:
            value = self.known.get(name, self.largest.get(name))
            return None if value is None else value.masked_fill(value == -torch.inf, torch.nan)
        if name not in self.total:
            return None
        mean = self.total[name] / self.count[name]
        if name == "output_share":
            return (mean / mean.mean()).sqrt()
        return _likeness(mean) if name == "likeness" else mean


def add_call(sums: PlaceSums, call: AttentionCall, wanted: frozenset[str]) -> None:
    """Add the rows of one attention call; padded queries do not count."""
    present = present_rows(call)
    if wanted & {*EXACT, "score_max", "broken_rows"}:
        rows = exact_rows(call)
        broken = broken_rows(call, rows)
        if "broken_rows" in wanted:
            _add_rows(sums, "broken_rows", broken.double(), present, broken)
        for name in EXACT:
            if name in wanted and name in rows:
                _add_rows(sums, name, rows[name], present, broken)
        if "score_max" in wanted:
            score, undefined = rows["score_max"], rows["score_max"].isnan() & ~broken
            score = score.masked_fill(~present[:, None] | undefined, -torch.inf)
            sums.largest["score_max"] = score.amax((0, 2)).double().cpu()
    if "output_share" in wanted and call.output is not None:
        square = call.output.float().square().sum(-1)
        _add_rows(sums, "output_share", square, present, square.isnan())
    if wanted & {"score_range", "likeness"}:
        position = _positions(present, ROWS)
        taken = position >= 0
        position = position.clamp_min(0)
        if "score_range" in wanted:
            rows = sampled_rows(call, position)
            broken = rows["score_range"].isnan() & (rows["atoms"] > int(call.sink is not None))
            weight = rows_stood_for(present, taken)
            _add_rows(sums, "score_range", rows["score_range"], taken, broken, weight)
        if "likeness" in wanted:
            _add_departures(sums, call, position, taken, present)


def add_tokens(sums: PlaceSums, tokens: Tensor, present: Tensor, wanted: frozenset[str]) -> None:
    """Add the hidden states behind a block, ``(batch, tokens, dim)``, where ``present`` ``(batch, tokens)``."""
    if "token_cosine" in wanted:
        sequence = torch.arange(len(present), device=present.device)[:, None].expand_as(present)[present]
        cosine = mean_cosine(tokens[present].float(), sequence, len(present))
        total = cosine.nansum() if bool(tokens[present].isfinite().all()) else cosine.new_tensor(torch.nan)
        sums.add("token_cosine", total, (~cosine.isnan()).sum())
    if "effective_rank" in wanted:
        position = _positions(present, TOKENS)
        for own, at in zip(tokens, position, strict=True):
            some = torch.nn.functional.normalize(own[at[at >= 0]].double(), dim=-1)
            centered = some - some.mean(0)
            if len(some) > 1:
                gram = centered @ centered.mT
                # Tokens that agree to rounding have no direction left, which is a rank of one at most.
                rank = effective_dimension(gram) if float(gram.trace()) > 1e-12 * len(some) else 1.0
                rank = rank if bool(centered.isfinite().all()) else torch.nan
                sums.add("effective_rank", torch.tensor(rank), torch.tensor(1))


def to_reading(step: int, places: Sequence[Place], sums: Sequence[PlaceSums], wanted: frozenset[str]) -> Reading:
    """Return the reading of one step, with nan for places and quantities without sums."""
    row_of = {(place.stack, place.layer): row for row, place in enumerate(places)}
    most = max(place.heads for place in places)
    heads = {name: _nan(len(places), most) for name in HEADS if name in wanted}
    layers = {name: _nan(len(places)) for name in LAYERS if name in wanted}
    for own in sums:
        row = row_of[own.place.stack, own.place.layer]
        for name, values in (*heads.items(), *layers.items()):
            value = own.value(name)
            if value is not None:
                values[(row, slice(0, len(value))) if value.dim() else row] = value
    return Reading(step, tuple(places), heads, layers)


def _add_rows(
    sums: PlaceSums, name: str, values: Tensor, counted: Tensor, broken: Tensor, weight: Tensor | None = None
) -> None:
    """Add ``(batch, heads, rows)`` where ``counted`` ``(batch, rows)``, nan left out except in broken rows.

    Each row of a sequence stands for ``weight`` ``(batch, 1)`` rows; without it, for one.
    """
    there = counted[:, None].to(values.device) & (broken | ~values.isnan())
    total, count = values.double().masked_fill(~there, 0.0).sum(-1), there.sum(-1)
    weight = total.new_ones(1, 1) if weight is None else weight.to(total)
    sums.add(name, (total * weight).sum(0), (count * weight).sum(0))


def _add_departures(sums: PlaceSums, call: AttentionCall, position: Tensor, taken: Tensor, present: Tensor) -> None:
    """Add inner products of heads: of the departures of their weights from uniform ones, without the first key."""
    scores = scores_at(call, position)
    if call.stack != "cross":
        first = present.to(torch.uint8).argmax(-1)[:, None, None, None].to(scores.device)
        key = torch.arange(scores.shape[-1], device=scores.device)
        scores = scores.masked_fill(key == first, -torch.inf)
    visible = (scores != -torch.inf).to(scores.dtype)
    departure = probabilities(scores) - visible / visible.sum(-1, keepdim=True).clamp_min(1)
    departure = departure.masked_fill(~taken[:, None, :, None].to(departure.device), 0.0)
    flat = departure.transpose(0, 1).flatten(1)
    product = flat @ flat.mT
    sums.add("likeness", product, torch.ones_like(product))


def _likeness(product: Tensor) -> Tensor:
    """Return the largest cosine of each head with another one; nan for a single head."""
    size = product.diagonal().sqrt()
    cosine = product / (size[:, None] * size)
    own = torch.eye(len(size), dtype=torch.bool)
    best = cosine.masked_fill(own | cosine.isnan(), -torch.inf).amax(-1)
    return best.masked_fill(best == -torch.inf, torch.nan)


def present_rows(call: AttentionCall) -> Tensor:
    """Return a mask ``(batch, queries)`` of the queries that are tokens, not padding."""
    if call.present is not None:
        return call.present.to(call.device)
    batch, _, queries, _ = call.shape
    return torch.ones(batch, queries, dtype=torch.bool, device=call.device)


def _positions(present: Tensor, count: int) -> Tensor:
    """Return up to ``count`` positions of each sequence, evenly over its present tokens; -1 behind the last."""
    position = sampled_positions(present.sum(-1), count)
    begin = present.to(torch.uint8).argmax(-1)[:, None]
    return torch.where(position >= 0, begin + position, -1)


def _nan(*shape: int) -> Tensor:
    return torch.full(shape, torch.nan, dtype=torch.float64)
