"""The softmax over a vocabulary: its gradient is attention minus the word."""

import pytest
import torch
from agreement import randn
from torch.nn.functional import cross_entropy, normalize
from torch.testing import assert_close

from massieu import attend
from massieu.checks import UserError
from massieu.contrast import skip_gram

DOUBLE = torch.float64
TARGETS = torch.tensor([0, 8, 3, 3])


def test_skip_gram_is_the_cross_entropy_over_the_vocabulary():
    context, words = randn(4, 5, dtype=DOUBLE), randn(9, 5, seed=1, dtype=DOUBLE)
    found = skip_gram(context, words, TARGETS, reduction="none")
    assert_close(found, cross_entropy(context @ words.mT, TARGETS, reduction="none"), rtol=1e-13, atol=1e-13)
    on_sphere = skip_gram(normalize(context, dim=-1), normalize(words, dim=-1), TARGETS)
    assert_close(skip_gram(context, words, TARGETS, normalize=True), on_sphere, rtol=1e-14, atol=0)
    batch = skip_gram(context.view(2, 2, 5), words, TARGETS.view(2, 2), reduction="none")
    assert_close(batch.flatten(), found, rtol=1e-14, atol=0)


def test_the_gradient_is_attention_minus_the_word():
    context, words = randn(4, 5, dtype=DOUBLE).requires_grad_(), randn(9, 5, seed=1, dtype=DOUBLE)
    log_weight = randn(9, seed=2, dtype=DOUBLE)
    (gradient,) = torch.autograd.grad(skip_gram(context, words, TARGETS, log_weight, reduction="sum"), context)
    attention = attend(context.detach(), words, words, log_weight, scale=1.0).output
    assert_close(gradient, attention - words[TARGETS], rtol=1e-13, atol=1e-13)
    without = attend(context.detach(), words, words, scale=1.0).output
    assert float((gradient - (without - words[TARGETS])).abs().max()) > 1e-2


def test_words_learn_too():
    context, words = randn(4, 5, dtype=DOUBLE).requires_grad_(), randn(9, 5, seed=1, dtype=DOUBLE).requires_grad_()
    found = torch.autograd.grad(skip_gram(context, words, TARGETS), [context, words])
    expected = torch.autograd.grad(cross_entropy(context @ words.mT, TARGETS), [context, words])
    for mine, other in zip(found, expected, strict=True):
        assert_close(mine, other, rtol=1e-12, atol=1e-14)


CONTEXT, WORDS = torch.zeros(2, 3), torch.zeros(5, 3)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((CONTEXT[0], WORDS, TARGETS[:2]), "context"),
        ((CONTEXT, WORDS[0], TARGETS[:2]), "word_vectors"),
        ((CONTEXT, WORDS[:, :2], TARGETS[:2]), "word_vectors"),
        ((CONTEXT, WORDS, torch.zeros(2)), "targets"),
        ((CONTEXT, WORDS, [0, 1]), "targets"),
        ((CONTEXT, WORDS, torch.tensor([0])), "targets"),
        ((CONTEXT, WORDS, torch.tensor([0, 5])), "between 0 and 4"),
        ((CONTEXT, WORDS, torch.tensor([-100, 1])), "between 0 and 4"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(arguments, sentence):
    with pytest.raises(UserError, match=sentence):
        skip_gram(*arguments)
