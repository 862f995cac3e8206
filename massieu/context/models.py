"""Models that learn in a context: from prompts to a prediction after each number of examples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor, nn

from massieu.context.prompts import Prompts, layout_named
from massieu.nn import LinearAttention, Transformer

__all__ = ["ContextModel", "LinearModel", "SoftmaxModel", "balanced_loss"]

TOGETHER = 2048  # tasks in a forward pass of a prediction, at most
NUMBERS = 2**24  # entries of attention or of tokens in this pass, at most


class ContextModel(nn.Module, ABC):
    """A trainable model, called with prompts like a :class:`~massieu.context.Predictor`."""

    @abstractmethod
    def forward(self, prompts: Prompts) -> Tensor:
        """Return predictions for the next example, ``(tasks, examples)``."""

    @abstractmethod
    def loss(self, prompts: Prompts) -> Tensor:
        """Return the mean squared error against the targets, with the gradient for training."""

    def predict(self, prompts: Prompts) -> Tensor:
        """Return :meth:`forward` without gradients, in batches of tasks to save memory."""
        count = min(TOGETHER, max(1, NUMBERS // (prompts.examples * max(prompts.examples, prompts.dim + 1))))
        with torch.no_grad():
            return torch.cat([self(prompts.chosen(slice(i, i + count))) for i in range(0, prompts.tasks, count)])

    @property
    def size(self) -> int:
        """The number of weights."""
        return sum(weight.numel() for weight in self.parameters())


class SoftmaxModel(ContextModel):
    """Causal transformer with a prediction after every number of examples.

    Without positions: the order of examples does not matter, and the causal mask lets a model count them.

    Args:
        dim: of the inputs of a prompt.
        layout: "pairs" or "interleaved"; interleaved tokens need positions to find the target of an input.
        width: size of the hidden states.
        layers: number of blocks; the feed-forward net of each is twice as wide as the hidden states.
        heads: in each of them.
        generator: draws the weights.

    Example:
        >>> from massieu.context import task_named
        >>> model = SoftmaxModel(5, generator=torch.Generator().manual_seed(0))
        >>> model(task_named("linear", dim=5).draw(7, 11, torch.Generator())).shape
        torch.Size([7, 11])
    """

    def __init__(
        self,
        dim: int,
        *,
        layout: Literal["pairs", "interleaved"] = "pairs",
        width: int = 64,
        layers: int = 4,
        heads: int = 2,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.layout = layout_named(layout, dim)
        self.transformer = Transformer(
            width,
            layers,
            heads,
            hidden_dim=2 * width,  # another layer is better than feed-forward nets of twice the width
            input_dim=self.layout.width,
            output_dim=1,
            activation="relu",  # a fifth of a step cheaper than GELU on a processor
            positions=None if layout == "pairs" else "rotary",
            generator=generator,
        )
        # Tokens are numbers: with the small weights of word embeddings the norms would hide their sizes for long.
        assert self.transformer.embedding is not None
        scale = self.layout.width**-0.5
        torch.nn.init.normal_(self.transformer.embedding.weight, std=scale, generator=generator)  # type: ignore[arg-type]

    def forward(self, prompts: Prompts) -> Tensor:
        found = self.transformer(self.layout.tokens(prompts))
        read: Tensor = found[:, self.layout.positions(prompts.examples), 0]
        return read

    def loss(self, prompts: Prompts) -> Tensor:
        """The :func:`balanced_loss`."""
        return balanced_loss(self(prompts), prompts.targets)


def balanced_loss(predicted: Tensor, targets: Tensor) -> Tensor:
    r"""Return the mean :math:`\bar e` of the squared errors :math:`e_i` after i examples, with a balanced gradient.

    Its gradient is :math:`\bar e \, \nabla \frac1n \sum_i \log e_i`, as of a normal likelihood with a variance for each
    i: the large errors after few examples do not dominate the others.

    Args:
        predicted: shape ``(prompts, examples)``.
        targets: likewise.

    Example:
        >>> balanced_loss(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 0.0]]))
        tensor(2.5000)
    """
    errors = (predicted - targets).square().mean(0)
    known = errors.detach()
    return (errors * known.mean() / known.clamp_min(torch.finfo(known.dtype).tiny)).mean()


class LinearModel(ContextModel):
    r"""One layer of linear attention with free maps, trained on one prediction after all examples.

    The tokens :math:`z_i = (x_i, y_i)` enter only through their Gram matrix, so that a step does not form keys and
    values of each. With u the row of :math:`W_O W_V` that gives the target, and :math:`M = W_K^\top W_Q`,

    .. math:: \hat y = -u^\top \Bigl(\frac1n \sum_{i \le n} z_i z_i^\top\Bigr) M \begin{pmatrix} x \\ 0 \end{pmatrix}

    the minus being that of :func:`massieu.context.context_descent.predict`, through which ``attention`` gives the same.

    The part :math:`z^\top A x` that is linear in :math:`z = \frac1n \sum_i y_i x_i` has the matrix
    :math:`A = -(u_y M_x + u_x m_y^\top)`, with :math:`u_x, u_y` the parts of u for inputs and target and
    :math:`M_x, m_y^\top` the rows of M for both. The first term can be any matrix, the second has rank one. Gradient
    flow on the expected loss keeps :math:`u_x = 0, m_y = 0` where it starts there: negative weights of a task are as
    likely as positive ones, and the gradients in :math:`u_x` and :math:`m_y` are odd in them. It keeps
    :math:`u_y = 0, M_x = 0` likewise, where the best matrix, of rank one, may be a local minimum. Gradients of batches
    leave both sets. So the model starts in the first with :math:`A = I / 16`, a short step of descent.

    Args:
        dim: of the inputs.
        generator: draws the weights.

    Source:
        Zhang, Frei and Bartlett 2023: gradient flow on the expected loss finds a global minimum from a positive
        semidefinite :math:`M_x` that is small enough; the two sets and the local minimum are derived and measured here.

    Example:
        >>> from massieu.context import task_named
        >>> model = LinearModel(5, generator=torch.Generator().manual_seed(0))
        >>> model.matrix.shape, model(task_named("linear", dim=5).draw(7, 11, torch.Generator())).shape
        (torch.Size([5, 5]), torch.Size([7, 11]))
    """

    def __init__(self, dim: int, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.dim = dim
        self.attention = LinearAttention(dim + 1, head_dim=dim + 1, form="mean", generator=generator)
        self._start(generator)

    @property
    def matrix(self) -> Tensor:
        r"""Learned matrix to compare with :math:`A^*` of :class:`massieu.context.Optimum`, ``(dim, dim)``.

        It is that of :math:`z^\top A x`, the part of :math:`\hat y` linear in :math:`z = \frac1n \sum_i y_i x_i`.
        """
        row, middle = self._maps()
        return -(torch.outer(row[:-1], middle[-1]) + row[-1] * middle[:-1])

    def forward(self, prompts: Prompts) -> Tensor:
        tokens = torch.cat([prompts.inputs, prompts.targets[..., None]], -1)
        row, _ = self._maps()
        counts = torch.arange(1, prompts.examples, device=tokens.device).to(tokens)[:, None]
        # The Gram matrix of each prefix times u, without forming the matrices.
        along = (tokens * (tokens @ row)[..., None]).cumsum(1)[:, :-1] / counts
        return torch.cat([tokens.new_zeros(prompts.tasks, 1), self._read(along, prompts.queries[:, 1:])], 1)

    def loss(self, prompts: Prompts) -> Tensor:
        prompts = prompts.truncated(prompts.examples - 1)
        tokens = torch.cat([prompts.inputs, prompts.targets[..., None]], -1)[:, :-1]
        grams = tokens.mT @ tokens / tokens.shape[1]
        row, _ = self._maps()
        found = self._read(grams[:, None] @ row, prompts.queries[:, -1:])
        return (found - prompts.targets[:, -1:]).square().mean()

    @torch.no_grad()
    def _start(self, generator: torch.Generator | None) -> None:
        """Set a short step of gradient descent, :math:`A = I / 16`, in random coordinates of the head.

        Values start with targets alone and keys with inputs. From random weights :math:`u_y M_x` may have to pass zero,
        and training may end at :math:`u_x m_y^\\top`, whose best value is a local minimum of rank one.
        """
        layer = self.attention
        assert layer.v_proj is not None
        assert layer.out_proj is not None
        drawn = torch.randn(self.dim + 1, self.dim, generator=generator).to(layer.k_proj.weight)
        frame = torch.linalg.qr(drawn).Q
        along = 0.5 * torch.nn.functional.normalize(layer.out_proj.weight[-1], dim=0)
        layer.k_proj.weight.zero_()
        layer.k_proj.weight[:, :-1] = layer.q_proj.weight[:, :-1] = 0.5 * frame
        layer.v_proj.weight.zero_()
        layer.v_proj.weight[:, -1] = -along
        layer.out_proj.weight[-1] = along

    def _maps(self) -> tuple[Tensor, Tensor]:
        """Return u and the columns of M for inputs, shapes ``(dim + 1,)`` and ``(dim + 1, dim)``."""
        layer = self.attention
        assert layer.v_proj is not None
        assert layer.out_proj is not None
        row = layer.out_proj.weight[-1] @ layer.v_proj.weight
        return row, layer.k_proj.weight.mT @ layer.q_proj.weight[:, : self.dim]

    def _read(self, along: Tensor, queries: Tensor) -> Tensor:
        _, middle = self._maps()
        return -torch.einsum("tnd,de,tne->tn", queries, middle.mT, along)
