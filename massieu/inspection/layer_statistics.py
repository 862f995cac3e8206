"""Statistics of one block: effects of attention, MLP and norm on the tokens, in one pass over the text."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from massieu.accumulators.moments import HashSample, LogHistogram, Mean, Moments
from massieu.accumulators.regression import Regression, held_out_r2
from massieu.accumulators.serialization import stored
from massieu.checks import UserError
from massieu.geometry.clouds import (
    centered,
    distance_ratio,
    effective_dimension,
    gaussian_band,
    groups,
    half_log_det,
    mean_cosine,
    monotone,
    projection_kurtosis,
)
from massieu.inspection.massive import MassiveSums
from massieu.inspection.quantities import ALL_TOKENS
from massieu.inspection.tokens import Tokens

__all__ = ["NARROW", "WIDEST", "LayerStatistics", "LayerSums", "States"]

WIDEST, NARROW = 768, 512
"""Above the first width covariances are those of as many fixed random directions as the second says."""

TARGETS = 384
"""Largest number of fixed random directions along which the linear fit of the MLP predicts its update."""

SAMPLED = 1024
"""Tokens of the whole text that are kept for the kurtosis."""

VOLUMES = {
    "attention": ("before", "after"),
    "norm": ("norm_before", "norm_after"),
    "mlp": ("mlp_before", "mlp_after"),
}


@dataclass(frozen=True)
class States:
    """The residual stream of one block for the tokens of a batch, every tensor ``(present tokens, dim)``.

    States that are the same are the same tensor.

    Attributes:
        before: the stream where attention starts.
        attention_input: what attention itself reads, after a norm in front of it.
        attention: what it adds.
        after: their sum.
        normed: input and output of the norm that reads the stream after attention; None if there is none.
        mlp_before: the stream where the MLP starts; None in a block without one.
        mlp_input: what the MLP itself reads, after a norm in front of it.
        mlp: what it adds.
        mlp_after: their sum.
        output: the block's output.
    """

    before: Tensor
    attention_input: Tensor
    attention: Tensor
    after: Tensor
    normed: tuple[Tensor, Tensor] | None
    mlp_before: Tensor | None
    mlp_input: Tensor | None
    mlp: Tensor | None
    mlp_after: Tensor | None
    output: Tensor

    @functools.cached_property
    def finite(self) -> Tensor:
        """Tokens whose states all have a finite length, boolean ``(present tokens,)``."""
        tensors = {id(x): x for x in self._tensors}.values()
        return torch.stack([x.square().sum(-1).isfinite() for x in tensors]).all(0)

    @property
    def _tensors(self) -> list[Tensor]:
        values = [getattr(self, each.name) for each in fields(self) if each.name != "normed"]
        return [x for x in (*values, *(self.normed or ())) if x is not None]

    @property
    def named(self) -> dict[str, Tensor]:
        """The states whose covariance is wanted."""
        found = {"before": self.before, "attention_input": self.attention_input, "after": self.after}
        if self.normed is not None:
            found |= {"norm_before": self.normed[0], "norm_after": self.normed[1]}
        if self.mlp_before is not None and self.mlp_input is not None and self.mlp_after is not None:
            found |= {"mlp_input": self.mlp_input, "mlp_before": self.mlp_before, "mlp_after": self.mlp_after}
        return found | {"output": self.output}

    @property
    def streams(self) -> list[Tensor]:
        """The states of the residual stream itself, each once."""
        states = (self.before, self.after, self.mlp_before, self.mlp_after, self.output)
        return list({id(x): x for x in states if x is not None}.values())

    def select(self, order: Tensor) -> States:
        """Some of the tokens, by their numbers or a boolean; states that were the same tensor still are."""
        chosen: dict[int, Tensor] = {}

        def pick(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x if x is None else tuple(pick(own) for own in x)
            if id(x) not in chosen:
                chosen[id(x)] = x[order.to(x.device)]
            return chosen[id(x)]

        return States(*(pick(getattr(self, each.name)) for each in fields(self)))


@stored(
    "dim", "width", "tokens", "broken", "ratios", "means", "clouds", "aliases", "sample", "fits", "shuffled", "massive"
)
class LayerStatistics:
    """Everything the layers table says about one block, from statistics that merge.

    Example:
        >>> x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
        >>> tokens = massieu.inspection.tokens.Tokens.of(torch.ones(4, 10, dtype=torch.bool), ["a", "b", "c", "d"])
        >>> statistics = LayerStatistics(4)
        >>> statistics.update(tokens, States(x, x, x, 2 * x, (2 * x, x), 2 * x, 2 * x, -x, x, x))
        >>> found = statistics.finish()
        >>> [round(found[name], 2) for name in ("expansion", "norm_contraction", "mlp_expansion", "fc_linear_r2")]
        [2.0, 0.5, 0.5, 1.0]
    """

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.width = dim if dim <= WIDEST else NARROW
        self.tokens = self.broken = 0
        self.ratios = {
            name: LogHistogram()
            for name in (
                *("expansion", "expansion_control", "mlp_expansion", "mlp_expansion_control"),
                *("norm_contraction", "norm_contraction_control"),
            )
        }
        self.means = {
            name: Mean() for name in ("monotone_share", "monotone_control", "token_cosine", "clusters", "mlp_square")
        }
        self.clouds: dict[str, Moments] = {}
        self.aliases: dict[str, str] = {}
        self.sample = HashSample(SAMPLED, self.width)
        self.fits = {name: (Regression(0, 0), Regression(0, 0)) for name in ("content", "other")}
        self.shuffled = Moments(0)
        self.massive = MassiveSums(SAMPLED, self.width)

    def update(self, tokens: Tokens, states: States, largest: float = 0.0) -> None:
        """Add the tokens of a batch; those that are not finite are counted and left out.

        Args:
            tokens: which tokens are content, which massive.
            states: their states, in this order.
            largest: largest norm of a token, as a multiple of the median of its passage.
        """
        if not bool(states.finite.all()):
            self.broken += int((~states.finite[: tokens.num_counted]).sum())
            tokens, states = tokens.only(states.finite), states.select(states.finite)
        if tokens.num_counted:
            self._attention(tokens, states)
            self._norm(tokens, states)
            self._mlp(tokens, states)
            self._look(tokens, states.output)
            self._add_clouds(states, tokens)
            self.tokens += tokens.num_content
            self.massive.count += tokens.num_massive
            self.massive.first += int((tokens.position[tokens.num_content :] == 0).sum())
            self.massive.largest = max(self.massive.largest, largest)
        if states.mlp_input is not None and states.mlp is not None and self.dim <= WIDEST:
            self._fit(tokens, states.mlp_input, states.mlp)

    def merge(self, other: LayerStatistics) -> None:
        """Add what another has seen of the same block."""
        if other.dim != self.dim:
            raise UserError(f"cannot merge statistics of tokens of size {other.dim} into those of size {self.dim}")
        self.tokens += other.tokens
        self.broken += other.broken
        self.aliases |= other.aliases
        for name, ratio in self.ratios.items():
            ratio.merge(other.ratios[name])
        for name, mean in self.means.items():
            mean.merge(other.means[name])
        for name, cloud in other.clouds.items():
            self.clouds.setdefault(name, Moments(0)).merge(cloud)
        for name, halves in self.fits.items():
            for mine, theirs in zip(halves, other.fits[name], strict=True):
                mine.merge(theirs)
        self.shuffled.merge(other.shuffled)
        self.sample.merge(other.sample)
        self.massive.merge(other.massive)

    def finish(self) -> dict[str, float]:
        """The columns of the layers table; nan where a block has no such part or too few tokens were seen."""
        found: dict[str, float] = {"tokens": self.tokens}
        for name, ratio in self.ratios.items():
            found |= {name: ratio.quantile(0.5), f"{name}_se": ratio.standard_error(0.5)}
        for name, mean in self.means.items():
            found |= {name: mean.value, f"{name}_se": mean.standard_error}
        content, everything = self._values(massive=False), {}
        if self.massive.count:
            everything = self._values(massive=True) | {"token_cosine": self.massive.means["token_cosine"].value}
        found |= content
        found |= {f"{name}_all_tokens": everything.get(name, found[name]) for name in ALL_TOKENS}
        found |= {"massive_tokens": self.massive.count, "massive_norm": self.massive.largest or float("nan")}
        found["massive_first_share"] = self.massive.first / self.massive.count if self.massive.count else float("nan")
        return found | self._fits()

    def _values(self, massive: bool) -> dict[str, float]:
        """Columns that a few huge tokens would dominate, without the massive tokens or with them."""
        volume = {name: half_log_det(self.cloud(name, massive).covariance) for name in self._measured}
        found = {}
        for part, (before, after) in VOLUMES.items():
            first, second = (volume.get(self.aliases.get(name, ""), float("nan")) for name in (before, after))
            found[f"log_volume_{part}"] = second - first
        output, sample = self.cloud("output", massive), HashSample(SAMPLED, self.width)
        for own in (self.sample, self.massive.sample) if massive else (self.sample,):
            sample.merge(own)
        found["effective_rank"] = effective_dimension(output.covariance)
        found["kurtosis"] = projection_kurtosis(sample.rows, output.mean, output.covariance)
        found["kurtosis_band"] = gaussian_band(len(sample.rows), output.count, self.width)
        return found | self._identity(massive)

    def _identity(self, massive: bool) -> dict[str, float]:
        """Share of the MLP sublayer's result that is its input, exactly and up to a constant."""
        square = Mean()
        for means in (self.means, self.massive.means) if massive else (self.means,):
            square.merge(means["mlp_square"])
        before, after = (self.cloud(name, massive) for name in ("mlp_before", "mlp_after"))
        scale = self.dim / self.width
        spread = float(after.covariance.trace()) * scale
        if not spread > 0:
            return {"fc_identity_r2": float("nan"), "fc_identity_offset_r2": float("nan")}
        offset = float((after.mean - before.mean).square().sum()) * scale
        return {
            "fc_identity_r2": 1 - square.value / spread,
            "fc_identity_offset_r2": 1 - (square.value - offset) / spread,
        }

    @property
    def _measured(self) -> set[str]:
        """Clouds whose volume is wanted, each once."""
        return {self.aliases[name] for pair in VOLUMES.values() for name in pair if name in self.aliases}

    def cloud(self, name: str, massive: bool = False) -> Moments:
        """Moments of one state of the stream.

        Args:
            name: as in :class:`States`; of a norm, norm_before and norm_after.
            massive: whether massive tokens are included.
        """
        alias, both = self.aliases.get(name, name), Moments(self.width)
        if alias == "mlp_input":
            found = [half.inputs for half in self.fits["content"]]
            found += [half.inputs for half in self.massive.fits] if massive else []
        else:
            found = [own[alias] for own in (self.clouds, *([self.massive.clouds] if massive else [])) if alias in own]
        for moments in found:
            both.merge(moments)
        return both

    def _attention(self, tokens: Tokens, states: States) -> None:
        before, update = tokens.differences(states.before), tokens.differences(states.attention)
        other = tokens.differences(states.attention, permuted=True)
        self._expansion("expansion", tokens, before, update, other)
        self.means["monotone_share"].update(monotone(before, update), tokens.pair_group)
        self.means["monotone_control"].update(monotone(before, other), tokens.pair_group)

    def _norm(self, tokens: Tokens, states: States) -> None:
        if states.normed is not None:
            x, y = states.normed
            before, update = tokens.differences(x), tokens.differences(y - x)
            self._expansion("norm_contraction", tokens, before, update, tokens.differences(y - x, permuted=True))

    def _mlp(self, tokens: Tokens, states: States) -> None:
        if states.mlp_before is None or states.mlp is None:
            return
        before, update = tokens.differences(states.mlp_before), tokens.differences(states.mlp)
        other = tokens.differences(states.mlp, permuted=True)
        self._expansion("mlp_expansion", tokens, before, update, other)
        square = states.mlp[: tokens.num_counted].double().square().sum(-1)
        group, content = tokens.group[tokens.row[: tokens.num_counted]], tokens.num_content
        self.means["mlp_square"].update(square[:content], group[:content])
        self.massive.means["mlp_square"].update(square[content:], group[content:])

    def _expansion(self, name: str, tokens: Tokens, before: Tensor, update: Tensor, other: Tensor) -> None:
        """Ratios of distances of pairs after an update, and after that of other tokens."""
        self.ratios[name].update(distance_ratio(before, before + update), tokens.pair_group)
        self.ratios[f"{name}_control"].update(distance_ratio(before, before + other), tokens.pair_group)

    def _look(self, tokens: Tokens, output: Tensor) -> None:
        count, rows = tokens.num_content, self._narrow(output[: tokens.num_counted])
        self.sample.update(tokens.hashes[:count], rows[:count])
        self.massive.sample.update(tokens.hashes[count:], rows[count:])
        self._compare(self.means["token_cosine"], tokens, output[:count])
        self._compare(self.massive.means["token_cosine"], tokens, output[: tokens.num_counted])
        chosen, filled = (x.to(output.device) for x in tokens.compared)
        some = filled.any(1)
        self.means["clusters"].update(groups(output[chosen], filled)[some], tokens.group[some.cpu()])

    def _compare(self, mean: Mean, tokens: Tokens, output: Tensor) -> None:
        """Mean cosine of the given tokens of each sequence."""
        cosine = mean_cosine(output, tokens.row[: len(output)].to(output.device), tokens.num_sequences)
        known = ~cosine.isnan().cpu()
        mean.update(cosine[known.to(cosine.device)], tokens.group[known])

    def _add_clouds(self, states: States, tokens: Tokens) -> None:
        """Moments of every state, once where two names mean the same tensor."""
        named, count = states.named, tokens.num_content
        fitted = named.pop("mlp_input", None)
        known: dict[int, str] = {}
        if fitted is not None and self.dim <= WIDEST:
            known[id(fitted)] = "mlp_input"
        for name, x in named.items():
            self.aliases[name] = known.setdefault(id(x), name)
            if self.aliases[name] == name:
                self.clouds.setdefault(name, Moments(0)).update(self._narrow(x[:count]))
                self.massive.clouds.setdefault(name, Moments(0)).update(self._narrow(x[count : tokens.num_counted]))

    def _fit(self, tokens: Tokens, x: Tensor, y: Tensor) -> None:
        count, counted = tokens.num_content, tokens.num_counted
        if self.dim > TARGETS:
            y = y @ frame(self.dim, TARGETS).to(y)
        for half, rows in enumerate(tokens.halves):
            massive = (rows >= count) & (rows < counted)
            for fits, some in (
                (self.fits["content"], rows < count),
                (self.massive.fits, massive),
                (self.fits["other"], rows >= counted),
            ):
                chosen = rows[some].to(x.device)
                fits[half].update(x[chosen], y[chosen])
        self._shuffle(tokens, x[:count], y[:count])

    def _shuffle(self, tokens: Tokens, x: Tensor, y: Tensor) -> None:
        """Add the control of the linear fit.

        Targets of other documents are not at hand, and choosing them would depend on the order of reading. So the means
        of passages, which a permutation over documents would scatter, are taken away, and the rest is permuted within
        the passage: the expected cross moments are zero, as for a permutation over all documents.
        """
        training = tokens.halves[0][tokens.halves[0] < tokens.num_content].to(x.device)
        sequence, permutation = tokens.sequence.to(x.device), tokens.permutation.to(x.device)
        inputs, targets = (centered(own.double(), sequence, tokens.num_sequences) for own in (x, y))
        self.shuffled.update(inputs[training], targets[permutation[training]])

    def _fits(self) -> dict[str, float]:
        train, test = self.fits["content"]
        found = held_out_r2(train, test)
        others = (self.fits["other"], self.massive.fits)
        if not any(half.count for halves in others for half in halves):
            everything = found
        else:
            together = [half.copy() for half in (train, test)]
            for halves in others:
                for half, other in zip(together, halves, strict=True):
                    half.merge(other)
            everything = held_out_r2(*together)
        return {
            "fc_linear_r2": found,
            "fc_linear_control": held_out_r2(train.with_targets(self.shuffled), test),
            "fc_linear_r2_all_tokens": everything,
        }

    def _narrow(self, x: Tensor) -> Tensor:
        return x if self.width == self.dim else torch.matmul(x, frame(self.dim, self.width).to(x))


