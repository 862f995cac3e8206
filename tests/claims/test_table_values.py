"""Values in the tables of claims that the documents or the notes of this project state."""

import pytest


@pytest.fixture
def values(result):
    """Values of the tables of some claims, by name."""
    return lambda *keys: {name: value for key in keys for name, value in result(key).evidence.table.items()}


def test_families(values):
    found = values("C1", "C4", "C7", "C28")
    assert found["log Z of Gamma(2.5, 0.7) at 0.6"] == pytest.approx(1.3618179386, abs=1e-10)
    assert found["mean of Gamma(2.5, 0.7) at 0.6"] == pytest.approx(3.01724137931, abs=1e-10)
    assert found["mean log odds of Beta(1.8, 2.3) tilted by 0.7"] == pytest.approx(0.57710918787, abs=1e-10)
    assert found["the same after Bayes"] == pytest.approx(-0.04789, abs=1e-5)
    assert found["null directions of 8 keys in 16 dimensions"] == 9


def test_contrastive_losses(values):
    found = values("C31", "C32")
    assert found["slope of negative sampling at PMI − log 2"] == pytest.approx(0, abs=1e-12)
    assert found["log 3 − L"] < found["mutual information"]


def test_heads(values):
    found = values("C39", "C42", "C54")
    assert found["free dimensions of B for 3 heads"] == 3
    assert found["one softmax against log Z, relative"] < 0.1 < found["bound against log Z, relative"]
    assert found["law"] == pytest.approx(8.6422, abs=1e-4)


def test_the_operator_and_its_equilibrium(values):
    found = values("C11", "C12", "C21", "C23", "C24", "C25", "C26", "C27", "X9")
    assert found["−0.6 beside 1 and 2 goes to"] == pytest.approx(-0.4725, abs=1e-4)
    assert found["0.2 behind a causal mask comes to"] == pytest.approx(0.1690, abs=1e-4)
    assert found["66 times the variance as printed, Σ = (2 1; 1 2), μ = (1, −1)"] == pytest.approx(17)
    assert found["66 times the covariance"] == pytest.approx(5)
    assert found["variance as printed, Σ = 1, μ = 2"] == pytest.approx(0.1)
    assert found["least eigenvalue of the difference, Σ = (2 1; 1 2)"] == pytest.approx(3)
    assert found["largest"] == pytest.approx(5)
    assert found["gain of entropy"] == pytest.approx(2.0794415, abs=1e-7)
    assert found["of these not self-dominant"] == 0
    assert found["excess kurtosis on the sphere"] == pytest.approx(found["−6 / (n + 2)"], abs=0.05)
    assert found["slope in log N"] == pytest.approx(-0.5, abs=0.05)


def test_memories(values):
    found = values(
        "M1", "M2", "M5", "M7", "M11", "M14", "M17", "P1", "P2", "P4", "P7", "P9", "M6", "M16", "M18", "P3", "P5"
    )
    assert found["share moved of 3 patterns in 4 dimensions"] == pytest.approx(2 / 3)
    assert found["patterns for ρ = 0.1, d = 20"] == pytest.approx(39.67, abs=0.01)
    assert found["its least curvature"] == pytest.approx(-3)
    assert found["after the update"] == pytest.approx(0.7382, abs=1e-4)
    assert found["after the update added to the state"] == pytest.approx(1.0432, abs=1e-4)
    assert found["guaranteed, d = 64"] == pytest.approx(1.66e6, rel=1e-2)
    assert found["patterns, d = 75, K = 1"] == pytest.approx(10.97, abs=0.01)
    assert found["observed pixels alone"] == 1
    assert found["patterns for power 2"] == 8
    assert found["overlap at 0.12 d by the equations"] == pytest.approx(0.9932, abs=1e-4)
    assert found["lost from a white half, exponential"] == pytest.approx(0.2)
    assert found["mean overlap"] == pytest.approx(0.0854, abs=1e-4)
    assert found["m at β ‖x‖^2 = 1.21"] == pytest.approx(0.66993, abs=1e-5)


