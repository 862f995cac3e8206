"""Prompts: the examples of many functions, where each is asked, and how the examples become tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from massieu.checks import UserError, check_floating
from massieu.measures.measure import as_integer

__all__ = ["Interleaved", "Layout", "Pairs", "Prompts", "layout_named"]


@dataclass(frozen=True)
class Prompts:
    r"""Examples :math:`(x_i, y_i)` of one function for each task, and what is asked after each number of them.

    Prediction i is that of :math:`f(q_i)` from the i examples before it, :math:`(x_j, y_j)_{j < i}`. Usually the query
    :math:`q_i` is the next example :math:`x_i`, so that the last example is the query of the whole prompt;
    out-of-distribution prompts have queries of their own.

    Attributes:
        inputs: :math:`x`, shape ``(tasks, examples, dim)``.
        targets: :math:`y`, with noise, shape ``(tasks, examples)`` or ``(tasks, examples, outputs)``.
        queries: :math:`q`, shape of the inputs; the same tensor where the next example is asked.
        answers: :math:`f(q)` without noise, shape of the targets.
        parameters: of the functions, each with the tasks as first axis.

    Example:
        >>> prompts = Prompts.of(torch.zeros(2, 5, 3), torch.zeros(2, 5))
        >>> prompts.tasks, prompts.examples, prompts.dim, prompts.outputs, prompts.asks_the_next_example
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
        if self.inputs.dim() != 3 or 0 in self.inputs.shape:
            raise UserError(
                f"inputs must have shape (tasks, examples, dim), none of them 0, got {tuple(self.inputs.shape)};"
                " for a single task pass inputs[None]"
            )
        if self.targets.dim() not in (2, 3) or self.targets.shape[:2] != self.inputs.shape[:2]:
            raise UserError(
                f"targets must have shape {tuple(self.inputs.shape[:2])}, or that and the outputs,"
                f" got {tuple(self.targets.shape)}; give every input its target"
            )
        for name, other in (("queries", "inputs"), ("answers", "targets")):
            shape, expected = getattr(self, name).shape, getattr(self, other).shape
            if shape != expected:
                raise UserError(
                    f"{name} must have the shape of the {other}, {tuple(expected)}, got {tuple(shape)};"
                    " ask one question after each number of examples"
                )

    @classmethod
    def of(cls, inputs: Tensor, targets: Tensor) -> Prompts:
        """Prompts from data of one's own: the next example is asked, and its target is the answer."""
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
        """How many numbers a target has; None where targets are plain numbers."""
        return self.targets.shape[2] if self.targets.dim() == 3 else None

    @property
    def asks_the_next_example(self) -> bool:
        return self.queries is self.inputs

    def chosen(self, tasks: slice) -> Prompts:
        """The prompts of some tasks."""
        inputs = self.inputs[tasks]
        queries = inputs if self.asks_the_next_example else self.queries[tasks]
        parameters = {name: value[tasks] for name, value in self.parameters.items()}
        return Prompts(inputs, self.targets[tasks], queries, self.answers[tasks], parameters)

    def ask_after(self, length: int) -> Prompts:
        """The first examples and then the query as the last one, which is how a model reads any prompt.

        Its target is the answer, unless the next example is asked: then it stays the target with its noise.
        """
        length = as_integer(length, "length", least=0)
        if length >= self.examples:
            raise UserError(
                f"length must be below the number of examples, {self.examples}, got {length}; the last one is the query"
            )
        if self.asks_the_next_example:
            inputs, targets = self.inputs[:, : length + 1], self.targets[:, : length + 1]
            answers = self.answers[:, : length + 1]
        else:
            inputs = torch.cat([self.inputs[:, :length], self.queries[:, length : length + 1]], 1)
            targets = torch.cat([self.targets[:, :length], self.answers[:, length : length + 1]], 1)
            answers = targets
        return Prompts(inputs, targets, inputs, answers, self.parameters)


class Layout(ABC):
    """How examples become tokens, and where a model that sees only earlier tokens is read.

    Args:
        dim: of the inputs.
        outputs: numbers in a target; None where targets are plain numbers.
    """

    def __init__(self, dim: int, outputs: int | None = None):
        self.dim = as_integer(dim, "dim", least=1)
        self.outputs = None if outputs is None else as_integer(outputs, "outputs", least=1)

    @property
    @abstractmethod
    def width(self) -> int:
        """Size of a token."""

    @abstractmethod
    def positions(self, examples: int) -> Tensor:
        """The tokens at which the predictions are read, shape ``(examples,)``."""

    def tokens(self, prompts: Prompts) -> Tensor:
        """The tokens, shape ``(tasks, tokens, width)``."""
        if (prompts.dim, prompts.outputs) != (self.dim, self.outputs):
            raise UserError(
                f"the layout expects dim {self.dim} and outputs {self.outputs}, got prompts with dim {prompts.dim}"
                f" and outputs {prompts.outputs}; build the layout for these prompts"
            )
        if not prompts.asks_the_next_example:
            raise UserError(
                "tokens must ask for the next example, got prompts with queries of their own;"
                " lay out prompts.ask_after(length) for one length at a time"
            )
        return self._tokens(prompts.inputs, self._columns(prompts.targets))

    def examples(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets from tokens, as far as the tokens hold them."""
        check_floating(tokens, "tokens")
        if tokens.dim() != 3 or tokens.shape[-1] != self.width:
            raise UserError(
                f"tokens must have shape (tasks, tokens, {self.width}), got {tuple(tokens.shape)};"
                " they are what layout.tokens gives"
            )
        inputs, columns = self._examples(tokens)
        return inputs, columns[..., 0] if self.outputs is None else columns

    def _columns(self, targets: Tensor) -> Tensor:
        return targets[..., None] if self.outputs is None else targets

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

    Half as many tokens as :class:`Interleaved`, and an input need not look for its own target. The last target is the
    one that is asked and is in no token.

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


def layout_named(name: str, dim: int, outputs: int | None = None) -> Layout:
    """The layout of this name: "interleaved" or "pairs".

    Example:
        >>> layout_named("pairs", dim=5).width
        11
    """
    layouts: dict[str, type[Layout]] = {"interleaved": Interleaved, "pairs": Pairs}
    if name not in layouts:
        raise UserError(f'layout must be "interleaved" or "pairs", got {name!r}; pairs are half as many tokens')
    return layouts[name](dim, outputs)
