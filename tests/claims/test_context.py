"""The claims about learning in a context: their verdicts, and that these can go wrong."""

import pytest

from massieu.claims import Verdict, select
from massieu.claims.context import predictors as context_predictors
from massieu.claims.recent import preconditioned
from massieu.context import LeastSquares, Linear, LinearModel, optimum, step_sizes
from massieu.context.hidden_markov import ConceptMixture
from massieu.nn import LinearAttention, MeasureAttention

LAYERS = ["I1", "I2", "I3", "I4", "I5", "I6", "I7", "I8", "I9", "I10", "I15", "I16", "I17"]
PREDICTORS = ["I11", "I12", "I13", "I14", "I18", "I19", "I20"]
KEYS = [*LAYERS, *PREDICTORS, "R8"]


# Statements of the slides that are loose or wrong, and the claims about each.
LOOSE = {
    "a single step of gradient descent": ["I5"],
    "sign of the query, keys without it": ["I2", "I3"],
    "more sample efficient than are known": ["I14"],
}

# Where the code breaks, by which factor too large, and which claims must notice.
BREAKS = [
    (LinearAttention, "forward", 1 + 1e-6, ["I1", "I2", "I3", "I4"]),
    (LinearAttention, "forward", 1.2, ["I9"]),
    (MeasureAttention, "forward", 1.001, ["I10"]),
    (optimum, "_solve", 1.01, ["I5", "I6", "I7", "I8"]),
    (optimum.Optimum, "loss_of", 1.01, ["I7"]),
    (step_sizes, "descent_loss", 2.0, ["I9"]),
    (LeastSquares, "predict", 1.5, ["I11"]),
    (LeastSquares, "predict", 1.01, ["I12"]),
    (ConceptMixture, "_posterior", 0.0, ["I13"]),
    (context_predictors, "tree_posterior", 1.5, ["I14"]),
    (LinearModel, "_read", 1.3, ["I15"]),
    (optimum, "_solve", 1.01, ["I16"]),
    (MeasureAttention, "forward", 0.0, ["I17"]),
    (LeastSquares, "predict", 1.5, ["I18"]),
    (Linear, "values", 1.5, ["I19"]),
    (ConceptMixture, "log_likelihood", 0.0, ["I20"]),
    (LinearAttention, "forward", 1.001, ["R8"]),
    (preconditioned, "residual_map", 1.01, ["R8"]),
]


def test_every_loose_statement_has_claims_that_do_not_simply_repeat_it():
    for keys in LOOSE.values():
        assert Verdict.HOLDS not in [claim.expected for claim in select(keys)]


def test_every_claim_has_a_break_that_it_notices():
    assert {key for *_, keys in BREAKS for key in keys} == set(KEYS)


@pytest.mark.parametrize(("owner", "name", "factor", "keys"), BREAKS)
def test_code_that_is_wrong_changes_a_verdict(owner, name, factor, keys, unmoved):
    assert unmoved(owner, name, factor, keys) == []


def test_figures_of_the_notes_come_out(result):
    pytest.importorskip("sklearn")
    figures = {name: value for key in KEYS for name, value in result(key, 0).evidence.table.items()}
    assert figures["gap of one layer from zero, query among the keys"] < 1e-12 < 1e-2 < figures["of two layers"]
    assert figures["loss, d = 10, N = 20"] == pytest.approx(110 / 31)
    assert figures["loss, d = 10, N = 20, σ = 0.5"] == pytest.approx(3.6)
    assert figures["loss, spectrum of Ahn et al., N = 20"] == pytest.approx(1.200139, abs=1e-6)
    assert figures["best rate, d = N = 10, inputs within 0.5"] == pytest.approx(6.0606, abs=1e-4)
    assert figures["half of its loss, inputs within 1"] == pytest.approx(0.824916, abs=1e-6)
    assert figures["loss of two layers, curvature"] == pytest.approx(0.920, abs=0.06)
    assert figures["risk of ridge"] == pytest.approx(0.2669, abs=0.01)
    assert figures["loss, spectrum of Ahn et al. and inverse prior, N = 20"] == pytest.approx(1.153846, abs=1e-6)
    assert figures["loss of two softmax heads over that of a linear one"] == pytest.approx(3.648 / 3.530, abs=0.03)
    assert figures["loss of one softmax head over that of a linear one"] == pytest.approx(5.79 / 3.530, abs=0.1)
    assert figures["mean square, SparseLinear, d = 20"] == pytest.approx(3.06, abs=0.4)
    assert figures["mean square, DecisionTree, d = 20"] == pytest.approx(0.97, abs=0.1)
    assert figures["error of greedy trees"] > 5 * figures["of the posterior mean"]
