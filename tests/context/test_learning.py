"""Training: errors fall, targets and patience stop it, logs are kept, and mistakes end in one sentence."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from massieu import cli
from massieu.checks import UserError
from massieu.claims.context.learned_layers import train
from massieu.context import (
    LearningRecipe,
    Linear,
    LinearModel,
    Prompts,
    Ridge,
    SoftmaxModel,
    learn,
    learning,
    models,
    optimal_linear_attention,
    shifted,
    task_named,
)
from massieu.context.context_descent import predict
from massieu.context.learner_comparison import sensitivities
from massieu.context.learning import _generator

SMALL = LearningRecipe(steps=40, batch=8, width=16, layers=1, evaluate_every=10)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(autouse=True)
def _few_tests(monkeypatch):
    monkeypatch.setattr(learning, "TESTS", 256)


@pytest.mark.usefixtures("only_training")
def test_another_seed_gives_another_history(task):
    assert not learn(task, SMALL).history.equals(learn(task, replace(SMALL, seed=1)).history)


@pytest.mark.parametrize("layout", ["pairs", "interleaved"])
@pytest.mark.usefixtures("only_training")
def test_training_lowers_the_error(layout):
    easy = task_named("linear", dim=1, noise=0.1)
    recipe = LearningRecipe(
        **{"steps": 300, "batch": 32, "layers": 2, "width": 32, "evaluate_every": 300},
        **{"learning_rate": 5e-3, "layout": layout, "examples": 4},
    )
    found = learn(easy, recipe)
    assert found.history.error.iloc[-1] < 0.75 * easy.signal  # zero, the mean function, has all of it


@pytest.mark.parametrize("layout", ["pairs", "interleaved"])
@pytest.mark.parametrize("name", ["sparse", "ridge", "quadratic", "logistic", "tree", "network", "sine"])
def test_every_task_trains(name, layout):
    found = learn(task_named(name, dim=2), replace(SMALL, steps=4, evaluate_every=2, layout=layout, pool=3))
    document = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert [row["step"] for row in document["history"]] == [2, 4]
    assert {row["condition"] for row in document["hypotheses"]} == {"pool", "novel", "shuffled"}
    assert any(row["predictor"] == "model" for row in document["curve"])


@pytest.mark.usefixtures("only_training")
def test_training_stops_at_a_target(task):
    found = learn(task, replace(SMALL, target=1e9))
    assert (found.stopped_by, found.history.step.tolist()) == ("target", [10])
    assert learn(task, replace(SMALL, target=1e-9)).stopped_by == "steps"


@pytest.mark.usefixtures("only_training")
def test_training_stops_by_patience(task):
    # A rate at which nothing is learned: the errors jump about.
    found = learn(task, replace(SMALL, steps=400, learning_rate=0.3, patience=2))
    errors = found.history.error.tolist()
    assert found.stopped_by == "patience"
    assert len(errors) < 40
    assert min(errors) == errors[-3]
    assert learn(task, replace(SMALL, learning_rate=0.3)).stopped_by == "steps"


@pytest.mark.usefixtures("only_training")
def test_training_that_diverges_is_one_sentence(task, monkeypatch):
    monkeypatch.setattr(SoftmaxModel, "loss", lambda self, prompts: torch.inf * self(prompts).sum())
    with pytest.raises(UserError, match="diverged by step 10, at learning_rate 0.004"):
        learn(task, SMALL)


def test_the_tasks_of_the_history_are_not_those_of_the_comparison(task, monkeypatch):
    monkeypatch.setattr(learning, "VALIDATION", learning.TESTS)  # as many, since another number is another draw
    compared = []
    monkeypatch.setattr(learning, "compare", lambda model, task, prompts, **options: compared.append(prompts))
    recipe = LearningRecipe(model="linear", examples=4, steps=1, batch=1, learning_rate=0.01)
    learn(task, recipe)
    validation = learning._TrainingRun(task, recipe, 4).validation
    assert validation.inputs.shape == compared[0].inputs.shape
    assert not (validation.inputs == compared[0].inputs).all(-1).any()


def test_progress_counts_the_steps(task):
    reported = []
    learn(task, SMALL, progress=lambda what, done, total: reported.append((what, done, total)))
    assert reported[:40] == [("training", step, 40) for step in range(40)]
    assert {what for what, _, _ in reported[40:]} == {"comparing"}


def test_the_command_writes_logs_and_a_page(tmp_path, capsys):
    command = ["learn", "linear", "--dim", "2", "--model", "linear", "--steps", "20", "--fitted", "0"]
    assert cli.main([*command, "--out", str(tmp_path)]) == 0
    assert "training" in capsys.readouterr().err
    names = {"checkpoint.safetensors", "learned.html", "learned.json", "history.csv"}
    assert {path.name for path in tmp_path.iterdir()} == names
    log = (tmp_path / "history.csv").read_text(encoding="utf-8").splitlines()
    assert log[0] == "step,loss,rate,error"
    assert log[1].startswith("20,")
    page = (tmp_path / "learned.html").read_text(encoding="utf-8")
    assert "Error against examples" in page
    assert "http://" not in page.replace("http://www.w3.org", "")


def test_tensorboard_that_is_not_there_is_one_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert cli.main(["learn", "linear", "--out", str(tmp_path), "--tensorboard"]) == 2
    expected = "massieu: tensorboard is not installed; pip install tensorboard, or read history.csv\n"
    assert capsys.readouterr().err == expected


@pytest.mark.usefixtures("only_training")
def test_tensorboard_shows_what_the_history_has_also_after_an_interruption(task, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def interrupt(what, done, total):
        if done == 25:
            raise KeyboardInterrupt

    recipe = replace(SMALL, evaluate_every=5)
    options = {"out": tmp_path, "checkpoint_every": 10, "tensorboard": True}
    with pytest.raises(KeyboardInterrupt):
        learn(task, recipe, **options, progress=interrupt)
    found = learn(task, recipe, **options, resume=True)
    events = EventAccumulator(str(tmp_path)).Reload()
    for name in ("loss", "rate", "error"):
        shown = events.Scalars(name)
        assert [event.step for event in shown] == found.history.step.tolist()
        assert [event.value for event in shown] == pytest.approx(found.history[name].tolist())


def test_the_gram_form_is_the_layer_itself(task):
    model = LinearModel(2, generator=generator())
    prompts = task.draw(6, 7, generator(1))
    layer = model.attention
    by_layer = predict(
        lambda tokens, lengths: tokens + layer(tokens, lengths=lengths),
        prompts.inputs[:, :-1],
        prompts.targets[:, :-1, None],
        prompts.inputs[:, -1:],
    )
    assert_close(model(prompts)[:, -1], by_layer[:, 0, 0])
    assert_close(model.loss(prompts), (by_layer[:, 0, 0] - prompts.targets[:, -1]).square().mean())


def test_the_matrix_is_the_part_that_is_linear_in_the_moment():
    model = LinearModel(3, generator=generator()).double()
    # One example x, y: only terms that are odd in y change their sign with it, and these are z^T A x.
    inputs = torch.randn(5, 2, 3, generator=generator(1), dtype=torch.float64)
    targets = torch.randn(5, 2, generator=generator(2), dtype=torch.float64)
    odd = (model(Prompts.of(inputs, targets)) - model(Prompts.of(inputs, -targets)))[:, 1] / 2
    moment = inputs[:, 0] * targets[:, :1]
    assert_close(odd, torch.einsum("ti,ij,tj->t", moment, model.matrix, inputs[:, 1]))


def test_a_linear_layer_starts_with_a_short_step_whatever_the_seed():
    for dim, seed in ((1, 0), (3, 325), (8, 2)):
        model = LinearModel(dim, generator=generator(seed)).double()
        assert_close(model.matrix, torch.eye(dim, dtype=torch.float64) / 16, rtol=0, atol=1e-7)
    assert not torch.equal(
        LinearModel(3, generator=generator(0)).attention.k_proj.weight, model.attention.k_proj.weight
    )


def test_mirrored_tasks_have_no_gradient_out_of_either_set_of_rank_one_and_full_rank():
    model = LinearModel(3, generator=generator()).double()
    values, keys = model.attention.v_proj.weight, model.attention.k_proj.weight
    prompts = Linear(3, noise=0.5).draw(64, 7, generator(1), torch.float64)

    def slopes():
        loss = model.loss(prompts) + model.loss(Prompts.of(prompts.inputs, -prompts.targets))
        return torch.autograd.grad(loss, [values, keys])

    for_values, for_keys = slopes()
    assert for_values[:, :-1].abs().max() < 1e-12 < for_values[:, -1].abs().max()
    assert for_keys[:, -1].abs().max() < 1e-12 < for_keys[:, :-1].abs().max()
    with torch.no_grad():
        values[:, :-1], keys[:, -1] = keys[:, :-1].clone(), values[:, -1].clone()
        values[:, -1], keys[:, :-1] = 0, 0
    for_values, for_keys = slopes()
    assert for_values[:, -1].abs().max() < 1e-12 < for_values[:, :-1].abs().max()
    assert for_keys[:, :-1].abs().max() < 1e-12 < for_keys[:, -1].abs().max()
    assert torch.linalg.matrix_rank(model.matrix, atol=1e-9) == 1


def test_a_linear_layer_reaches_the_optimum_from_a_start_that_once_ended_at_rank_one():
    task = Linear(3, noise=0.5, covariance=[2.0, 1.0, 0.5])
    best = optimal_linear_attention(task.covariance, task.prior, noise=0.5, examples=6)
    model = train(task, 6, 400, 128, generator(325))
    assert best.loss_of(model.matrix.detach()) < 1.02 * best.loss


def test_the_loss_is_the_mean_error_and_its_gradient_that_of_a_likelihood(task):
    model = SoftmaxModel(2, width=16, layers=1, generator=generator()).double()
    prompts = task.draw(6, 5, generator(1), torch.float64)
    errors = (model(prompts) - prompts.targets).square().mean(0)
    weights = list(model.parameters())
    assert_close(model.loss(prompts), errors.mean())
    ours = torch.autograd.grad(model.loss(prompts), weights)
    logs = torch.autograd.grad(errors.log().mean(), weights, retain_graph=True)
    for mine, theirs in zip(ours, logs, strict=True):
        assert_close(mine, errors.mean().detach() * theirs)
    plain = torch.autograd.grad(errors.mean(), weights)
    assert not torch.allclose(ours[0], plain[0])


@pytest.mark.parametrize("layout", ["pairs", "interleaved"])
def test_a_prediction_does_not_see_its_own_target(task, layout):
    model = SoftmaxModel(2, layout=layout, width=16, layers=2, generator=generator())
    prompts = task.draw(3, 6, generator(1))
    other = torch.cat([prompts.targets[:, :3], prompts.targets[:, 3:] + 5], 1)
    before, after = model(prompts), model(Prompts.of(prompts.inputs, other))
    assert_close(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_the_sensitivity_of_ridge_is_its_weight_vector(task):
    prompts = task.draw(4, 6, generator(3), torch.float64)
    x, y = prompts.inputs[:, :-1], prompts.targets[:, :-1, None]
    weights = torch.linalg.solve(x.mT @ x + 0.25 * torch.eye(2, dtype=torch.float64), x.mT @ y)[..., 0]
    assert_close(sensitivities(Ridge(0.25), prompts), weights)


def test_steps_and_seeds_draw_different_data():
    first = {int(torch.randint(2**40, (1,), generator=_generator(s, k))) for s in range(10) for k in range(10)}
    assert len(first) == 100


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["linear", "--dim", "0"], "dim must be a whole number of at least 1, got 0"),
        (["linear", "--noise", "9"], "noise must have at most the variance of the signal"),
        (["lineal"], "task must be one of"),
        (["linear", "--model", "cubic"], "model must be one of"),
        (["linear", "--layout", "rows"], "layout must be one of"),
        (["linear", "--resume"], "need the folder of the run"),
        (["linear", "--resume", "--out", "{tmp}/none"], "to resume from"),
        (["linear", "--out", "{tmp}/file/run"], "must be a folder, and there is a file in its place"),
        (["linear", "--out", "{tmp}/file"], "must be a folder, and there is a file in its place"),
        (["linear", "--target", "-1"], "target must be finite and larger than 0"),
        (["linear", "--noise", "-1"], "noise must be finite and at least 0, got -1.0"),
        (["logistic", "--noise", "0.1"], "the noise of logistic is in its labels, got --noise 0.1; leave it out"),
        (["linear", "--model", "linear", "--layout", "pairs"], "without layout, width, layers or heads, got layout="),
        (["linear", "--examples", "100000000000"], "not enough memory for --dim 5, --examples 100000000000; lower"),
        (["linear", "--pool", "1000000000000"], "not enough memory for --dim 5, --pool 1000000000000; lower"),
        (["linear", "--dim", "10000000"], "not enough memory for --dim 10000000; lower"),
    ],
)
def test_bad_input_is_one_sentence(arguments, sentence, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(["learn", *(each.replace("{tmp}", str(tmp_path)) for each in arguments)]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.startswith("massieu: ")
    assert error.count("\n") == 1


POSITIVE = ("--steps", "--examples", "--pool", "--patience", "--checkpoint-every")


@pytest.mark.parametrize(
    ("option", "value", "kind"),
    [
        *((option, value, "a positive whole number") for option in POSITIVE for value in ("0", "-3", "x")),
        *(("--dim", "1.5", "a whole number"), ("--noise", "x", "a number"), ("--target", "x", "a number")),
    ],
)
def test_an_option_that_is_no_such_number(option, value, kind, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["learn", "linear", option, value])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert f"{option}: expected {kind}, got {value}; see massieu learn --help" in error
    assert error.count("\n") == 1


BAD = {"steps": -1, "batch": 0, "learning_rate": 0.0, "pool": 0, "width": 0, "layout": "rows", "model": "cubic"}


@pytest.mark.parametrize(("name", "value"), BAD.items())
def test_bad_options_in_python(name, value):
    with pytest.raises(UserError, match=name):
        LearningRecipe(**{name: value})


def test_a_linear_layer_has_no_options_of_a_transformer():
    with pytest.raises(UserError, match="heads=2"):
        LearningRecipe(model="linear", heads=2)


@pytest.mark.parametrize(("name", "value"), {"checkpoint_every": 0, "out": "", "resume": True}.items())
def test_bad_options_of_files(task, name, value):
    with pytest.raises(UserError, match=name):
        learn(task, SMALL, **{name: value})


@pytest.mark.parametrize("shift", ["skew", "quadrants"])
def test_shifts_are_for_prompts_after_training(task, shift):
    with pytest.raises(UserError, match="task"):
        learn(shifted(task, shift), LearningRecipe(model="linear"))


def test_the_loss_of_a_linear_layer_is_at_its_query_wherever_that_is(task):
    model = LinearModel(2, generator=generator()).double()
    prompts = shifted(task, "quadrants").draw(50, 6, generator(1), torch.float64)
    expected = (model(prompts)[:, -1] - prompts.answers[:, -1]).square().mean()
    assert_close(model.loss(prompts), expected)


def test_a_model_that_is_asked_in_parts_gives_the_same(task, monkeypatch):
    prompts = task.draw(10, 6, generator(1), torch.float64)
    for model in (LinearModel(2, generator=generator()), SoftmaxModel(2, generator=generator())):
        whole, parts = model.double()(prompts), []
        monkeypatch.setattr(models, "TOGETHER", 3)
        monkeypatch.setattr(type(model), "forward", counted(type(model).forward, parts))
        assert_close(model.predict(prompts), whole)
        assert parts == [3, 3, 3, 1]


def counted(forward, parts):
    def call(self, prompts):
        parts.append(prompts.tasks)
        return forward(self, prompts)

    return call


def test_inputs_without_extent_in_a_direction_have_no_closed_form_but_a_result():
    found = learn(task_named("linear", dim=2, covariance=[1.0, 0.0]), LearningRecipe(model="linear", steps=3, batch=4))
    assert found.comparison.matrices is None
    assert found.comparison.curve.error.notna().all()


def test_a_package_that_the_comparison_needs_is_missed_before_training(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    reported = []
    with pytest.raises(ImportError, match="the comparison after training needs scikit-learn, which is not installed"):
        learn(task_named("tree", dim=2), SMALL, progress=lambda *what: reported.append(what))
    assert not reported


def test_several_outputs_are_refused():
    with pytest.raises(UserError, match="task"):
        learn(task_named("linear", dim=2, outputs=2), SMALL)


@pytest.mark.usefixtures("only_training")
@pytest.mark.parametrize(("batch", "threads"), [(64, 1), (512, 2)])
def test_a_small_step_has_one_thread(batch, threads, monkeypatch):
    had, advance = [], learning._TrainingRun.advance

    def watched(run):
        had.append(torch.get_num_threads())
        return advance(run)

    monkeypatch.setattr(learning._TrainingRun, "advance", watched)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        learn(task_named("linear", dim=5), LearningRecipe(steps=1, batch=batch))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert had == [threads]
