"""Prompts: examples and queries of many functions, and their layouts as tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from massieu.checks import UserError, check_choice, check_count, check_floating, check_shape

__all__ = ["LAYOUTS", "Interleaved", "Layout", "Pairs", "Prompts", "layout_named"]


@dataclass(frozen=True)
class Prompts:
    r"""Examples :math:`(x_i, y_i)` of one function for each task, and a query after each number of them.

    Prediction i is that of :math:`f(q_i)` from the i examples before it, :math:`(x_j, y_j)_{j < i}`. Usually the query
    :math:`q_i` is the next example :math:`x_i`, so that the last example is the query of the whole prompt;
    out-of-distribution prompts have queries of their own.

    Attributes:
        inputs: :math:`x`, shape ``(tasks, examples, dim)``.
        targets: :math:`y`, with noise, shape ``(tasks, examples)`` or ``(tasks, examples, outputs)``.
        queries: :math:`q`, shape of the inputs; the same tensor where the query is the next example.
        answers: :math:`f(q)` without noise, shape of the targets.
        parameters: of the functions, each with the tasks as first axis.

    Example:
        >>> prompts = Prompts.of(torch.zeros(2, 5, 3), torch.zeros(2, 5))
        >>> prompts.tasks, prompts.examples, prompts.dim, prompts.outputs, prompts.queries_are_inputs
        (2, 5, 3, None, True)
    """

    inputs: Tensor
    targets: Tensor
    queries: Tensor
    answers: Tensor
    parameters: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("inputs", "targets", "queries", "answers"):
            check_floating(getattr(self, name), name)
        check_shape(self.inputs, "inputs", "tasks", "examples", "dim", remedy="for a single task pass inputs[None]")
        if 0 in self.inputs.shape:
            raise UserError(f"inputs must not be empty, got shape {tuple(self.inputs.shape)}; check its axes")
        outputs = ("outputs",) if self.targets.dim() == 3 else ()
        check_shape(self.targets, "targets", *self.inputs.shape[:2], *outputs)
        check_shape(self.queries, "queries", *self.inputs.shape)
        check_shape(self.answers, "answers", *self.targets.shape)

    @classmethod
    def of(cls, inputs: Tensor, targets: Tensor) -> Prompts:
        """Return prompts from data: each query is the next example, and its target is the answer."""
        return cls(inputs, targets, inputs, targets)

    @property
    def tasks(self) -> int:
        return self.inputs.shape[0]

    @property
    def examples(self) -> int:
        return self.inputs.shape[1]

    @property
    def dim(self) -> int:
        return self.inputs.shape[2]

    @property
    def outputs(self) -> int | None:
        """Numbers in a target; None where targets are plain numbers."""
        return self.targets.shape[2] if self.targets.dim() == 3 else None

    @property
    def queries_are_inputs(self) -> bool:
        return self.queries is self.inputs

    def chosen(self, tasks: slice) -> Prompts:
        """Return the prompts of some tasks."""
        inputs = self.inputs[tasks]
        queries = inputs if self.queries_are_inputs else self.queries[tasks]
        parameters = {name: value[tasks] for name, value in self.parameters.items()}
        return Prompts(inputs, self.targets[tasks], queries, self.answers[tasks], parameters)

    def truncated(self, length: int) -> Prompts:
        """Return the first ``length`` examples and then the query as the last one, the form in which models read them.

        Its target is the answer, unless the query is the next example: then it keeps the target with its noise.
        """
        (length,) = check_lengths([length], self.examples)
        if self.queries_are_inputs:
            inputs, targets = self.inputs[:, : length + 1], self.targets[:, : length + 1]
            answers = self.answers[:, : length + 1]
        else:
            inputs = torch.cat([self.inputs[:, :length], self.queries[:, length : length + 1]], 1)
            targets = torch.cat([self.targets[:, :length], self.answers[:, length : length + 1]], 1)
            answers = targets
        return Prompts(inputs, targets, inputs, answers, self.parameters)


class Layout(ABC):
    """Layout of examples as tokens, and the positions at which a causal model is read.

    Args:
        dim: of the inputs.
        outputs: numbers in a target; None where targets are plain numbers.
    """

    def __init__(self, dim: int, outputs: int | None = None):
        self.dim = check_count(dim, "dim")
        self.outputs = None if outputs is None else check_count(outputs, "outputs")

    @property
    @abstractmethod
    def width(self) -> int:
        """Size of a token."""

    @abstractmethod
    def positions(self, examples: int) -> Tensor:
        """Return the positions of the tokens at which predictions are read, shape ``(examples,)``."""

    def tokens(self, prompts: Prompts) -> Tensor:
        """Return the tokens, shape ``(tasks, tokens, width)``."""
        if (prompts.dim, prompts.outputs) != (self.dim, self.outputs):
            raise UserError(
                f"the layout expects dim {self.dim} and outputs {self.outputs}, got prompts with dim {prompts.dim}"
                f" and outputs {prompts.outputs}; build the layout for these prompts"
            )
        if not prompts.queries_are_inputs:
            raise UserError(
                "queries must be the next examples, got queries of their own;"
                " lay out prompts.truncated(length) for one length at a time"
            )
        return self._tokens(prompts.inputs, prompts.targets[..., None] if self.outputs is None else prompts.targets)

    def examples(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets from tokens, as far as the tokens contain them."""
        check_floating(tokens, "tokens")
        check_shape(tokens, "tokens", "tasks", "tokens", self.width)
        inputs, columns = self._examples(tokens)
        return inputs, columns[..., 0] if self.outputs is None else columns

    @abstractmethod
    def _tokens(self, inputs: Tensor, columns: Tensor) -> Tensor: ...

    @abstractmethod
    def _examples(self, tokens: Tensor) -> tuple[Tensor, Tensor]: ...


