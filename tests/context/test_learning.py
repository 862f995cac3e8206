"""Training resumes bit for bit, stops when told, and says in one sentence what is wrong."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch.testing import assert_close

from massieu import cli
from massieu.context import LinearModel, Ridge, SoftmaxModel, draw_pool, learn, predict, separate, task_named
from massieu.context.comparison import sensitivities
from massieu.context.learning import _generator

SMALL = {"steps": 40, "batch": 8, "width": 16, "layers": 1, "evaluate_every": 10, "checkpoint_every": 10}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def task():
    return task_named("linear", dim=2, noise=0.5)


class StoppedError(Exception):
    pass


def stop_at(step):
    def progress(what, done, total):
        if done == step:
            raise StoppedError

    return progress


@pytest.mark.parametrize("model", ["softmax", "linear"])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(task, tmp_path, model):
    whole = learn(task, model=model, **SMALL)
    with pytest.raises(StoppedError):
        learn(task, model=model, **SMALL, out=tmp_path, progress=stop_at(25))
    resumed_from = []
    resumed = learn(
        task, model=model, **SMALL, out=tmp_path, resume=True, progress=lambda _, done, total: resumed_from.append(done)
    )
    assert resumed_from[0] == 20
    assert resumed.history.equals(whole.history)
    assert resumed.comparison.curve.equals(whole.comparison.curve)
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_another_seed_gives_another_history(task):
    assert not learn(task, **SMALL).history.equals(learn(task, **SMALL, seed=1).history)


def test_a_checkpoint_between_two_measurements_keeps_the_loss_so_far(task, tmp_path):
    options = {**SMALL, "evaluate_every": 20, "checkpoint_every": 15}
    with pytest.raises(StoppedError):
        learn(task, **options, out=tmp_path, progress=stop_at(16))
    resumed = learn(task, **options, out=tmp_path, resume=True)
    assert resumed.history.equals(learn(task, **options).history)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs a signal that cannot be caught")
def test_a_killed_process_leaves_a_checkpoint_to_go_on_from(task, tmp_path):
    code = (
        "from massieu.context import learn, task_named\n"
        f"learn(task_named('linear', dim=2, noise=0.5), **{ {**SMALL, 'steps': 4000} }, out={str(tmp_path)!r})"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 120
    while not (tmp_path / "checkpoint.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    options = {**SMALL, "steps": 4000, "target": None}
    with pytest.raises(StoppedError):  # it is whole, and training goes on from a later step than the first
        learn(task, **options, out=tmp_path, resume=True, progress=lambda _, done, total: _stop_after(done))


def _stop_after(done):
    assert done >= 10
    assert done % 10 == 0
    raise StoppedError


def test_an_interrupted_command_says_how_to_go_on(monkeypatch, tmp_path, capsys):
    import massieu.context.learning as learning

    advance = learning._Run.advance

    def interrupted(run):
        if run.step == 15:
            raise KeyboardInterrupt
        return advance(run)

    monkeypatch.setattr(learning._Run, "advance", interrupted)
    command = [
        "learn",
        "linear",
        "--dim",
        "2",
        "--steps",
        "20",
        "--checkpoint-every",
        "10",
        "--out",
        str(tmp_path),
        "-q",
    ]
    assert cli.main(command) == 130
    assert "--resume goes on" in capsys.readouterr().err
    monkeypatch.setattr(learning._Run, "advance", advance)
    assert cli.main([*command, "--resume"]) == 0
    assert {"learned.html", "learned.json", "history.csv"} <= {path.name for path in tmp_path.iterdir()}
    page = (tmp_path / "learned.html").read_text(encoding="utf-8")
    assert "Error against examples" in page
    assert "http://" not in page.replace("http://www.w3.org", "")


def test_training_stops_at_a_target_and_by_patience(task):
    assert learn(task, **SMALL, target=1e9).history.step.tolist() == [10]
    found = learn(task, **{**SMALL, "steps": 400}, patience=1)
    errors = found.history.error.tolist()
    assert found.ended in ("patience", "steps")
    if found.ended == "patience":
        assert errors[-1] >= min(errors[:-1])


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
    from massieu.context import Prompts

    odd = (model(Prompts.of(inputs, targets)) - model(Prompts.of(inputs, -targets)))[:, 1] / 2
    moment = inputs[:, 0] * targets[:, :1]
    assert_close(odd, torch.einsum("ti,ij,tj->t", moment, model.matrix, inputs[:, 1]))


@pytest.mark.parametrize("layout", ["pairs", "interleaved"])
def test_a_prediction_does_not_see_its_own_target(task, layout):
    model = SoftmaxModel(2, layout=layout, width=16, layers=2, generator=generator())
    prompts = task.draw(3, 6, generator(1))
    other = torch.cat([prompts.targets[:, :3], prompts.targets[:, 3:] + 5], 1)
    from massieu.context import Prompts

    before, after = model(prompts), model(Prompts.of(prompts.inputs, other))
    assert_close(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_the_sensitivity_of_ridge_is_its_weight_vector(task):
    prompts = task.draw(4, 6, generator(3), torch.float64)
    x, y = prompts.inputs[:, :-1], prompts.targets[:, :-1, None]
    weights = torch.linalg.solve(x.mT @ x + 0.25 * torch.eye(2, dtype=torch.float64), x.mT @ y)[..., 0]
    assert_close(sensitivities(Ridge(0.25), prompts), weights)


def test_a_learner_and_a_retriever_are_told_apart():
    task = task_named("linear", dim=3, noise=0.3)
    pool = draw_pool(task, 4, generator())
    learner = separate(Ridge(0.09), task, pool, 6, generator(1)).set_index("condition")
    retriever = separate(pool.predict, task, pool, 6, generator(1)).set_index("condition")
    assert set(learner.follows) == {"learning"}
    assert set(retriever.follows) == {"retrieval"}
    assert retriever.retrieval_error["pool"] < 0.1 * retriever.retrieval_error["novel"]
    assert learner.learning_error["novel"] < 0.1 * learner.retrieval_error["novel"]
    assert learner.to_retrieval["shuffled"] > 0.1


def test_retrieval_is_bayes_over_the_pool_written_as_a_loop():
    task = task_named("linear", dim=2, noise=0.5)
    pool = draw_pool(task, 3, generator())
    prompts = pool.draw(4, 5, generator(1))
    w, found = pool.parameters["weights"], pool.predict(prompts)
    for t in range(4):
        for i in range(5):
            logs = [
                -sum((prompts.targets[t, j] - w[k] @ prompts.inputs[t, j]) ** 2 for j in range(i)) / 0.5
                for k in range(3)
            ]
            p = torch.softmax(torch.tensor([float(x) for x in logs]), 0)
            assert_close(found[t, i], p @ (w @ prompts.inputs[t, i]), rtol=1e-4, atol=1e-5)


def test_steps_and_seeds_draw_different_data():
    first = {int(torch.randint(2**40, (1,), generator=_generator(s, k))) for s in range(10) for k in range(10)}
    assert len(first) == 100


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["linear", "--dim", "0"], "dim must be an integer of at least 1, got 0"),
        (["linear", "--noise", "9"], "noise must have at most the variance of the signal"),
        (["lineal"], "task must be one of"),
        (["linear", "--model", "cubic"], 'model must be "softmax" or "linear"'),
        (["linear", "--layout", "rows"], 'layout must be "interleaved" or "pairs"'),
        (["linear", "--resume"], "need the folder of the run"),
        (["linear", "--resume", "--out", "{tmp}/none"], "to resume from"),
        (["linear", "--out", "{tmp}/file/run"], "cannot be written to"),
        (["linear", "--target", "-1"], "target must be positive"),
    ],
)
def test_bad_input_is_one_sentence(arguments, sentence, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(["learn", *(each.replace("{tmp}", str(tmp_path)) for each in arguments)]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.startswith("massieu: ")
    assert error.count("\n") == 1


def test_a_checkpoint_of_another_task_or_recipe_is_refused(task, tmp_path):
    learn(task, **SMALL, out=tmp_path)
    with pytest.raises(ValueError, match="of another task, with dim 2, got 3"):
        learn(task_named("linear", dim=3, noise=0.5), **SMALL, out=tmp_path, resume=True, examples=4)
    with pytest.raises(ValueError, match="of another recipe, with seed 0, got 1"):
        learn(task, **SMALL, seed=1, out=tmp_path, resume=True)
    with pytest.raises(ValueError, match="holds a checkpoint.safetensors already"):
        learn(task, **SMALL, out=tmp_path)
    (tmp_path / "checkpoint.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="is no checkpoint of massieu learn"):
        learn(task, **SMALL, out=tmp_path, resume=True)
