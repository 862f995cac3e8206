"""The claims about long inputs and about exact retrieval: code whose break they notice."""

import pytest
import torch

from massieu.claims.recent import fenchel_young, lengths
from massieu.memory import Sparse

KEYS = ["R1", "R7", "R9"]

# Where the code breaks, by which factor too large, and which claims must notice.
BREAKS = [
    (lengths, "attend", 1 + 1e-6, ["R1", "R7"]),
    (lengths, "written_out", 1 + 1e-6, ["R7"]),
    (Sparse, "update", 1 + 1e-6, ["R9"]),
    (fenchel_young, "by_bisection", 1 + 1e-6, ["R9"]),
]


def test_every_claim_has_a_break_that_it_notices():
    assert {key for *_, keys in BREAKS for key in keys} == set(KEYS)


@pytest.mark.parametrize(("owner", "name", "factor", "keys"), BREAKS)
def test_code_that_is_slightly_wrong_changes_a_verdict(owner, name, factor, keys, unmoved):
    assert unmoved(owner, name, factor, keys) == []


def test_weights_by_bisection_are_those_of_projections_and_of_the_norm():
    scores = torch.tensor([[0.3, 0.1, -2.0]], dtype=torch.float64)
    assert torch.allclose(fenchel_young.by_bisection(scores, 2.0), torch.tensor([[0.6, 0.4, 0.0]]).double())
    # The 2-norm: of two equal scores that lead by one, each has one half.
    even = torch.tensor([[1.0, 1.0, 0.0]], dtype=torch.float64)
    assert torch.allclose(fenchel_young.by_bisection(even, None), torch.tensor([[0.5, 0.5, 0.0]]).double())
    alone = torch.tensor([[1.0, 0.0, -1.0]], dtype=torch.float64)
    assert torch.allclose(fenchel_young.by_bisection(alone, None), torch.eye(3)[:1].double())
