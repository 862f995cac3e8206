"""Panels of training runs, and the page that shows them."""

import re
from pathlib import Path

import pytest

from massieu.checks import UserError
from massieu.figures import training_panels

pandas = pytest.importorskip("pandas")
pytest.importorskip("matplotlib")
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "watch.md").read_text(encoding="utf-8")
RUN = pandas.DataFrame({"step": [0, 1, 2], "loss": [7.0, 6.0, 13.0], "score_max": [1.0, None, 300.0]})


def test_panels_show_what_is_known_of_each_run_on_shared_axes():
    figure = training_panels({"a": RUN, "b": RUN.assign(loss=5.0)}, {"a": {"logit growth": 2}})
    loss, other, score, _ = figure.axes
    assert [axis.get_title("left") for axis in figure.axes] == ["a", "b", "", ""]
    assert loss.lines[0].get_ydata().tolist() == [7.0, 6.0, 13.0]
    assert score.lines[0].get_xdata().tolist() == [0, 2]
    assert (loss.get_yscale(), score.get_yscale()) == ("linear", "log")
    assert loss.get_ylim() == other.get_ylim()
    assert [text.get_text() for text in loss.get_legend().get_texts()] == ["logit growth"]
    assert other.get_legend() is None


def test_a_loss_that_is_not_finite_does_not_stretch_the_axis():
    figure = training_panels({"a": RUN.assign(loss=[7.0, 6.0, float("inf")])})
    assert figure.axes[0].get_ylim()[1] == pytest.approx(7.35)


def test_runs_and_marks_must_be_there():
    with pytest.raises(UserError, match="runs"):
        training_panels({})
    with pytest.raises(UserError, match="columns step, loss"):
        training_panels({"a": RUN.drop(columns="loss")})
    with pytest.raises(UserError, match="columns loss, score_max"):
        training_panels({"a": RUN, "b": RUN.drop(columns="score_max")})
    with pytest.raises(UserError, match="marks"):
        training_panels({"a": RUN}, {"c": {"divergence": 1}})


def test_the_page_shows_runs_as_they_are(capsys, tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    blocks = re.findall(r"```python\n((?:(?!```).)*)```\n\n```text\n(.*?)```", PAGE, flags=re.DOTALL)
    ((block, printed),) = [pair for pair in blocks if "training_run(" in pair[0]]
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "watch.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == printed
    assert (tmp_path / "runs.png").stat().st_size > 10_000
