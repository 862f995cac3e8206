"""Other contractions in trained models: wrong code changes the verdict, and the contractions are causal."""

import pytest
import torch
from torch.testing import assert_close

from massieu.claims import Verdict
from massieu.claims.models import trained_contractions as models

# Where the code breaks, and how. Models are trained once: the breaks are in what is done with them.
BREAKS = [
    ("similarity", lambda first, second: 0.9),  # all models alike
    ("LINEAR", ("rms_norm",)),
    ("LINEAR", ("halve", "rms_norm")),
]


@pytest.mark.parametrize(("name", "wrong"), BREAKS)
def test_code_that_is_wrong_changes_the_verdict(name, wrong, monkeypatch, verdict_of):
    monkeypatch.setattr(models, name, wrong)
    assert verdict_of("X15") is not Verdict.CONDITIONAL


def test_similarity_is_the_alignment_of_gram_matrices():
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(20, dim, generator=generator, dtype=torch.float64) for dim in (3, 5))
    center = torch.eye(20, dtype=torch.float64) - 1 / 20
    grams = [center @ each @ each.T @ center for each in (first, second)]
    expected = (grams[0] * grams[1]).sum() / (grams[0].norm() * grams[1].norm())
    assert models.similarity(first, second) == pytest.approx(float(expected))
    turned = 3 * first @ torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64))[0] + 1
    assert models.similarity(first, turned) == pytest.approx(1.0)


@pytest.mark.parametrize("name", models.CONTRACTIONS)
def test_no_token_sees_later_ones_through_a_contraction(name):
    x = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
    contract = models.Contraction(name)
    assert_close(contract(x)[:, :4], contract(x[:, :4]))


def test_the_running_root_mean_square_counts_the_tokens_so_far():
    x = torch.tensor([[3.0, 3.0], [1.0, 1.0]])
    assert_close(models.running_rms(x), torch.stack([x[0] / 3, x[1] / 5**0.5]))


def test_the_running_batch_norm_is_that_of_the_tokens_so_far_and_one_of_mean_square_one():
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for place in range(5):
        seen = torch.cat([torch.zeros(1, 3, dtype=torch.float64), x[: place + 1]])
        variance = seen.square().mean(0) + 1 / (place + 2) - seen.mean(0).square()
        assert_close(models.running_batch_norm(x)[place], (x[place] - seen.mean(0)) / variance.sqrt())