def test_learning_in_a_context(values):
    pytest.importorskip("sklearn")
    found = values("I2", "I6", "I7", "I8", "I9", "I12", "I14", "I16", "I17", "I19")
    assert found["gap of one layer from zero, query among the keys"] < 1e-12 < 1e-2 < found["of two layers"]
    assert found["loss, d = 10, N = 20"] == pytest.approx(110 / 31)
    assert found["loss, d = 10, N = 20, σ = 0.5"] == pytest.approx(3.6)
    assert found["loss, spectrum of Ahn et al., N = 20"] == pytest.approx(1.200139, abs=1e-6)
    assert found["best rate, d = N = 10, inputs within 0.5"] == pytest.approx(6.0606, abs=1e-4)
    assert found["half of its loss, inputs within 1"] == pytest.approx(0.824916, abs=1e-6)
    assert found["loss of two layers, curvature"] == pytest.approx(0.920, abs=0.06)
    assert found["risk of ridge"] == pytest.approx(0.2669, abs=0.01)
    assert found["loss, spectrum of Ahn et al. and inverse prior, N = 20"] == pytest.approx(1.153846, abs=1e-6)
    assert found["loss of two softmax heads over that of a linear one"] == pytest.approx(3.648 / 3.530, abs=0.03)
    assert found["loss of one softmax head over that of a linear one"] == pytest.approx(5.79 / 3.530, abs=0.1)
    assert found["mean square, SparseLinear, d = 20"] == pytest.approx(3.06, abs=0.4)
    assert found["mean square, DecisionTree, d = 20"] == pytest.approx(0.97, abs=0.1)
    assert found["error of greedy trees"] > 5 * found["of the posterior mean"]


def test_transformers_trained_in_the_experiment(result):
    table = result("I21").evidence.table
    assert table["of ridge regression"] < table["risk of the model"] < table["ε"] < table["of the zero predictor"]
    table = result("R10").evidence.table
    assert table["share of ridge, 2 functions"] < 0.5 < table["share of ridge, 64 functions"]
    table = result("X15").evidence.table
    losses = {name: value for name, value in table.items() if name.startswith("loss")}
    assert len(losses) == 7
    assert max(losses.values()) < 3.4
    assert losses["loss with layer norm"] < 3.1
    for key in ("S5", "S6"):
        assert result(key).evidence.curve.x == list(range(0, 121, 20))


def test_token_selection(result):
    table = {key: result(key).evidence.table for key in ("T1", "T5", "T6", "T8", "T9", "T10", "T16", "T17")}
    assert table["T1"]["their least margin"] == pytest.approx(0.1)
    assert table["T5"]["norm of the best pick"] < table["T5"]["norm of the equality program"]
    assert table["T6"]["residual"] > table["T6"]["residual ten times earlier"] > table["T6"]["‖W^fin‖"]
    assert table["T8"]["share of the ℓ∞ margin that sign descent has"] == pytest.approx(1, abs=0.01)
    assert table["T8"]["1 − corr, adam"] > 0.05
    assert table["T9"]["nearly orthogonal"] == 1
    assert abs(table["T10"]["exponent, gd"]) < 0.5
    assert table["T16"]["effective rank of the weights"] < table["T16"]["of the Frobenius solution"]
    assert table["T17"]["‖W_k − W^fin − C_k W^mm‖"] > table["T17"]["‖W^fin‖"]  # in norm the residual stays


def test_sparse_patterns(result):
    table = {key: result(key).evidence.table for key in ("U1", "U2", "U3", "U4", "U6", "U7", "U8")}
    assert table["U1"]["of which the fixed pattern"] == 1
    assert table["U2"]["exponent, strided"] == pytest.approx(1.5, abs=0.02)
    assert table["U3"]["layers to full reach of the star"] == 2
    assert (table["U4"]["layers, strided"], table["U4"]["layers, fixed"]) == (3, 2)
    assert table["U6"] == {"softmax meets the condition": 1, "the first of a list meets it": 0}
    assert table["U7"]["of four patterns no theorem covers alone"] == 3
    assert table["U8"]["theorem for the ring applies"] == 1


def test_universal_approximation(result):
    table = {key: result(key).evidence.table for key in ("U21", "U26", "U27", "U28", "U30", "U33", "U35", "U36")}
    assert table["U21"]["largest, n = 3, d = 2, T = 3"] == 112_120_064
    assert table["U26"]["numbers of a rank-one hardmax head, 9 tokens, T = 3"] == 45
    assert table["U26"]["contexts"] == 405
    assert table["U27"]["decimal logarithm of the least gap"] < -100
    assert table["U28"]["machine epsilons at the proof's scale"] == 0
    assert table["U28"]["machine epsilons with codes that were searched"] > 1e10
    assert table["U30"]["weights that are not zero"] < table["U30"]["parameters of the corollary"]
    assert table["U30"]["parameters of the corollary"] < table["U30"]["parameters as stored"]
    neighbors = table["U36"]["change of the first output by its neighbor"]
    assert table["U36"]["the same in a dilated window"] == 0 < neighbors
    assert table["U35"]["layers, 8 cells, T = 2"] == 8 + 1 + 9 + 56 + 1
    assert table["U33"]["largest error in strips of 0.0001 cells"] > 1
