"""Error against the number of examples, for predictors and models side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from massieu.checks import UserError, check_choice, optional_package
from massieu.context.predictors import Predictor
from massieu.context.prompts import Prompts, check_lengths

if TYPE_CHECKING:
    import pandas

__all__ = ["error_curve"]


def error_curve(
    prompts: Prompts,
    predictors: Mapping[str, Callable[[Prompts], Tensor]],
    lengths: Sequence[int] | None = None,
    *,
    statistic: Literal["mean", "median"] = "mean",
    per_dim: bool = False,
) -> pandas.DataFrame:
    r"""Return the squared errors :math:`(\hat y_i - f(q_i))^2` against the answers without noise, over tasks.

    Args:
        prompts: examples, queries and answers.
        predictors: by name: a :class:`~massieu.context.Predictor`, or any function from prompts to predictions of
            shape ``(tasks, examples)`` or that and the outputs; errors of several outputs are added up.
        lengths: numbers of examples; all by default. For predictors that are fitted to each prefix pass few.
        statistic: "mean", or "median" where the mean is infinite, as for least squares with noise around d examples.
        per_dim: divide by the dimension of the inputs, so that the prediction 0 has error 1 for linear functions.

    Returns:
        A row for each predictor and length, with columns ``predictor``, ``examples``, ``error`` and
        ``standard_error``; that of the median is half the distance of the order statistics one standard deviation
        of their rank away.

    Example:
        >>> from massieu.context import Ridge, task_named
        >>> prompts = task_named("ridge", dim=5, noise=0.5).draw(2000, 11, torch.Generator().manual_seed(0))
        >>> error_curve(prompts, {"ridge": Ridge(0.25)}, [0, 10]).round(1)
          predictor  examples  error  standard_error
        0     ridge         0    5.3             0.2
        1     ridge        10    0.3             0.0
    """
    check_choice(statistic, "statistic", ("mean", "median"))
    frames = optional_package("pandas", "error_curve", "verify")
    lengths = check_lengths(lengths, prompts.examples)
    rows = []
    if not isinstance(predictors, Mapping):
        got = type(predictors).__name__
        raise UserError(f"predictors must be a mapping of names to predictors, got {got}; pass {{'mine': predictor}}")
    for name, predictor in predictors.items():
        if isinstance(predictor, Predictor):
            found = predictor(prompts, lengths)
        else:
            found = _all_lengths(predictor(prompts), prompts, name)[:, lengths]
        errors = (found - prompts.answers[:, lengths]).double().square()
        errors = errors.sum(-1) if prompts.outputs else errors
        errors = errors / prompts.dim if per_dim else errors
        center, spread = _mean(errors) if statistic == "mean" else _median(errors)
        rows += list(zip([name] * len(lengths), lengths, center.tolist(), spread.tolist(), strict=True))
    return frames.DataFrame(rows, columns=["predictor", "examples", "error", "standard_error"])


def _all_lengths(found: Tensor, prompts: Prompts, name: str) -> Tensor:
    if found.shape != prompts.targets.shape:
        raise UserError(
            f"{name} must give predictions of the shape of the targets, {tuple(prompts.targets.shape)}, got"
            f" {tuple(found.shape)}; predict one answer after each number of examples"
        )
    return found


def _mean(errors: Tensor) -> tuple[Tensor, Tensor]:
    tasks = errors.shape[0]
    spread = errors.std(0) if tasks > 1 else torch.full_like(errors[0], math.nan)
    return errors.mean(0), spread / math.sqrt(tasks)


def _median(errors: Tensor) -> tuple[Tensor, Tensor]:
    half = 0.5 / math.sqrt(errors.shape[0])  # the rank of the median has this standard deviation, as a share
    shares = torch.tensor([0.5, max(0.0, 0.5 - half), min(1.0, 0.5 + half)], dtype=errors.dtype, device=errors.device)
    center, low, high = errors.quantile(shares, 0)
    return center, (high - low) / 2
