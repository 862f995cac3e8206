"""Train a model to learn in a context, with checkpoints from which it goes on bit for bit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

from massieu.checks import UserError
from massieu.context import checkpoints
from massieu.context.baselines import learner_for
from massieu.context.comparison import CLOSED_FORM, Comparison, affordable, compare
from massieu.context.duration import why_too_short
from massieu.context.extras import imported
from massieu.context.hypotheses import separate
from massieu.context.models import ContextModel, LinearModel, SoftmaxModel
from massieu.context.optimizer import JointAdamW
from massieu.context.pools import draw_pool
from massieu.context.prompts import Prompts
from massieu.context.recipes import SHAPE, Model, Recipe, Tokens
from massieu.context.robustness import errors_under_shifts
from massieu.context.tasks import Task
from massieu.context.tasks.shifts import Shifted
from massieu.kernels.threads import torch_threads
from massieu.measures.measure import as_integer

if TYPE_CHECKING:
    import pandas

__all__ = ["Learned", "learn"]

Progress = Callable[[str, int, int], object]
COLUMNS = ("step", "loss", "rate", "error")
WARM_UP = 100  # steps until the rate is whole
TESTS = 20480  # tasks of the comparison at the end, at most
GLANCE = 1024  # tasks of the history, others than these: training may stop by their error
WORK = 10**8  # weights times tokens of a step for each thread: with less they wait for each other
UNSEEN = 2**40  # numbers of steps from here on seed what is not training


@dataclass(frozen=True)
class Learned:
    """A trained model and how it compares.

    Attributes:
        model: in evaluation mode; call it with prompts.
        history: a row for each measurement: step, mean training loss since the one before, rate, and the error after
            all examples on tasks that neither training nor the comparison sees.
        comparison: error against examples beside predictors, sensitivities, and the learned matrix beside the best.
        shifts: errors on prompts out of distribution, see :func:`massieu.context.errors_under_shifts`.
        hypotheses: retrieval against learning, see :func:`massieu.context.separate`.
        ended: "steps", "patience" or "target".
        facts: task, recipe, number of weights, seconds of training up to its end, those before a resumed checkpoint
            included.
    """

    model: ContextModel
    history: pandas.DataFrame
    comparison: Comparison
    shifts: pandas.DataFrame
    hypotheses: pandas.DataFrame
    ended: str
    facts: dict[str, Any] = field(repr=False)

    @property
    def too_short(self) -> str | None:
        """Sentence on a run whose steps were used up while its error still fell; None if it was long enough."""
        if self.ended != "steps":
            return None
        names = self.comparison.curve["predictor"].unique()
        attainable = next((name for name in names if name == CLOSED_FORM), None)
        pooled = self.facts["recipe"]["pool"] is not None
        return why_too_short(self.history, self.comparison.curve, attainable=attainable, is_pooled=pooled)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the weights, as JSON takes it; what is not finite is None."""
        tables = {
            "history": self.history,
            "shifts": self.shifts,
            "hypotheses": self.hypotheses,
            **self.comparison.tables(),
        }
        rows = {name: [_finite(row) for row in table.to_dict("records")] for name, table in tables.items()}
        return {
            "facts": {**self.facts, "ended": self.ended, "too_short": self.too_short},
            **rows,
            **self.comparison.figures(),
        }


