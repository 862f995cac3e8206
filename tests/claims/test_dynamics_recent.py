"""Claims of recent papers about flows of tokens and many keys: their verdicts, and that these can go wrong."""

import math

import pytest
import torch

from massieu.claims.recent import clusters, freezing, gradient_flows
from massieu.dynamics import particles

KEYS = ["R4", "R5", "R6", "R13"]

# Where the code breaks, by which factor too large, and which claims must notice.
BREAKS = [
    (gradient_flows, "balance", 1.001, ["R4"]),
    (gradient_flows, "attend", 1 + 1e-6, ["R4"]),
    (gradient_flows, "energy", 1 + 1e-6, ["R4"]),
    (particles, "attend", 1.01, ["R5"]),  # the rate at the end
    (particles, "attend", 1.05, ["R13"]),  # the life of two clusters
    (clusters, "velocity", 1.05, ["R5"]),
    (freezing, "row_statistics", 1.1, ["R6"]),
    (freezing, "limit", 1.02, ["R6"]),
    (freezing, "correction", 1.5, ["R6"]),
]


def test_every_claim_has_a_break_that_it_notices():
    assert {key for *_, keys in BREAKS for key in keys} == set(KEYS)


@pytest.mark.parametrize(("owner", "name", "factor", "keys"), BREAKS)
def test_code_that_is_slightly_wrong_changes_a_verdict(owner, name, factor, keys, unmoved):
    freezing.mean_log_normalizer.cache_clear()
    assert unmoved(owner, name, factor, keys) == []
    freezing.mean_log_normalizer.cache_clear()


def test_the_mean_of_log_z_is_that_of_samples():
    generator = torch.Generator().manual_seed(0)
    for beta in (0.7, 2.0):
        scores = beta * 8**0.5 * torch.randn(20000, round(math.exp(4)), generator=generator, dtype=torch.float64)
        values = torch.logsumexp(scores, -1)
        error = float(values.std()) / len(values) ** 0.5
        # e^4 is not a whole number of keys: 55 of them instead of 54.6.
        assert freezing.mean_log_normalizer(beta, 8) == pytest.approx(float(values.mean()), abs=4 * error + 0.01)


def test_the_correction_is_the_next_term():
    for beta in (1.5, 3.0):
        left = [
            freezing.mean_log_normalizer(beta, dim) - dim * freezing.limit(beta) - freezing.correction(beta, dim)
            for dim in (64, 256, 1024)
        ]
        assert abs(left[0]) > 2 * abs(left[1]) > 4 * abs(left[2])


def test_two_clusters_of_one_token_take_the_time_of_the_integral():
    found, expected = clusters.life(1.3, [1, 1], 5.0, 2000)
    assert found == pytest.approx(expected, rel=2e-3)
