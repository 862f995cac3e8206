"""The page of a training run and its charts, as text."""

import re

import pytest
from report.learned import EVIL, learned

from massieu.report.charts import Line, chart, cloud, matrix_map
from massieu.report.learning_page import render_learning


def places(figure, name):
    """The centers of the points of a line."""
    group = re.search(rf'<g class="series[^>]*>(?:(?!</g>).)*<title>{re.escape(name)}, .*?</g>', figure).group()
    return [(float(x), float(y)) for x, y in re.findall(r'cx="([-\d.]+)" cy="([-\d.]+)"', group)]


def test_every_predictor_has_a_line_a_button_and_a_row():
    page = render_learning(learned())
    for name in ("model", "ridge (Bayes)", "least squares", "gradient step", "tree"):
        assert f"</i>{name}</button>" in page
        assert f'<th scope="row">{name}</th>' in page
        assert f"<title>{name}, 4: " in page


def test_the_head_says_how_far_the_model_is_from_the_best_predictor_and_what_it_resembles():
    page = render_learning(learned())
    assert "squared error of 0.3 after 4 examples, 1.20 times that of ridge (Bayes). Its sensitivities" in page
    assert "nearest to those of ridge (Bayes): mean cosine 0.9000" in page


def test_the_nearest_predictor_has_an_interval_and_its_distance_to_the_next():
    page = render_learning(learned())
    assert "nearest to those of ridge (Bayes): mean cosine 0.9000 ± 0.002." in page
    assert "The next is least squares (behind by 0.05 ± 0.003)." in page


def test_predictors_that_cannot_be_told_apart_are_both_named():
    document = learned()
    for row in document["sensitivities"]:
        row["behind_error"] = 0.04
    page = render_learning(document)
    assert "It cannot be distinguished from least squares (behind by 0.05 ± 0.04)." in page
    assert "The next is gradient step (behind by 0.1 ± 0.04)." in page


def test_differences_of_cosines_by_rounding_are_none():
    document = learned()
    for row in document["sensitivities"]:
        row |= {"behind": row["behind"] * 1e-7, "behind_error": 1e-12}
    page = render_learning(document)
    assert "It cannot be distinguished from least squares" in page
    assert "The next is" not in page


def test_a_run_that_was_too_short_is_said_in_its_head():
    document = learned()
    assert "too short" not in render_learning(document)
    document["facts"]["too_short"] = "The run was too short: <b>."
    assert "The run was too short: &lt;b&gt;." in render_learning(document).split('<section id="errors">')[0]


def test_a_share_of_learning_has_its_standard_error():
    document = learned(pool=4)
    assert re.search(r"0\.8[78] ± 0\.01\d*</td>", render_learning(document))


def test_what_was_measured_on_few_tasks_is_dashed_and_said():
    page = render_learning(learned())
    assert "on 64 tasks (tree)" in page
    assert re.search(r'<button [^>]*class="series dashed"[^>]*><i></i>tree', page)
    assert not re.search(r'<button [^>]*class="series dashed"[^>]*><i></i>least squares', page)


def test_an_error_that_explodes_does_not_flatten_the_other_lines():
    page = render_learning(learned())
    heights = [y for _, y in places(page, "model")]
    assert max(heights) - min(heights) > 150
    assert min(y for _, y in places(page, "least squares")) < 0


def test_matrices_are_shown_for_a_linear_layer_only():
    assert 'id="matrices"' not in render_learning(learned())
    page = render_learning(learned("linear"))
    assert "learned − closed form" in page
    assert "row 0, column 1: -0.125" in page
    assert "1.00 percent more" in page


def test_retrieval_has_its_columns_where_a_pool_was_trained():
    assert "of retrieval" not in render_learning(learned())
    assert "nothing to retrieve" in render_learning(learned())
    page = render_learning(learned(pool=4))
    assert "of retrieval" in page
    assert "Training saw 4 functions only" in page


def test_a_verdict_that_cannot_be_given_is_explained():
    document = learned(pool=4)
    assert "Undecided" not in render_learning(document)
    document["hypotheses"][1] |= {"follows": "undecided", "share": None, "learner": "tree"}
    page = render_learning(document)
    assert "<td>undecided</td>" in page
    assert "Undecided: ridge (Bayes) is not the best predictor of this class" in page
    assert re.search(r"Measured on 2\W048 tasks", page)


