"""In-context learning as Bayesian inference: mixtures of hidden Markov models, their prompts and predictions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from massieu.checks import UserError, check_count, check_number
from massieu.context.tasks.task import normal, uniform

__all__ = ["ConceptMixture", "SymbolPrompts", "concept_mixture", "draw_symbol_prompts"]


@dataclass(frozen=True)
class SymbolPrompts:
    """Prompts of symbols: examples one after the other, the last one without its last symbol.

    Attributes:
        symbols: shape ``(prompts, tokens)``.
        answers: the most probable last symbol given the concept and the hidden states, shape ``(prompts,)``.
        concepts: index of the concept of each prompt, shape ``(prompts,)``.
    """

    symbols: Tensor
    answers: Tensor
    concepts: Tensor


class ConceptMixture:
    r"""Mixture of hidden Markov models with one transition matrix for each concept :math:`\theta`.

    .. math:: p(o_{1..T}) = \sum_\theta p(\theta) \sum_{h} p(h_1) \prod_t p_\theta(h_{t+1} \mid h_t)\, p(o_t \mid h_t)

    Args:
        start: distribution of the first state, shape ``(states,)``.
        transitions: shape ``(concepts, states, states)``, rows sum to one.
        emissions: distribution of the symbol of a state, shape ``(states, symbols)``.
        prior: of the concepts; uniform by default.

    Source:
        Xie et al. 2021.

    Example:
        >>> sticky, swapping = torch.eye(2), torch.eye(2).flip(0)
        >>> mixture = ConceptMixture(torch.ones(2) / 2, 0.1 / 2 + 0.9 * torch.stack([sticky, swapping]), torch.eye(2))
        >>> mixture.posterior(torch.tensor([[0, 0, 1, 0]]))[0]  # one stays for two swaps: 1 to 19
        tensor([0.0500, 0.9500], dtype=torch.float64)
    """

    def __init__(self, start: Tensor, transitions: Tensor, emissions: Tensor, prior: Tensor | None = None):
        concepts, states = transitions.shape[0], transitions.shape[-1]
        given = torch.ones(concepts) / concepts if prior is None else prior
        shapes = {
            "start": (start, (states,)),
            "transitions": (transitions, (concepts, states, states)),
            "emissions": (emissions, (states, emissions.shape[-1])),
            "prior": (given, (concepts,)),
        }
        for name, (tensor, shape) in shapes.items():
            sums = tensor.double().sum(-1)
            fits = tuple(tensor.shape) == shape and bool((tensor >= 0).all())
            if not fits or not torch.allclose(sums, torch.ones_like(sums), atol=1e-5):
                raise UserError(
                    f"{name} must be probabilities of shape {shape} that sum to one, got shape {tuple(tensor.shape)};"
                    " divide each row by its sum"
                )
        self.start, self.transitions, self.emissions, self.prior = (
            tensor.double() / tensor.double().sum(-1, keepdim=True) for tensor, _ in shapes.values()
        )

    @property
    def concepts(self) -> int:
        return self.transitions.shape[0]

    def log_likelihood(self, symbols: Tensor) -> Tensor:
        r"""Return :math:`\log p(o_{1..T} \mid \theta)`, shape ``(prompts, concepts)``; it may be minus infinity."""
        return self._forward(symbols).logsumexp(-1)

    def posterior(self, symbols: Tensor) -> Tensor:
        r"""Return :math:`p(\theta \mid o_{1..T})`, shape ``(prompts, concepts)``."""
        return self._posterior(self.log_likelihood(symbols)).exp()

    def predictive(
        self,
        symbols: Tensor,
        weighing: Literal["posterior", "uniform", "oracle"] = "posterior",
        concepts: Tensor | None = None,
    ) -> Tensor:
        r"""Return the distribution of the next symbol, :math:`\sum_\theta c_\theta\, p(o_{T+1} \mid o_{1..T}, \theta)`.

        Args:
            symbols: shape ``(prompts, tokens)``.
            weighing: "posterior" with :math:`c_\theta = p(\theta \mid o_{1..T})` is the Bayes predictor; "uniform" does
                not infer the concept; "oracle" uses the true one.
            concepts: the concept of each prompt, for "oracle".

        Returns:
            Probabilities of shape ``(prompts, symbols)``.
        """
        forward = self._forward(symbols)
        likelihood = forward.logsumexp(-1)
        possible = likelihood > -torch.inf
        posterior = self._posterior(likelihood)
        if weighing == "posterior":
            log_weight = posterior
        elif weighing == "uniform":
            # A concept under which the prompt cannot be has no prediction to average.
            log_weight = torch.where(possible, -possible.sum(-1, keepdim=True).double().log(), -torch.inf)
        elif weighing == "oracle" and concepts is not None:
            known = torch.nn.functional.one_hot(concepts, self.concepts).bool()
            log_weight = torch.where(known, 0.0, -torch.inf).double()
            if not bool(possible[known].all()):
                raise UserError(
                    "prompts must have positive likelihood under their concepts, got some with none; smooth the"
                    " transitions"
                )
        else:
            raise UserError(
                f'weighing must be "posterior", "uniform", or "oracle" with concepts, got {weighing!r};'
                " pass concepts for the oracle"
            )
        states = (forward - torch.where(possible, likelihood, 0.0)[..., None]).exp()
        states = torch.einsum("pc,pcs,cst->pt", log_weight.exp(), states, self.transitions)
        return states @ self.emissions

    def _posterior(self, likelihood: Tensor) -> Tensor:
        joint = likelihood + self.prior.log()
        total = joint.logsumexp(-1, keepdim=True)
        impossible = int((total == -torch.inf).sum())
        if impossible:
            raise UserError(
                f"prompts must have positive likelihood under some concept, got {impossible} of {len(total)} with none;"
                " smooth the transitions, for delimiters join states that no concept joins"
            )
        return joint - total

    def _forward(self, symbols: Tensor) -> Tensor:
        """Return the log joint probability of the symbols and the last state, shape ``(prompts, concepts, states)``."""
        count = self.emissions.shape[-1]
        whole = symbols.dtype in (torch.int64, torch.int32) and symbols.dim() == 2 and symbols.numel() > 0
        if not whole or int(symbols.min()) < 0 or int(symbols.max()) >= count:
            raise UserError(
                f"symbols must be whole numbers below {count} of shape (prompts, tokens), got {symbols.dtype}"
                f" {tuple(symbols.shape)}; for a single prompt pass symbols[None]"
            )
        observed = self.emissions.log().T[symbols.long()]
        forward = (self.start.log() + observed[:, 0])[:, None].expand(-1, self.concepts, -1)
        for step in range(1, symbols.shape[1]):
            # A log-sum-exp as a matrix product, shifted by the largest against overflow.
            top = forward.amax(-1, keepdim=True)
            top = torch.where(top > -torch.inf, top, 0.0)
            moved = torch.einsum("pcs,cst->pct", (forward - top).exp(), self.transitions)
            forward = moved.log() + top + observed[:, step][:, None]
        return forward


def concept_mixture(
    generator: torch.Generator,
    *,
    concepts: int = 5,
    values: int = 10,
    slots: int = 10,
    symbols: int = 50,
    smoothing: float = 0.02,
    stay: float = 0.9,
) -> ConceptMixture:
    r"""Draw a mixture in the style of GINC: a hidden state is a value and a slot, and a memory has its symbol.

    Slot 0 has the delimiter, symbol 0, for all values; the other places of the memory are drawn from the other symbols.
    Values mostly stay, alike for all concepts. A concept is a transition matrix of slots: a random mixture of
    permutations. Transitions between whole states are mixed with the uniform ones,

    .. math:: (1 - \epsilon)\, A_{value} \otimes A_{slot} + \epsilon / |states|

    without which a prompt may have probability zero under every concept where its examples are joined.

    Args:
        generator: of the memory and of the concepts.
        concepts: number of concepts.
        values: number of values.
        slots: number of slots, the delimiter's included.
        symbols: number of symbols, the delimiter included.
        smoothing: :math:`\epsilon`.
        stay: weight of the identity in the transition of values.

    Source:
        Xie et al. 2021, section 4, and their public code, which does not smooth.

    Example:
        >>> mixture = concept_mixture(torch.Generator().manual_seed(0))
        >>> mixture.transitions.shape, mixture.emissions.shape
        (torch.Size([5, 100, 100]), torch.Size([100, 50]))
    """
    check_count(concepts, "concepts")
    check_count(values, "values")
    check_count(slots, "slots", least=2)
    check_count(symbols, "symbols", least=2)
    for name, share in (("smoothing", smoothing), ("stay", stay)):
        if check_number(share, name, least=0) > 1:
            raise UserError(f"{name} must lie between 0 and 1, got {share!r}; it is a share of the transition")
    memory = torch.randint(1, symbols, (values, slots), generator=generator)
    memory[:, 0] = 0
    drift = torch.softmax(normal((values, values), generator, torch.float64), -1)
    of_values = stay * torch.eye(values, dtype=torch.float64) + (1 - stay) * drift
    states = values * slots
    transitions = []
    for _ in range(concepts):
        of_slots = _mixed_permutations(slots, generator)
        whole = torch.kron(of_values, of_slots)
        transitions.append((1 - smoothing) * whole + smoothing / states)
    emissions = torch.nn.functional.one_hot(memory.flatten(), symbols).double()
    start = torch.ones(states, dtype=torch.float64) / states
    return ConceptMixture(start, torch.stack(transitions), emissions)


def draw_symbol_prompts(
    mixture: ConceptMixture, count: int, examples: int, generator: torch.Generator, *, length: int = 5
) -> SymbolPrompts:
    """Draw prompts of one concept each: examples joined by delimiters, and a last one without its last symbol.

    The states of an example start anew, uniform among those with other symbols than the delimiter, and follow the
    concept without the delimiter.

    Args:
        mixture: with symbol 0 as delimiter.
        count: number of prompts.
        examples: complete examples before the last one.
        generator: of all draws.
        length: symbols in an example, at least 2.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> prompts = draw_symbol_prompts(concept_mixture(generator), 3, 4, generator)
        >>> prompts.symbols.shape  # four times five symbols and a delimiter, and four symbols
        torch.Size([3, 28])
    """
    count, examples = check_count(count, "count"), check_count(examples, "examples", least=0)
    length = check_count(length, "length", least=2)
    shown = mixture.emissions[:, 0] < 1
    if not bool(shown.any()):
        raise UserError("some states must show another symbol than 0, got none; symbol 0 is the delimiter")
    concepts = torch.multinomial(mixture.prior, count, replacement=True, generator=generator)
    inside = mixture.transitions * shown
    rest = inside.sum(-1, keepdim=True)
    inside = torch.where(rest > 0, inside / rest, shown / shown.sum())
    pieces: list[Tensor] = []
    state = torch.zeros(count, dtype=torch.long)
    for example in range(examples + 1):
        state = torch.multinomial(shown.double(), count, replacement=True, generator=generator)
        for place in range(length if example < examples else length - 1):
            if place:
                state = _draw(inside[concepts, state], generator)
            pieces.append(_draw(_without_delimiter(mixture.emissions)[state], generator))
        if example < examples:
            pieces.append(torch.zeros(count, dtype=torch.long))
    answers = (inside[concepts, state] @ _without_delimiter(mixture.emissions)).argmax(-1)
    return SymbolPrompts(torch.stack(pieces, 1), answers, concepts)


def _mixed_permutations(size: int, generator: torch.Generator) -> Tensor:
    """Draw a doubly stochastic matrix: a few permutations with random weights, one of which dominates."""
    weights = torch.softmax(4 * uniform((4,), generator, torch.float64), 0)
    eye = torch.eye(size, dtype=torch.float64)
    return sum((weight * eye[torch.randperm(size, generator=generator)] for weight in weights), torch.zeros_like(eye))


def _draw(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


def _without_delimiter(emissions: Tensor) -> Tensor:
    rest = emissions.clone()
    rest[:, 0] = 0
    return rest / rest.sum(-1, keepdim=True).clamp_min(1e-300)