@stored()
@dataclass
class LayerSums:
    """Statistics of all blocks of a model.

    Attributes:
        statistics: by stack and layer.
        notes: sentences about tokens that could not be told apart.
    """

    statistics: dict[tuple[str, int], LayerStatistics] = field(default_factory=dict)
    notes: set[str] = field(default_factory=set)

    def of(self, row: tuple[str, int], dim: int) -> LayerStatistics:
        """The statistics of one block, empty at first."""
        if row not in self.statistics:
            self.statistics[row] = LayerStatistics(dim)
        return self.statistics[row]

    def merge(self, other: LayerSums) -> None:
        """Add what was seen of the same model elsewhere; the other stays as it is."""
        self.notes = self.notes | other.notes
        for row, statistics in other.statistics.items():
            self.of(row, statistics.dim).merge(statistics)


@functools.lru_cache(maxsize=4)
def frame(dim: int, width: int) -> Tensor:
    """Fixed random orthonormal directions, ``(dim, width)``.

    Example:
        >>> directions = frame(6, 2)
        >>> torch.allclose(directions.T @ directions, torch.eye(2), atol=1e-6)
        True
    """
    drawn = torch.randn(dim, width, generator=torch.Generator().manual_seed(dim), dtype=torch.float64)
    directions: Tensor = torch.linalg.qr(drawn).Q.float()
    return directions
