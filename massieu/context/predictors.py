"""Predictors to compare models with: a prediction for the query after each number of examples, for all tasks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from massieu.checks import UserError, check_count, check_number
from massieu.context.prompts import Prompts, check_lengths
from massieu.context.tasks.linear import Linear, NoisyLinear
from massieu.context.tasks.task import Task, root_of_covariance

__all__ = ["Averaging", "LeastSquares", "Neighbors", "Predictor", "Ridge", "bayes_predictor"]

CHUNK = 2**22
"""Numbers in memory at a time, in the matrices of all prefixes."""

SMALL = 1e-6
"""Penalties below this share of the squared length of inputs are too small for the Gram matrix, which squares them."""


class Predictor(ABC):
    """A predictor of the answer to each query from the examples before it; 0 without examples."""

    def __call__(self, prompts: Prompts, lengths: Sequence[int] | None = None) -> Tensor:
        """Return predictions, shape ``(tasks, lengths)``, or that and the outputs, computed in double precision.

        Args:
            prompts: examples and queries.
            lengths: numbers of examples after which to predict; all by default, from none to all but the last.
        """
        lengths = check_lengths(lengths, prompts.examples)
        columns = prompts.targets if prompts.outputs else prompts.targets[..., None]
        queries = prompts.queries[:, lengths].double()
        found = self.predict(prompts.inputs.double(), columns.double(), queries, lengths).to(prompts.targets)
        return found if prompts.outputs else found[..., 0]

    @abstractmethod
    def predict(self, inputs: Tensor, targets: Tensor, queries: Tensor, lengths: list[int]) -> Tensor:
        """Return predictions ``(tasks, lengths, outputs)`` for one query after each length.

        Args:
            inputs: shape ``(tasks, examples, dim)``.
            targets: shape ``(tasks, examples, outputs)``.
            queries: shape ``(tasks, lengths, dim)``.
            lengths: numbers of examples that may be used.
        """


class Ridge(Predictor):
    r"""Ridge regression; the Bayes predictor of linear functions with noise.

    .. math:: \hat w = \arg\min_w \sum_{j<i} (y_j - \langle w, x_j \rangle)^2 + \lambda\, w^\top \Psi^{-1} w

    For :math:`w \sim N(0, \Psi)` and noise of variance :math:`\lambda` this is the posterior mean. All prefixes are
    solved at once, from running sums, by Cholesky factors; with a small penalty one by one, by singular values.

    Args:
        penalty: :math:`\lambda`, not negative; 0 gives the limit, least squares of minimum norm.
        prior: :math:`\Psi`: a number, variances, or a matrix that may be singular; the identity by default.

    Example:
        >>> prompts = Prompts.of(torch.tensor([[[1.0], [1.0], [1.0]]]), torch.tensor([[2.0, 2.0, 2.0]]))
        >>> Ridge(1.0)(prompts)  # 0, then 2 / (1 + 1) and 4 / (2 + 1)
        tensor([[0.0000, 1.0000, 1.3333]])
    """

    def __init__(self, penalty: float, prior: Any = None):
        self.penalty, self.prior = check_number(penalty, "penalty", least=0), prior

    def predict(self, inputs: Tensor, targets: Tensor, queries: Tensor, lengths: list[int]) -> Tensor:
        inputs, queries = self._whitened(inputs), self._whitened(queries)
        if not self.penalty:
            return LeastSquares().predict(inputs, targets, queries, lengths)
        if self.penalty <= SMALL * float(inputs.square().sum(-1).max()):
            return self._by_singular_values(inputs, targets, queries, lengths)
        found = [
            torch.einsum("tld,tldo->tlo", queries[chunk], torch.cholesky_solve(moments, self._factor(grams)))
            for chunk, grams, moments in prefix_sums(inputs, targets, lengths)
        ]
        return torch.cat(found)

    def variance(self, prompts: Prompts, lengths: Sequence[int] | None = None) -> Tensor:
        r"""Return the posterior variance of the answers, :math:`\lambda\, q^\top (G_i + \lambda \Psi^{-1})^{-1} q`.

        With prior and noise of the prompts its mean is the error of the best predictor. Shape ``(tasks, lengths)``.
        """
        if not self.penalty:
            raise UserError("variance needs a positive penalty, got 0; it is the variance of the noise")
        lengths = check_lengths(lengths, prompts.examples)
        inputs, queries = self._whitened(prompts.inputs.double()), self._whitened(prompts.queries[:, lengths].double())
        found = []
        for chunk, grams, _ in prefix_sums(inputs, inputs[..., :1], lengths):
            values, vectors = torch.linalg.eigh(grams)
            rounding = values.shape[-1] * torch.finfo(values.dtype).eps * values[..., -1:]
            values = torch.where(values > rounding, values, 0.0)  # else a small penalty drowns in it
            along = torch.einsum("tld,tlde->tle", queries[chunk], vectors)
            found.append((along.square() * self.penalty / (values + self.penalty)).sum(-1))
        return torch.cat(found).to(prompts.targets)

    def _by_singular_values(self, inputs: Tensor, targets: Tensor, queries: Tensor, lengths: list[int]) -> Tensor:
        found = queries.new_zeros(*queries.shape[:2], targets.shape[-1])
        for place, length in enumerate(lengths):
            if length:
                left, values, right = torch.linalg.svd(inputs[:, :length], full_matrices=False)
                rounding = max(inputs[0, :length].shape) * torch.finfo(values.dtype).eps * values[:, :1]
                factors = torch.where(values > rounding, values / (values.square() + self.penalty), 0.0)
                along = torch.einsum("tkd,td->tk", right, queries[:, place])
                found[:, place] = torch.einsum("tk,tnk,tno->to", along * factors, left, targets[:, :length])
        return found

    def _whitened(self, vectors: Tensor) -> Tensor:
        root, _ = root_of_covariance(self.prior, "prior", vectors.shape[-1])
        return vectors if root is None else vectors @ root.to(vectors)

    def _factor(self, grams: Tensor) -> Tensor:
        eye = torch.eye(grams.shape[-1], dtype=grams.dtype, device=grams.device)
        factor: Tensor = torch.linalg.cholesky(grams + self.penalty * eye)
        return factor


class LeastSquares(Predictor):
    r"""Least squares; among all minimizers the one of minimum norm.

    Without noise it is the Bayes predictor of :math:`w \sim N(0, I)`. With noise its mean error is infinite after
    :math:`i \in \{d-1, d, d+1\}` examples (of which at least one): look at medians there, or at :class:`Ridge`.

    Example:
        >>> prompts = Prompts.of(torch.eye(3)[None], torch.tensor([[1.0, 2.0, 3.0]]))
        >>> LeastSquares()(prompts)
        tensor([[0., 0., 0.]])
    """

    def predict(self, inputs: Tensor, targets: Tensor, queries: Tensor, lengths: list[int]) -> Tensor:
        found = queries.new_zeros(*queries.shape[:2], targets.shape[-1])
        for place, length in enumerate(lengths):
            if length:
                # Orthogonal factors with pivots: stable for repeated inputs, and a Gram matrix would cost digits.
                weights = torch.linalg.lstsq(inputs[:, :length], targets[:, :length], driver="gelsy").solution
                found[:, place] = torch.einsum("td,tdo->to", queries[:, place], weights)
        return found


class Neighbors(Predictor):
    """Mean target of the nearest inputs; of all if there are fewer.

    Args:
        count: number of neighbors.

    Example:
        >>> prompts = Prompts.of(torch.tensor([[[0.0], [5.0], [1.0]]]), torch.tensor([[7.0, 8.0, 9.0]]))
        >>> Neighbors(1)(prompts)
        tensor([[0., 7., 7.]])
    """

    def __init__(self, count: int = 3):
        self.count = check_count(count, "count")

    def predict(self, inputs: Tensor, targets: Tensor, queries: Tensor, lengths: list[int]) -> Tensor:
        later = torch.arange(inputs.shape[1]) >= torch.tensor(lengths)[:, None]
        distances = torch.cdist(queries, inputs).masked_fill(later.to(inputs.device), float("inf"))
        nearest, which = distances.topk(min(self.count, inputs.shape[1]), largest=False)
        weights = nearest.isfinite().to(targets)
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1)
        chosen = targets[torch.arange(len(targets), device=targets.device)[:, None, None], which]
        return torch.einsum("tlk,tlko->tlo", weights, chosen)


class Averaging(Predictor):
    r"""Prediction by :math:`\hat w = \frac1i \sum_{j<i} y_j x_j`, without bias for isotropic inputs of variance one.

    Example:
        >>> prompts = Prompts.of(torch.tensor([[[1.0], [2.0], [1.0]]]), torch.tensor([[1.0, 2.0, 0.0]]))
        >>> Averaging()(prompts)  # (1 + 4) / 2 at the end
        tensor([[0.0000, 2.0000, 2.5000]])
    """

    def predict(self, inputs: Tensor, targets: Tensor, queries: Tensor, lengths: list[int]) -> Tensor:
        counts = torch.tensor(lengths).clamp_min(1).to(inputs)
        return torch.einsum("tld,tldo->tlo", queries, prefix_moments(inputs, targets, lengths)) / counts[:, None]


def bayes_predictor(task: Task) -> Predictor:
    r"""Return the predictor of least mean square error for a task, where it has a closed form.

    Ridge regression with the prior of the task and the variance of its noise; least squares of minimum norm without.

    Example:
        >>> from massieu.context import task_named
        >>> bayes_predictor(task_named("linear", dim=5, noise=0.5)).penalty
        0.25
    """
    # Not their subclasses: sparse weights, squares and labels have other best predictors.
    if not isinstance(task, Linear) or type(task) not in (Linear, NoisyLinear):
        raise UserError(
            f"task must be linear with a normal prior, got {type(task).__name__}; there is no closed form, so compare"
            " with several predictors"
        )
    return Ridge(task.noise**2, task.prior)


def prefix_moments(inputs: Tensor, targets: Tensor, lengths: list[int]) -> Tensor:
    r"""Return :math:`\sum_{j<i} x_j y_j^\top` for each length i, shape ``(tasks, lengths, dim, outputs)``."""
    if len(lengths) == 1:  # one product instead of the sums of all prefixes
        return (inputs[:, : lengths[0]].mT @ targets[:, : lengths[0]])[:, None]
    products = torch.einsum("tnd,tno->tndo", inputs, targets).cumsum(1)
    return torch.nn.functional.pad(products, (0, 0, 0, 0, 1, 0))[:, lengths]


def prefix_sums(inputs: Tensor, targets: Tensor, lengths: list[int]) -> Iterator[tuple[slice, Tensor, Tensor]]:
    r"""Yield slices of tasks, each with :math:`\sum_{j<i} x_j x_j^\top` and :math:`\sum_{j<i} x_j y_j^\top`."""
    tasks, examples, dim = inputs.shape
    size = max(1, CHUNK // (examples * dim * dim))
    for start in range(0, tasks, size):
        chunk = slice(start, start + size)
        x, y = inputs[chunk], targets[chunk]
        yield chunk, prefix_moments(x, x, lengths), prefix_moments(x, y, lengths)