class Interleaved(Layout):
    r"""Tokens :math:`x_1, y_1, x_2, y_2, \dots`, padded by zeros; predictions are read at the inputs.

    Source:
        Garg et al. 2022, section 2.

    Example:
        >>> layout = Interleaved(2)
        >>> layout.tokens(Prompts.of(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), torch.tensor([[5.0, 6.0]])))[0]
        tensor([[1., 2.],
                [5., 0.],
                [3., 4.],
                [6., 0.]])
        >>> layout.positions(2)
        tensor([0, 2])
    """

    @property
    def width(self) -> int:
        return max(self.dim, self.outputs or 1)

    def positions(self, examples: int) -> Tensor:
        return 2 * torch.arange(examples)

    def _tokens(self, inputs: Tensor, columns: Tensor) -> Tensor:
        pads = [torch.nn.functional.pad(x, (0, self.width - x.shape[-1])) for x in (inputs, columns)]
        return torch.stack(pads, 2).flatten(1, 2)

    def _examples(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        # A query at the end has no target.
        return tokens[:, 0::2, : self.dim], tokens[:, 1::2, : self.outputs or 1]


class Pairs(Layout):
    r"""One token for each example, :math:`(x_i; x_{i-1}, y_{i-1})`, with zeros before the first; read at every token.

    Half as many tokens as :class:`Interleaved`, and each input is in one token with a target. The last target is in no
    token.

    Example:
        >>> layout = Pairs(2)
        >>> layout.tokens(Prompts.of(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), torch.tensor([[5.0, 6.0]])))[0]
        tensor([[1., 2., 0., 0., 0.],
                [3., 4., 1., 2., 5.]])
        >>> layout.positions(2)
        tensor([0, 1])
    """

    @property
    def width(self) -> int:
        return 2 * self.dim + (self.outputs or 1)

    def positions(self, examples: int) -> Tensor:
        return torch.arange(examples)

    def _tokens(self, inputs: Tensor, columns: Tensor) -> Tensor:
        before = torch.cat([inputs, columns], -1)[:, :-1]
        return torch.cat([inputs, torch.nn.functional.pad(before, (0, 0, 1, 0))], -1)

    def _examples(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return tokens[..., : self.dim], tokens[:, 1:, 2 * self.dim :]


LAYOUTS: dict[str, type[Layout]] = {"interleaved": Interleaved, "pairs": Pairs}


def layout_named(name: str, dim: int, outputs: int | None = None) -> Layout:
    """Return the layout of this name: "interleaved" or "pairs".

    Example:
        >>> layout_named("pairs", dim=5).width
        11
    """
    check_choice(name, "layout", LAYOUTS)
    return LAYOUTS[name](dim, outputs)


def check_lengths(lengths: Sequence[int] | None, examples: int) -> list[int]:
    """Return the lengths of prefixes as a list, each at least 0 and below ``examples``; all if None."""
    if lengths is None:
        return list(range(examples))
    found = [check_count(length, "lengths", least=0) for length in lengths]
    if not found or max(found) >= examples:
        raise UserError(
            f"lengths must be below the number of examples, {examples}, and at least one, got {found};"
            " the example after the last one used is the query"
        )
    return found
