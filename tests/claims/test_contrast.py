"""The claims about contrastive losses and boosting: their verdicts, and that these can go wrong."""

import pytest

from massieu.claims.measures import contrastive, losses
from massieu.measures import Points

KEYS = ["C29", "C30", "C31", "C32", "C33", "C34", "C51", "C52"]

# Where the code breaks, by which factor too large, and which claims must notice.
BREAKS = [
    (Points, "probabilities", 1 + 1e-6, ["C32"]),
    (Points, "log_normalizer", 1.001, ["C33"]),
    (contrastive, "adaboost_step", 1 + 1e-6, ["C29"]),
    (contrastive, "neighbor_probabilities", 1 + 1e-6, ["C30"]),
    (contrastive, "nca", 1 + 1e-6, ["C30"]),
    (contrastive, "skip_gram", 1 + 1e-6, ["C31"]),
    (contrastive, "attend", 1 + 1e-6, ["C31"]),
    (contrastive, "info_nce", 1 + 1e-6, ["C32"]),
    (contrastive, "classical_mds", 1 + 1e-6, ["C34"]),
    (contrastive, "pca", 1 + 1e-6, ["C34"]),
    (losses, "adaboost_step", 1 + 1e-6, ["C51"]),
    (losses, "n_pair", 0.03, ["C52"]),  # at rates that are all too small
]


def test_every_claim_has_a_break_that_it_notices():
    assert {key for *_, keys in BREAKS for key in keys} == set(KEYS)


@pytest.mark.parametrize(("owner", "name", "factor", "keys"), BREAKS)
def test_code_that_is_slightly_wrong_changes_a_verdict(owner, name, factor, keys, unmoved):
    assert unmoved(owner, name, factor, keys) == []


def test_figures_of_the_ledger_come_out(result):
    figures = {name: value for key in KEYS for name, value in result(key, 0).evidence.table.items()}
    assert figures["slope of negative sampling at PMI − log 2"] == pytest.approx(0, abs=1e-12)
    assert figures["log 3 − L"] < figures["mutual information"]