def test_shifted_prompts_have_a_row_each():
    page = render_learning(learned())
    row = page.split('<th scope="row">scale 3</th>')[1].split("</tr>")[0]
    assert [float(cell) for cell in re.findall(r'<td class="n"[^>]*>([\d.]+)</td>', row)] == [4, 4.5, 2.25, 45, 2, 512]
    assert 'id="shifts"' not in render_learning({**learned(), "shifts": []})


def test_numbers_of_examples_that_are_left_out_are_said():
    document = learned()
    assert "numbers of examples. Press" not in render_learning(document)
    document["curve"] = [row for row in document["curve"] if row["examples"] != 1]
    assert "after 4 of 5 numbers of examples. Press" in render_learning(document)


def test_names_are_escaped():
    page = render_learning(learned(name=EVIL))
    assert EVIL not in page
    assert "&lt;script&gt;window.hacked" in page


def test_a_matrix_that_is_the_identity_is_called_so():
    document = learned()
    assert "<dd>identity</dd>" in render_learning(document)
    document["facts"]["task"]["covariance"] = [[2.0, 0.5], [0.5, 1.0]]
    assert "<dd>2 0.5; 0.5 1</dd>" in render_learning(document)


def test_a_logarithmic_chart_leaves_out_what_is_not_positive():
    figure = chart([Line("a", [0, 1, 2, 3], [1.0, 0.0, None, 10.0])], "x", "y", log_y=True)
    assert len(places(figure, "a")) == 2
    assert chart([Line("a", [0], [0.0])], "x", "y", log_y=True) == ""


def test_places_of_points_are_those_of_the_axes():
    figure = chart([Line("a", [0, 5, 10], [1.0, 10.0, 100.0])], "x", "y", log_y=True)
    (x0, y0), (x1, y1), (x2, y2) = places(figure, "a")
    assert x1 - x0 == pytest.approx(x2 - x1)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    ticks = dict(re.findall(r'<text x="54" y="([-\d.]+)" text-anchor="end">([\d.]+)<', figure))
    assert {value: float(y) - 4 for y, value in ticks.items()}["10"] == pytest.approx(y1, abs=0.1)


def test_a_name_has_the_same_color_in_two_charts():
    def color(figure, name):
        return re.search(rf'style="([^"]*)"><i></i>{name}<', figure).group(1)

    page = render_learning(learned())
    errors, cosines = (page.split(f'<section id="{name}">')[1] for name in ("errors", "sensitivities"))
    for name in (r"ridge \(Bayes\)", "gradient step"):
        assert color(errors.split("</section>")[0], name) == color(cosines, name)
    lines = [Line("a", [0, 1], [1.0, 2.0]), Line("b", [0, 1], [1.0, 2.0]), Line("c", [0, 1], [1.0, 2.0], color=1)]
    assert color(chart(lines, "x", "y"), "b") == color(chart(lines, "x", "y"), "c")
    assert color(chart(lines, "x", "y"), "a") != color(chart(lines, "x", "y"), "b")


def test_a_cloud_of_equal_coordinates_lies_on_its_diagonal():
    dots = re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', cloud([-1.0, 0.0, 0.5], [-1.0, 0.0, 0.5], "a", "b"))
    assert [float(x) + float(y) for x, y in dots] == [300, 300, 300]


def test_entries_of_a_matrix_have_opposite_colors_by_sign_and_numbers_while_there_is_room():
    light = re.findall(r'class="cell"[^>]*--light:(#\w+)', matrix_map([[1.0, -1.0], [0.0, 1.0]], 1.0, "A"))
    assert light[0] == light[3]
    assert len(set(light)) == 3
    assert "−1.00" in matrix_map([[1.0, -1.0], [0.0, 1.0]], 1.0, "A")
    assert 'class="value"' not in matrix_map([[0.0] * 13] * 13, 1.0, "A")


def test_nobody_is_compared_with_rounding():
    document = learned()
    assert re.search(r'<td class="n">1\.2</td>', render_learning(document))
    for row in document["curve"]:
        if row["predictor"] == "ridge (Bayes)" and row["examples"] == 4:
            row["error"] = 1e-17
    page = render_learning(document)
    assert not re.search(r'<td class="n">1\.2</td>', page)
    assert not re.search(r"e\+1\d", page)
