"""Training of models that learn in a context; resumed runs continue bit for bit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

from massieu.checks import UserError, check_count, optional_package
from massieu.context import training_files
from massieu.context.baselines import learner_for
from massieu.context.duration import why_too_short
from massieu.context.hypotheses import separate
from massieu.context.learner_comparison import CLOSED_FORM, LearnerComparison, affordable, compare
from massieu.context.learning_recipe import SHAPE, LearningRecipe
from massieu.context.models import ContextModel, LinearModel, SoftmaxModel
from massieu.context.optimizer import JointAdamW
from massieu.context.pools import draw_pool
from massieu.context.prompts import Prompts
from massieu.context.robustness import errors_under_shifts
from massieu.context.tasks import Task
from massieu.context.tasks.shifts import Shifted
from massieu.kernels.threads import torch_threads

if TYPE_CHECKING:
    import pandas

__all__ = ["Learned", "learn"]

Progress = Callable[[str, int, int], object]
COLUMNS = ("step", "loss", "rate", "error")
WARM_UP = 100  # steps of a linear warm-up of the learning rate
TESTS = 20480  # tasks of the comparison at the end, at most
VALIDATION = 1024  # tasks of the history, others than these: training may stop by their error
WORK = 10**8  # weights times tokens of a step for each thread: with less they wait for each other
UNSEEN = 2**40  # seeds from here on are for other purposes than the data of a step


@dataclass(frozen=True)
class Learned:
    """A trained model, its history and its comparison with predictors.

    Attributes:
        model: in evaluation mode; call it with prompts.
        history: a row for each measurement: step, mean training loss since the one before, learning rate, and the error
            after all examples on tasks that neither training nor the comparison uses.
        comparison: error against examples beside predictors, sensitivities, and the learned matrix beside the best.
        shifts: errors on prompts out of distribution, see :func:`massieu.context.robustness.errors_under_shifts`.
        hypotheses: retrieval against learning, see :func:`massieu.context.separate`.
        stopped_by: "steps", "patience" or "target".
        facts: task, recipe, number of weights, seconds of training, those before a resumed checkpoint included.
    """

    model: ContextModel
    history: pandas.DataFrame
    comparison: LearnerComparison
    shifts: pandas.DataFrame
    hypotheses: pandas.DataFrame
    stopped_by: str
    facts: dict[str, Any] = field(repr=False)

    @property
    def too_short(self) -> str | None:
        """Sentence on a run that used up its steps while its error still fell; None if it was long enough."""
        if self.stopped_by != "steps":
            return None
        names = self.comparison.curve["predictor"].unique()
        attainable = next((name for name in names if name == CLOSED_FORM), None)
        pooled = self.facts["recipe"]["pool"] is not None
        return why_too_short(self.history, self.comparison.curve, attainable=attainable, is_pooled=pooled)

    def to_dict(self) -> dict[str, Any]:
        """Return all but the weights, for JSON; values that are not finite are None."""
        tables = {
            "history": self.history,
            "shifts": self.shifts,
            "hypotheses": self.hypotheses,
            "curve": self.comparison.curve,
            "sensitivities": self.comparison.sensitivities,
        }
        rows = {name: [_finite(row) for row in table.to_dict("records")] for name, table in tables.items()}
        return {
            "facts": {**self.facts, "ended": self.stopped_by, "too_short": self.too_short},
            **rows,
            "slopes": self.comparison.slopes,
            "matrices": self.comparison.matrices,
        }


def learn(
    task: Task,
    recipe: LearningRecipe | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    checkpoint_every: int = 100,
    tensorboard: bool = False,
    fitted: int = 0,
    progress: Progress | None = None,
) -> Learned:
    r"""Train a model from scratch to predict :math:`f(x_{n+1})` from n examples of f, for f drawn from a task.

    The data of step k come from a generator seeded by ``(seed, k)``, so that a checkpoint consists of weights, moments
    of the optimizer and the number of steps, and a resumed run is bit for bit the run without interruption.

    Args:
        task: a distribution of functions, such as ``task_named("linear", dim=5, noise=0.5)``.
        recipe: model, steps, data and seed; the default transformer if None.
        out: folder of ``checkpoint.safetensors`` and ``history.csv``; None writes nothing.
        resume: continue from the checkpoint in ``out``.
        checkpoint_every: steps between two checkpoints, the most that a kill may cost.
        tensorboard: also write events for TensorBoard to ``out``.
        fitted: tasks for predictors that are fitted to each prefix, see :func:`massieu.context.compare`.
        progress: called with the name of a stage, the number of steps done, and of all.

    Source:
        Garg et al. 2022 for the task; pair tokens, ReLU and no positions since they need a fifth of the time.

    Example:
        >>> from massieu.context import LearningRecipe, task_named
        >>> recipe = LearningRecipe(model="linear", steps=300, batch=256)
        >>> found = learn(task_named("linear", dim=2, noise=0.5), recipe)
        >>> found.stopped_by, bool(found.comparison.best_cosine > 0.9)
        ('steps', True)
    """
    recipe = LearningRecipe() if recipe is None else recipe
    examples = 2 * task.dim if recipe.examples is None else recipe.examples
    recipe = replace(recipe, examples=examples)
    check_count(checkpoint_every, "checkpoint_every")
    if out is None and (resume or tensorboard):
        raise UserError("resume and tensorboard need a folder, got out=None; pass the folder of the run")
    if out is not None and not str(out):
        raise UserError("out must name a folder, got an empty name; '.' is the current folder")
    needed = "sklearn" if fitted else learner_for(task, examples).needs
    if needed is not None:
        optional_package(needed, "the comparison after training", "verify")  # before training, not after it
    run = _TrainingRun(task, recipe, examples)
    identity = {"task": training_files.described(task), "recipe": asdict(recipe)}
    folder = None if out is None else Path(out)
    if folder is not None:
        training_files.check_folder(folder, resume)
    with training_files.claimed(folder), torch_threads(run.threads):
        stopped_by = _train(run, identity, folder, resume, checkpoint_every, tensorboard, progress)
    facts = {
        **identity,
        "parameters": run.model.size,
        "seconds": round(run.spent[0], 1),
        "cpu_seconds": round(run.spent[1], 1),
    }
    if progress is not None:
        progress("comparing", 0, 0)
    run.model.eval()
    tests = task.draw(min(TESTS, affordable(task.dim, examples)), examples + 1, _generator(recipe.seed, UNSEEN))
    shifts = errors_under_shifts(run.model, task, examples, _generator(recipe.seed, UNSEEN + 5))
    hypotheses = separate(run.model.predict, task, run.pool, examples, _generator(recipe.seed, UNSEEN + 1))
    comparison = compare(run.model, task, tests, fitted=fitted, progress=progress)
    return Learned(run.model, run.table(), comparison, shifts, hypotheses, stopped_by, facts)


def _train(
    run: _TrainingRun,
    identity: dict[str, Any],
    folder: Path | None,
    resume: bool,
    checkpoint_every: int,
    tensorboard: bool,
    progress: Progress | None,
) -> str:
    """Take all steps that are left, with checkpoints and logs; return the reason of the stop."""

    def log() -> None:
        if folder is not None:
            training_files.write_text(folder / "history.csv", run.table().to_csv(index=False))

    if folder is not None and resume:
        run.restore(*training_files.read(folder, identity))
        log()  # a kill may have come between a checkpoint and its log
    writer = _tensorboard(folder, run.step) if tensorboard and folder is not None else None
    before, begin, cpu = run.spent, time.perf_counter(), time.process_time()
    while (stopped_by := run.stopped_by()) is None:
        if progress is not None:
            progress("training", run.step, run.recipe.steps)
        row = run.advance()
        run.spent = (before[0] + time.perf_counter() - begin, before[1] + time.process_time() - cpu)
        if row is not None and writer is not None:
            for name in COLUMNS[1:]:
                writer.add_scalar(name, row[name], run.step)
        if folder is not None and (run.step % checkpoint_every == 0 or run.stopped_by() is not None):
            training_files.write(folder, run.state(), run.step, run.spent, identity)
            log()
    if writer is not None:
        writer.close()
    return stopped_by


class _TrainingRun:
    """State of a training run, and the steps that change it."""

    def __init__(self, task: Task, recipe: LearningRecipe, examples: int):
        if getattr(task, "outputs", None) is not None:
            raise UserError(f"task must have plain targets, got outputs={task.outputs}; train one function at a time")  # type: ignore[attr-defined]
        if isinstance(task, Shifted):
            raise UserError(
                f"task must not be a shift, got {type(task).__name__}; train on the task inside it, and evaluate the"
                " model on shifted prompts after that"
            )
        self.task, self.recipe, self.examples = task, recipe, examples
        weights = _generator(recipe.seed, UNSEEN + 2)
        self.model: ContextModel
        if recipe.model == "linear":
            self.model = LinearModel(task.dim, generator=weights)
        else:
            shape = {name: getattr(recipe, name) for name in SHAPE}
            self.model = SoftmaxModel(task.dim, **shape, generator=weights)
        self.optimizer = JointAdamW(self.model)
        self.pool = None if recipe.pool is None else draw_pool(task, recipe.pool, _generator(recipe.seed, UNSEEN + 3))
        self.validation = task.draw(VALIDATION, examples + 1, _generator(recipe.seed, UNSEEN + 4))
        self.step, self.rows, self.total = 0, [], 0.0  # type: ignore[var-annotated]
        self.spent: training_files.Spent = (0.0, 0.0)

    @property
    def threads(self) -> int:
        """Number of threads that pay off in a step, at most those of torch."""
        busy = self.model.size * self.recipe.batch * self.examples // WORK
        return min(max(1, busy), torch.get_num_threads())

    def advance(self) -> dict[str, float] | None:
        """Take one step; return the new row of the history where one is due."""
        recipe = self.recipe
        warm = recipe.learning_rate * min(1.0, (self.step + 1) / WARM_UP)
        rate = warm * 0.5 * (1 + math.cos(math.pi * self.step / recipe.steps))
        loss = self.model.loss(self._prompts())
        self.optimizer.step(loss, rate)
        self.step += 1
        self.total += float(loss.detach())
        if self.step % recipe.evaluate_every and self.step != recipe.steps:
            return None
        since = self.step - (int(self.rows[-1]["step"]) if self.rows else 0)
        if not math.isfinite(error := self._error()):
            setting = f"step {self.step}, at learning_rate {recipe.learning_rate}"
            raise UserError(f"training has diverged by {setting}; choose a lower one")
        row = {"step": self.step, "loss": self.total / since, "rate": rate, "error": error}
        self.rows.append(row)
        self.total = 0.0
        return row

    def stopped_by(self) -> str | None:
        """Return the reason to stop, or None, from the history alone: an interruption does not change it."""
        errors, recipe = [row["error"] for row in self.rows], self.recipe
        if errors and recipe.target is not None and errors[-1] <= recipe.target:
            return "target"
        if recipe.patience is not None and errors and len(errors) - 1 - errors.index(min(errors)) >= recipe.patience:
            return "patience"
        return "steps" if self.step >= recipe.steps else None

    def table(self) -> pandas.DataFrame:
        return optional_package("pandas", "learn", "verify").DataFrame(self.rows, columns=list(COLUMNS))

    def state(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint, as tensors."""
        found = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        found |= {f"optimizer.{name}": value for name, value in self.optimizer.state().items()}
        rows = [[row[name] for name in COLUMNS] for row in self.rows]
        found["history"] = torch.tensor(rows, dtype=torch.float64).reshape(len(rows), len(COLUMNS))
        found["total"] = torch.tensor([self.total], dtype=torch.float64)
        return found

    def restore(self, state: dict[str, Tensor], step: int, spent: training_files.Spent) -> None:
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
        for name, value in state.items():
            whose, _, which = name.partition(".")
            parts.setdefault(whose, {})[which] = value
        self.model.load_state_dict(parts["model"])
        self.optimizer.restore(parts["optimizer"])
        self.rows = [dict(zip(COLUMNS, row, strict=True)) for row in state["history"].tolist()]
        for row in self.rows:
            row["step"] = int(row["step"])
        self.step, self.total, self.spent = step, float(state["total"]), spent

    def _prompts(self) -> Prompts:
        source = self.task if self.pool is None else self.pool
        return source.draw(self.recipe.batch, self.examples + 1, _generator(self.recipe.seed, self.step))

    def _error(self) -> float:
        self.model.eval()
        found = self.model.predict(self.validation)[:, -1]
        self.model.train()
        return float((found - self.validation.answers[:, -1]).double().square().mean())


def _generator(seed: int, step: int) -> torch.Generator:
    words = numpy.random.SeedSequence([seed, step]).generate_state(1, numpy.uint64)
    return torch.Generator().manual_seed(int(words[0] >> numpy.uint64(1)))


def _tensorboard(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("tensorboard is not installed; pip install tensorboard, or read history.csv") from None
    return SummaryWriter(str(folder), purge_step=step + 1)  # removes events after the checkpoint of an interrupted run


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