def learn(
    task: Task,
    *,
    model: Model = "softmax",
    layout: Tokens | None = None,
    examples: int | None = None,
    steps: int | None = None,
    batch: int | None = None,
    rate: float | None = None,
    seed: int = 0,
    pool: int | None = None,
    width: int | None = None,
    layers: int | None = None,
    heads: int | None = None,
    evaluate_every: int = 100,
    patience: int | None = None,
    target: float | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    checkpoint_every: int = 100,
    tensorboard: bool = False,
    fitted: int = 0,
    progress: Progress | None = None,
) -> Learned:
    r"""Train a model from scratch to predict :math:`f(x_{n+1})` from n examples of f, for f drawn from a task.

    The data of step k come from a generator seeded by ``(seed, k)``, so that weights, moments of the optimizer and the
    number of steps are all that a checkpoint must hold, and a run that was killed goes on as if it had not been.

    Args:
        task: what is learned, such as ``task_named("linear", dim=5, noise=0.5)``.
        examples: before the last query; twice the dimension by default.
        model, layout, steps, batch, rate, seed, pool, width, layers, heads, evaluate_every, patience, target: see
            :class:`Recipe`; steps, batch and rate have defaults for each model, the shape has some for transformers.
        out: folder of ``checkpoint.safetensors`` and ``history.csv``; None writes nothing.
        resume: go on from the checkpoint in ``out``.
        checkpoint_every: steps between two checkpoints, the most that a kill may cost.
        tensorboard: also write events for TensorBoard to ``out``.
        fitted: tasks for predictors that are fitted to each prefix, see :func:`massieu.context.compare`.
        progress: called with what is done, the number of steps, and of all.

    Source:
        Garg et al. 2022 for the task; pair tokens, ReLU and no positions since they need a fifth of the time.

    Example:
        >>> from massieu.context import task_named
        >>> found = learn(task_named("linear", dim=2, noise=0.5), model="linear", steps=300, batch=256)
        >>> found.ended, bool(found.comparison.best_cosine > 0.9)
        ('steps', True)
    """
    linear = model == "linear"
    shape: dict[str, Any] = {"layout": layout, "width": width, "layers": layers, "heads": heads}
    if not linear:
        shape = {name: SHAPE[name] if value is None else value for name, value in shape.items()}
    recipe = Recipe(
        model=model,
        **shape,
        examples=2 * task.dim if examples is None else examples,
        steps=(3000 if linear else 9000) if steps is None else steps,
        batch=(1024 if linear else 64) if batch is None else batch,
        rate=(1e-2 if linear else 4e-3) if rate is None else rate,
        seed=seed,
        pool=pool,
        evaluate_every=evaluate_every,
        patience=patience,
        target=target,
    )
    as_integer(checkpoint_every, "checkpoint_every", least=1)
    if out is None and (resume or tensorboard):
        raise UserError("resume and tensorboard need a folder, got out=None; pass the folder of the run")
    if out is not None and not str(out):
        raise UserError("out must name a folder, got an empty name; '.' is the current folder")
    needed = "sklearn" if fitted else learner_for(task, recipe.examples).needs
    if needed is not None:
        imported(needed, "the comparison after training")  # now rather than then
    run = _Run(task, recipe)
    identity = {"task": checkpoints.described(task), "recipe": asdict(recipe)}
    folder = None if out is None else Path(out)
    if folder is not None:
        checkpoints.check_folder(folder, resume)
    with checkpoints.claimed(folder), torch_threads(run.threads):
        ended = _train(run, identity, folder, resume, checkpoint_every, tensorboard, progress)
    facts = {
        **identity,
        "parameters": run.model.size,
        "seconds": round(run.spent[0], 1),
        "cpu_seconds": round(run.spent[1], 1),
    }
    if progress is not None:
        progress("comparing", 0, 0)
    run.model.eval()
    tests = task.draw(min(TESTS, affordable(task.dim, recipe.examples)), recipe.examples + 1, _generator(seed, UNSEEN))
    shifts = errors_under_shifts(run.model, task, recipe.examples, _generator(seed, UNSEEN + 5))
    hypotheses = separate(run.model.ask, task, run.pool, recipe.examples, _generator(seed, UNSEEN + 1))
    comparison = compare(run.model, task, tests, fitted=fitted, progress=progress)
    return Learned(run.model, run.table(), comparison, shifts, hypotheses, ended, facts)


def _train(
    run: _Run,
    identity: dict[str, Any],
    folder: Path | None,
    resume: bool,
    checkpoint_every: int,
    tensorboard: bool,
    progress: Progress | None,
) -> str:
    """All steps that are left, with checkpoints and logs; why they ended."""

    def log() -> None:
        if folder is not None:
            checkpoints.write_text(folder / "history.csv", run.table().to_csv(index=False))

    if folder is not None and resume:
        run.restore(*checkpoints.read(folder, identity))
        log()  # a kill may have come between a checkpoint and its log
    writer = _tensorboard(folder, run.step) if tensorboard and folder is not None else None
    before, begin, cpu = run.spent, time.perf_counter(), time.process_time()
    while (ended := run.ended()) is None:
        if progress is not None:
            progress("training", run.step, run.recipe.steps)
        row = run.advance()
        run.spent = (before[0] + time.perf_counter() - begin, before[1] + time.process_time() - cpu)
        if row is not None and writer is not None:
            for name in COLUMNS[1:]:
                writer.add_scalar(name, row[name], run.step)
        if folder is not None and (run.step % checkpoint_every == 0 or run.ended() is not None):
            checkpoints.write(folder, run.state(), run.step, run.spent, identity)
            log()
    if writer is not None:
        writer.close()
    return ended


