"""Mixtures of hidden Markov models: the forward algorithm against enumeration, and Bayes against its contrasts."""

import itertools
import math

import pytest
import torch
from torch.testing import assert_close

from massieu.checks import UserError
from massieu.context.hidden_markov import ConceptMixture, concept_mixture, draw_symbol_prompts


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def small(seed=0, concepts=3, states=3, symbols=4):
    shapes = [(states,), (concepts, states, states), (states, symbols), (concepts,)]
    return ConceptMixture(
        *(
            torch.softmax(torch.randn(s, generator=seeded(seed + k), dtype=torch.float64), -1)
            for k, s in enumerate(shapes)
        )
    )


def enumerated(mixture, word, concept):
    """Probability of a word under a concept, summed over all paths of hidden states."""
    total = 0.0
    for path in itertools.product(range(len(mixture.start)), repeat=len(word)):
        p = mixture.start[path[0]]
        for before, after in itertools.pairwise(path):
            p = p * mixture.transitions[concept, before, after]
        for state, symbol in zip(path, word, strict=True):
            p = p * mixture.emissions[state, symbol]
        total += float(p)
    return total


def test_likelihoods_are_sums_over_all_paths():
    mixture = small()
    symbols = torch.randint(4, (5, 5), generator=seeded(9))
    expected = [[math.log(enumerated(mixture, word, c)) for c in range(3)] for word in symbols.tolist()]
    assert_close(mixture.log_likelihood(symbols), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


def test_the_predictive_distribution_is_a_ratio_of_probabilities():
    mixture = small(5)
    word = [0, 3, 1, 1]
    prior = mixture.prior.tolist()
    before = sum(prior[c] * enumerated(mixture, word, c) for c in range(3))
    after = [sum(prior[c] * enumerated(mixture, [*word, s], c) for c in range(3)) for s in range(4)]
    found = mixture.predictive(torch.tensor([word]))[0]
    assert_close(found, torch.tensor(after, dtype=torch.float64) / before, rtol=1e-12, atol=0)
    assert not torch.allclose(mixture.predictive(torch.tensor([word]), "uniform")[0], found, rtol=1e-3)


@pytest.mark.parametrize("concept", range(3))
def test_the_oracle_uses_one_concept_and_the_uniform_average_all(concept):
    mixture = small(7)
    symbols = torch.tensor([[2, 0, 1]])
    each = [mixture.predictive(symbols, "oracle", torch.tensor([c])) for c in range(3)]
    alone = ConceptMixture(mixture.start, mixture.transitions[concept : concept + 1], mixture.emissions)
    assert_close(each[concept], alone.predictive(symbols))
    assert_close(mixture.predictive(symbols, "uniform"), sum(each) / 3)
    weights = mixture.posterior(symbols)[0]
    assert_close(mixture.predictive(symbols), sum(w * p for w, p in zip(weights, each, strict=True)))


def test_long_prompts_do_not_underflow():
    mixture = small()
    symbols = torch.randint(4, (2, 3000), generator=seeded(1))
    likelihood = mixture.log_likelihood(symbols)
    assert bool((likelihood < -1000).all() and likelihood.isfinite().all())
    assert_close(mixture.predictive(symbols).sum(-1), torch.ones(2, dtype=torch.float64))


def accuracy(mixture, prompts, weighing):
    found = mixture.predictive(prompts.symbols, weighing, prompts.concepts).argmax(-1)
    return float((found == prompts.answers).double().mean())


def test_the_posterior_finds_the_concept_and_the_uniform_average_does_not():
    generator = seeded(3)
    mixture = concept_mixture(generator)
    prompts = draw_symbol_prompts(mixture, 150, 8, generator)
    bayes, uniform, oracle = (accuracy(mixture, prompts, w) for w in ("posterior", "uniform", "oracle"))
    assert bayes == pytest.approx(oracle, abs=0.02)
    assert oracle > 0.75
    assert uniform < oracle - 0.25
    assert float(mixture.posterior(prompts.symbols)[torch.arange(150), prompts.concepts].mean()) > 0.99


def test_more_examples_say_more_about_the_concept():
    generator = seeded(4)
    mixture = concept_mixture(generator)
    sure = []
    for examples in (0, 1, 4):
        prompts = draw_symbol_prompts(mixture, 150, examples, generator)
        sure.append(float(mixture.posterior(prompts.symbols)[torch.arange(150), prompts.concepts].mean()))
    assert 0.3 < sure[0] < sure[1] < sure[2]


def test_prompts_have_delimiters_between_examples_only():
    generator = seeded(0)
    symbols = draw_symbol_prompts(concept_mixture(generator), 20, 3, generator, length=4).symbols
    assert symbols.shape == (20, 3 * 5 + 3)
    delimiter = torch.zeros(18, dtype=torch.bool)
    delimiter[[4, 9, 14]] = True
    assert torch.equal(symbols == 0, delimiter.expand(20, -1))


def test_the_first_slot_alone_shows_the_delimiter():
    shows = concept_mixture(seeded(), values=3, slots=4).emissions[:, 0].reshape(3, 4)
    assert shows.tolist() == [[1.0, 0.0, 0.0, 0.0]] * 3


def test_prompts_without_smoothing_may_be_impossible():
    generator = seeded(0)
    mixture = concept_mixture(generator, smoothing=0.0)
    prompts = draw_symbol_prompts(mixture, 100, 4, generator)
    with pytest.raises(UserError, match="likelihood under some concept"):
        mixture.predictive(prompts.symbols)


def test_an_impossible_concept_is_left_out():
    stay, swap = torch.eye(2), torch.eye(2).flip(0)
    mixture = ConceptMixture(torch.ones(2) / 2, torch.stack([stay, swap]), torch.eye(2))
    symbols = torch.tensor([[0, 0, 0]])
    for weighing in ("posterior", "uniform"):
        assert mixture.predictive(symbols, weighing).tolist() == [[1.0, 0.0]]
    with pytest.raises(UserError, match="positive likelihood under their concepts"):
        mixture.predictive(symbols, "oracle", torch.tensor([1]))


HALF, EYE, ONE = torch.ones(2) / 2, torch.eye(2), (torch.ones(1), torch.ones(1, 1, 1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ConceptMixture(torch.ones(2), EYE[None], EYE), "start"),
        (lambda: ConceptMixture(HALF, torch.ones(1, 2, 2), EYE), "transitions"),
        (lambda: ConceptMixture(HALF, EYE[None], torch.eye(3)), "emissions"),
        (lambda: ConceptMixture(HALF, EYE[None], EYE, HALF), "prior"),
        (lambda: small().log_likelihood(torch.tensor([[4]])), "symbols"),
        (lambda: small().log_likelihood(torch.tensor([1, 2])), r"for a single prompt pass symbols\[None\]"),
        (lambda: small().predictive(torch.tensor([[1]]), "oracle"), '"oracle" with concepts'),
        (lambda: small().predictive(torch.tensor([[1]]), "mean"), "got 'mean'"),
        (lambda: concept_mixture(seeded(), smoothing=2.0), "smoothing"),
        (lambda: concept_mixture(seeded(), slots=1), "slots"),
        (lambda: draw_symbol_prompts(small(), 2, 2, seeded(), length=1), "length"),
        (
            lambda: draw_symbol_prompts(ConceptMixture(*ONE, EYE[:1]), 2, 2, seeded()),
            "symbol 0 is the delimiter",
        ),
    ],
)
def test_what_is_no_mixture_is_refused_in_one_sentence(make, message):
    with pytest.raises(UserError, match=message):
        make()
