"""What attention, MLP and norm of one block do to the tokens, in one pass over the text."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from massieu.checks import UserError
from massieu.inspection.clouds import (
    distance_ratio,
    effective_rank,
    gaussian_band,
    groups,
    half_log_det,
    mean_cosine,
    monotone,
    projection_kurtosis,
)
from massieu.inspection.moments import HashSample, LogHistogram, Mean, Moments
from massieu.inspection.regression import Regression, held_out_r2
from massieu.inspection.tokens import Tokens

__all__ = ["NARROW", "WIDEST", "LayerStatistics", "LayerSums", "States"]

WIDEST, NARROW = 768, 512
"""Above the first width covariances are those of as many fixed random directions as the second says."""

TARGETS = 384
"""The linear fit of the MLP predicts its update along at most so many fixed random directions."""

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

    def only(self, kept: Tensor) -> States:
        """Those of the tokens for which a boolean ``(present tokens,)`` is true."""
        fewer = {id(x): x[kept.to(x.device)] for x in self._tensors}  # one for two names of the same tensor

        def own(x: Any) -> Any:
            return None if x is None else (own(x[0]), own(x[1])) if isinstance(x, tuple) else fewer[id(x)]

        return States(*(own(getattr(self, each.name)) for each in fields(self)))

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

    def update(self, tokens: Tokens, states: States) -> None:
        """Add the tokens of a batch; those that are not finite are counted and left out."""
        if not bool(states.finite.all()):
            self.broken += int((~states.finite[: tokens.num_content]).sum())
            tokens, states = tokens.only(states.finite), states.only(states.finite)
        count = tokens.num_content
        if count:
            self._attention(tokens, states)
            self._norm(tokens, states)
            self._mlp(tokens, states)
            self._look(tokens, states.output[:count])
            self._add_clouds(states, count)
            self.tokens += count
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

    def finish(self) -> dict[str, float]:
        """The columns of the layers table; nan where a block has no such part or too few tokens were seen."""
        found: dict[str, float] = {"tokens": self.tokens}
        for name, ratio in self.ratios.items():
            found |= {name: ratio.quantile(0.5), f"{name}_se": ratio.standard_error(0.5)}
        for name, mean in self.means.items():
            found |= {name: mean.value, f"{name}_se": mean.standard_error}
        volume = {name: half_log_det(self.cloud(name).covariance) for name in self._measured}
        for part, (before, after) in VOLUMES.items():
            first, second = (volume.get(self.aliases.get(name, ""), float("nan")) for name in (before, after))
            found[f"log_volume_{part}"] = second - first
        output = self.cloud("output")
        found["effective_rank"] = effective_rank(output.covariance)
        found["kurtosis"] = projection_kurtosis(self.sample.rows, output.mean, output.covariance)
        found["kurtosis_band"] = gaussian_band(len(self.sample.rows), output.count, self.width)
        return found | self._linearity()

    @property
    def _measured(self) -> set[str]:
        """Clouds whose volume is wanted, each once."""
        return {self.aliases[name] for pair in VOLUMES.values() for name in pair if name in self.aliases}

    def cloud(self, name: str) -> Moments:
        """Moments of one state of the stream, by its name in :class:`States`; of a norm, norm_before and norm_after."""
        alias = self.aliases.get(name, name)
        if alias != "mlp_input":
            return self.clouds.get(alias, Moments(self.width))
        both = self.fits["content"][0].inputs.copy()
        both.merge(self.fits["content"][1].inputs)
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
        square = states.mlp[: tokens.num_content].double().square().sum(-1)
        self.means["mlp_square"].update(square, tokens.group[tokens.sequence])

    def _expansion(self, name: str, tokens: Tokens, before: Tensor, update: Tensor, other: Tensor) -> None:
        """Ratios of distances of pairs after an update, and after that of other tokens."""
        self.ratios[name].update(distance_ratio(before, before + update), tokens.pair_group)
        self.ratios[f"{name}_control"].update(distance_ratio(before, before + other), tokens.pair_group)

    def _look(self, tokens: Tokens, output: Tensor) -> None:
        self.sample.update(tokens.hashes, self._narrow(output))
        cosine = mean_cosine(output, tokens.sequence.to(output.device), tokens.num_sequences)
        known = ~cosine.isnan().cpu()
        self.means["token_cosine"].update(cosine[known.to(cosine.device)], tokens.group[known])
        chosen, filled = (x.to(output.device) for x in tokens.compared)
        some = filled.any(1)
        self.means["clusters"].update(groups(output[chosen], filled)[some], tokens.group[some.cpu()])

    def _add_clouds(self, states: States, count: int) -> None:
        """Moments of every state, once where two names mean the same tensor."""
        named = states.named
        fitted = named.pop("mlp_input", None)
        known: dict[int, str] = {}
        if fitted is not None and self.dim <= WIDEST:
            known[id(fitted)] = "mlp_input"
        for name, x in named.items():
            self.aliases[name] = known.setdefault(id(x), name)
            if self.aliases[name] == name:
                self.clouds.setdefault(name, Moments(0)).update(self._narrow(x[:count]))

    def _fit(self, tokens: Tokens, x: Tensor, y: Tensor) -> None:
        count = tokens.num_content
        if self.dim > TARGETS:
            y = y @ frame(self.dim, TARGETS).to(y)
        for half, rows in enumerate(tokens.halves):
            content, other = rows[rows < count].to(x.device), rows[rows >= count].to(x.device)
            self.fits["content"][half].update(x[content], y[content])
            self.fits["other"][half].update(x[other], y[other])
        training = tokens.halves[0][tokens.halves[0] < count]
        self.shuffled.update(x[training.to(x.device)], y[tokens.permutation[training].to(y.device)])

    def _linearity(self) -> dict[str, float]:
        train, test = self.fits["content"]
        together = [content.copy() for content in self.fits["content"]]
        for half, other in zip(together, self.fits["other"], strict=True):
            half.merge(other)
        after = self.cloud("mlp_after")
        spread = float(after.covariance.trace()) * self.dim / self.width
        seen_all = any(half.count for half in self.fits["other"])
        return {
            "fc_linear_r2": held_out_r2(train, test),
            "fc_linear_control": held_out_r2(train.with_targets(self.shuffled), test),
            "fc_linear_r2_all_tokens": held_out_r2(*together) if seen_all else held_out_r2(train, test),
            "fc_identity_r2": 1 - self.means["mlp_square"].value / spread if spread > 0 else float("nan"),
        }

    def _narrow(self, x: Tensor) -> Tensor:
        return x if self.width == self.dim else torch.matmul(x, frame(self.dim, self.width).to(x))


@dataclass
class LayerSums:
    """What was seen of all blocks of a model.

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
