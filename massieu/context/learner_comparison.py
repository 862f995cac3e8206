"""Comparison of a trained model with predictors: errors, sensitivities to the query, and the learned matrix."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from massieu.checks import check_count, optional_package
from massieu.context.baselines import LINEAR, fitted_for, predictors_for, second_moment
from massieu.context.curves import error_curve
from massieu.context.fitted import Boosting
from massieu.context.models import ContextModel, LinearModel
from massieu.context.optimum import Optimum, optimal_linear_attention
from massieu.context.predictors import Averaging, Predictor
from massieu.context.prompts import Prompts
from massieu.context.tasks import Linear, NoisyLinear, SparseLinear, Task

if TYPE_CHECKING:
    import pandas

__all__ = ["LearnerComparison", "affordable", "compare", "sensitivities"]

TESTED = 2048  # tasks whose sensitivities are compared
LENGTHS = 21  # at most this many numbers of examples for predictors of all prefixes
WORK = 2**30  # products of least squares for all prefixes of all tasks, at most
LEAST = 1024  # tasks to compare at least
SHOWN = 64  # tasks whose sensitivities are kept
PLACES = 8  # numbers of examples at which sensitivities are compared
PREFIXES = 3  # numbers of examples for fitted predictors
CLOSED_FORM = "best linear layer"


@dataclass(frozen=True)
class LearnerComparison:
    """Errors, sensitivities and matrices of a trained model beside those of predictors.

    Attributes:
        curve: as of :func:`massieu.context.error_curve`, of the model, called "model", and of predictors, with the
            number of ``tasks`` in each mean.
        sensitivities: for each predictor that is linear in the query, and after several numbers of examples, the mean
            and the least cosine of its sensitivity with that of the model, the standard error of the mean over tasks,
            the distance ``behind`` the mean of the nearest predictor with the standard error of this paired
            difference, and the root mean square of the difference of sensitivities.
        slopes: by name the sensitivities after all examples, for few tasks, as lists of rows: of the model, and of the
            predictors nearest in kind.
        matrices: "learned" and "closed form" as lists of rows, with the losses of both; None unless linear.
    """

    curve: pandas.DataFrame
    sensitivities: pandas.DataFrame
    slopes: dict[str, list[list[float]]]
    matrices: dict[str, object] | None

    @property
    def best_cosine(self) -> float:
        """The largest mean cosine after all examples."""
        return float(_last(self.sensitivities)["cosine"].max())

    def ratio(self, predictor: str) -> float:
        """Return the error of the model after all examples, in units of that of a predictor."""
        errors = _last(self.curve)["error"]
        return float(errors["model"] / errors[predictor])


def compare(
    model: ContextModel,
    task: Task,
    prompts: Prompts,
    *,
    fitted: int = 0,
    progress: Callable[[str, int, int], object] | None = None,
) -> LearnerComparison:
    """Compare a model with predictors on the same prompts: errors, sensitivities, and matrices of a linear model.

    Args:
        model: after training.
        task: the distribution of the functions of the prompts.
        prompts: none of them from training.
        fitted: tasks for Lasso, trees and networks, which are fitted anew to each prefix, after three numbers of
            examples only; boosting has a quarter of them. 0 leaves them out.
        progress: called with "comparing", the number of parts done, and of all.

    With more than 21 numbers of examples the errors are those after 21 of them, spread evenly from none to all.

    Example:
        >>> from massieu.context import LinearModel, task_named
        >>> task, draws = task_named("linear", dim=2), torch.Generator().manual_seed(0)
        >>> found = compare(LinearModel(2, generator=draws), task, task.draw(50, 5, draws))
        >>> list(found.curve.predictor.unique())[:3], list(found.matrices)[:2]
        (['model', 'least squares (Bayes)', 'gradient step'], ['learned', 'closed form'])
    """
    check_count(fitted, "fitted", least=0)
    others, slow = predictors_for(task), fitted_for(task) if fitted else {}
    optimum = _optimum(task, prompts.examples - 1) if isinstance(model, LinearModel) else None
    if optimum is not None:
        others[CLOSED_FORM] = _Layer(optimum.matrix)
    compared: dict[str, Callable[[Prompts], Tensor]] = {"model": model.predict, **others, **slow}
    places = _spread(prompts.examples - 1, PLACES)
    parts = len(compared) + len(places)

    def report(done: int) -> None:
        if progress is not None:
            progress("comparing", done, parts)

    curves = []
    for done, (name, predictor) in enumerate(compared.items()):
        report(done)
        tasks, lengths = prompts.tasks, [0, *_spread(prompts.examples - 1, LENGTHS - 1)]
        if name in slow:
            tasks = min(tasks, -(-fitted // 4) if isinstance(predictor, Boosting) else fitted)
            lengths = _spread(prompts.examples - 1, PREFIXES)
        with torch.no_grad():
            curve = error_curve(prompts.chosen(slice(tasks)), {name: predictor}, lengths)
        curves.append(curve.assign(tasks=tasks))
    curve = optional_package("pandas", "compare", "verify").concat(curves, ignore_index=True)
    linear: dict[str, Predictor] = {name: each for name, each in others.items() if isinstance(each, (*LINEAR, _Layer))}
    numbered = [(length, len(compared) + place) for place, length in enumerate(places)]
    table, slopes = _compare_sensitivities(model, linear, prompts.chosen(slice(TESTED)), numbered, report)
    matrices = None if optimum is None else _matrices(model, optimum, _last(curve)["error"])
    return LearnerComparison(curve, table, slopes, matrices)


def affordable(dim: int, examples: int) -> int:
    """Return the number of tasks on which predictors for all prefixes are compared in some ten seconds."""
    lengths = min(LENGTHS, examples + 1)
    return max(LEAST, WORK // (lengths * examples * dim**2))


def sensitivities(predict: Callable[[Prompts], Tensor], prompts: Prompts) -> Tensor:
    r"""Return derivatives :math:`\partial \hat y / \partial x` in the query after all examples, ``(tasks, dim)``."""
    query = prompts.inputs[:, -1:].detach().clone().requires_grad_()
    inputs = torch.cat([prompts.inputs[:, :-1].detach(), query], 1)
    # A predictor reads the query among the queries, a model as its last input.
    if isinstance(predict, Predictor):
        found = predict(replace(prompts, inputs=prompts.inputs.detach(), queries=inputs), [prompts.examples - 1])
    else:
        found = predict(replace(prompts, inputs=inputs, queries=inputs))
    (slope,) = torch.autograd.grad(found[:, -1].sum(), query)
    return slope[:, 0]


def _compare_sensitivities(
    model: ContextModel,
    others: dict[str, Predictor],
    prompts: Prompts,
    places: list[tuple[int, int]],
    report: Callable[[int], None],
) -> tuple[pandas.DataFrame, dict[str, list[list[float]]]]:
    """Compare at places: pairs of a number of examples and the number of parts done before."""
    rows, slopes = [], {}
    for length, done in places:
        report(done)
        posed = prompts.truncated(length)
        own = sensitivities(model, posed)
        slopes = {"model": own, **{name: sensitivities(predictor, posed) for name, predictor in others.items()}}
        cosines = {name: torch.nn.functional.cosine_similarity(own, slopes[name], dim=-1) for name in others}
        nearest = max(cosines, key=lambda name: float(cosines[name].mean()), default="")
        for name, each in cosines.items():
            behind, gap = cosines[nearest] - each, (own - slopes[name]).square().mean().sqrt()
            means = (*_mean(each), float(each.min()), *_mean(behind))
            rows.append((name, length, *means, float(gap)))
    columns = ["predictor", "examples", "cosine", "standard_error", "least_cosine"]
    columns += ["behind", "behind_error", "difference"]
    table = optional_package("pandas", "compare", "verify").DataFrame(rows, columns=columns)
    chosen = ["model", *list(others)[:1], "gradient step", CLOSED_FORM]
    return table, {name: slopes[name][:SHOWN].tolist() for name in dict.fromkeys(chosen) if name in slopes}


def _mean(values: Tensor) -> tuple[float, float]:
    """Return the mean over tasks and its standard error."""
    values = values.double()
    error = values.std() / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(values.mean()), float(error)


class _Layer(Predictor):
    r"""Predictor :math:`z^\top A x` with :math:`z = \frac1n \sum_i y_i x_i`."""

    def __init__(self, matrix: Tensor):
        self.matrix = matrix

    def predict(self, inputs: Tensor, targets: Tensor, queries: Tensor, lengths: list[int]) -> Tensor:
        return Averaging().predict(inputs, targets, queries @ self.matrix.mT, lengths)


def _optimum(task: Task, examples: int) -> Optimum | None:
    if not isinstance(task, Linear) or type(task) not in (Linear, NoisyLinear, SparseLinear):
        return None  # no closed form: the functions are not linear
    if torch.linalg.eigvalsh(task.covariance)[0] <= 0:
        return None  # no single best matrix: directions without inputs are free
    return optimal_linear_attention(task.covariance, second_moment(task), noise=task.noise, examples=examples)


def _matrices(model: ContextModel, optimum: Optimum, errors: pandas.Series[float]) -> dict[str, object]:
    assert isinstance(model, LinearModel)
    matrix = model.matrix.detach().double()
    return {
        "learned": matrix.tolist(),
        "closed form": optimum.matrix.tolist(),
        "loss": float(optimum.loss_of(matrix)),
        "best loss": optimum.loss,
        "measured": float(errors["model"]),
        "best measured": float(errors[CLOSED_FORM]),
    }


def _spread(most: int, count: int) -> list[int]:
    """Return ``count`` numbers of examples up to ``most``, evenly spread."""
    count = min(count, most)
    return [round(most * (place + 1) / count) for place in range(count)]


def _last(table: pandas.DataFrame) -> pandas.DataFrame:
    return table[table["examples"] == table["examples"].max()].set_index("predictor")