class _Run:
    """Everything that changes in training, and the steps that change it."""

    def __init__(self, task: Task, recipe: Recipe):
        if getattr(task, "outputs", None) is not None:
            raise UserError(f"task must have plain targets, got outputs={task.outputs}; train one function at a time")  # type: ignore[attr-defined]
        if isinstance(task, Shifted):
            raise UserError(
                f"task must be one that prompts are drawn from as they are, got the shift {type(task).__name__}; train"
                " on the task inside it, and ask the model about shifted prompts after that"
            )
        self.task, self.recipe = task, recipe
        weights = _generator(recipe.seed, UNSEEN + 2)
        self.model: ContextModel
        if recipe.model == "linear":
            self.model = LinearModel(task.dim, generator=weights)
        else:
            shape = {name: getattr(recipe, name) for name in SHAPE}
            self.model = SoftmaxModel(task.dim, **shape, generator=weights)
        self.optimizer = JointAdamW(self.model)
        self.pool = None if recipe.pool is None else draw_pool(task, recipe.pool, _generator(recipe.seed, UNSEEN + 3))
        self.glance = task.draw(GLANCE, recipe.examples + 1, _generator(recipe.seed, UNSEEN + 4))
        self.step, self.rows, self.total = 0, [], 0.0  # type: ignore[var-annotated]
        self.spent: checkpoints.Spent = (0.0, 0.0)

    @property
    def threads(self) -> int:
        """Of those that torch has, as many as have something to do in a step."""
        busy = self.model.size * self.recipe.batch * self.recipe.examples // WORK
        return min(max(1, busy), torch.get_num_threads())

    def advance(self) -> dict[str, float] | None:
        """One step; the new row of the history where one is due."""
        recipe = self.recipe
        rate = (
            recipe.rate * min(1.0, (self.step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * self.step / recipe.steps))
        )
        loss = self.model.loss(self._prompts())
        self.optimizer.step(loss, rate)
        self.step += 1
        self.total += float(loss.detach())
        if self.step % recipe.evaluate_every and self.step != recipe.steps:
            return None
        since = self.step - (int(self.rows[-1]["step"]) if self.rows else 0)
        if not math.isfinite(error := self._error()):
            raise UserError(f"training has diverged by step {self.step}, at rate {recipe.rate}; choose a lower rate")
        row = {"step": self.step, "loss": self.total / since, "rate": rate, "error": error}
        self.rows.append(row)
        self.total = 0.0
        return row

    def ended(self) -> str | None:
        """Why training is over, from the history alone, so that it does not matter where it was interrupted."""
        errors, recipe = [row["error"] for row in self.rows], self.recipe
        if errors and recipe.target is not None and errors[-1] <= recipe.target:
            return "target"
        if recipe.patience is not None and errors and len(errors) - 1 - errors.index(min(errors)) >= recipe.patience:
            return "patience"
        return "steps" if self.step >= recipe.steps else None

    def table(self) -> pandas.DataFrame:
        return imported("pandas", "learn").DataFrame(self.rows, columns=list(COLUMNS))

    def state(self) -> dict[str, Tensor]:
        """All that the rest of the run depends on, as tensors."""
        found = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        found |= {f"optimizer.{name}": value for name, value in self.optimizer.state().items()}
        rows = [[row[name] for name in COLUMNS] for row in self.rows]
        found["history"] = torch.tensor(rows, dtype=torch.float64).reshape(len(rows), len(COLUMNS))
        found["total"] = torch.tensor([self.total], dtype=torch.float64)
        return found

    def restore(self, state: dict[str, Tensor], step: int, spent: checkpoints.Spent) -> None:
        """Go on from a state."""
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
        generator, count, examples = _generator(self.recipe.seed, self.step), self.recipe.batch, self.recipe.examples
        if self.pool is None:
            return self.task.draw(count, examples + 1, generator)
        return self.pool.draw(count, examples + 1, generator)

    def _error(self) -> float:
        self.model.eval()
        found = self.model.ask(self.glance)[:, -1]
        self.model.train()
        return float((found - self.glance.answers[:, -1]).double().square().mean())


def _generator(seed: int, step: int) -> torch.Generator:
    words = numpy.random.SeedSequence([seed, step]).generate_state(1, numpy.uint64)
    return torch.Generator().manual_seed(int(words[0] >> numpy.uint64(1)))


def _tensorboard(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("tensorboard is not installed; pip install tensorboard, or read history.csv") from None
    return SummaryWriter(str(folder), purge_step=step + 1)  # what an interrupted run wrote after its checkpoint goes


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
