"""Attention as the gradient flow of an energy of all tokens: doubly stochastic attention is one, softmax is not."""

from __future__ import annotations

import torch
from torch import Tensor

from massieu.claims.claim import Evidence, Gap, Source, Trial
from massieu.claims.experiment import TIGHT, apart, normals, widest
from massieu.claims.registry import claim
from massieu.dynamics import balance
from massieu.measures.measure import gradient
from massieu.statistics import attend


def energy(tokens: Tensor, matrix: Tensor, rounds: int) -> Tensor:
    """Return the energy F of all tokens by Sinkhorn's algorithm for symmetric scores, u ← (u − log Σ e^{C + u}) / 2."""
    scores = tokens @ matrix @ tokens.T
    potential = torch.zeros_like(scores[0])
    for _ in range(rounds):
        potential = (potential - torch.logsumexp(scores + potential, -1)) / 2
    log_ratio = potential[:, None] + potential
    return -0.5 * (torch.exp(scores + log_ratio) * log_ratio).sum()


@claim(
    "R4",
    source=Source.SANDER,
    place="abstract, and the propositions on the flows of k^∞ and k^1 (2 and 3, numbers from memory)",
    title="Sinkhorn attention is a gradient flow, softmax is not",
    wording=(
        "With W_Q^⊤ W_K symmetric and W_V = −W_Q^⊤ W_K, doubly stochastic self-attention moves the tokens along a"
        " Wasserstein gradient flow; self-attention by softmax is not such a flow."
    ),
    reading=(
        "Our reading: for finitely many tokens, whose flow in Wasserstein's metric is that of all tokens jointly. For 8"
        " random tokens in 3 dimensions (32 in 8 with full sizes) and a random symmetric W_Q^⊤ W_K, the field of"
        " Sinkhorn attention is −∇F, and its joint Jacobian is symmetric on 6 random directions, both to 1e-9. The"
        " control is softmax attention on these tokens: its Jacobian must not be symmetric."
    ),
    reference="autograd of F by a symmetric Sinkhorn iteration written out in torch, run to rounding",
    formula=(
        "ẋ_i = Σ_j K_ij W_V x_j = −∇_i F, F = −½ Σ_ij K_ij log(K_ij / e^{C_ij}), C = X W_Q^⊤ W_K X^⊤, K 1 = K^⊤ 1 = 1"
    ),
    correction="",
)
def gradient_flow(trial: Trial) -> Evidence:
    """Field against the gradient of the energy, and asymmetry of its Jacobian; the control is that of softmax."""
    normal = normals(trial)
    count, dim = trial.size(8, 32), trial.size(3, 8)
    # Tokens in a cube and a matrix of bounded entries: scores stay below 3, so that Sinkhorn's algorithm is fast.
    tokens, root = torch.tanh(normal(count, dim)), torch.tanh(normal(dim, dim))
    matrix = (root + root.T) / (2 * dim**0.5)
    directions = normal(6, count, dim)

    def field(x: Tensor, updates: int) -> Tensor:
        found = balance(x @ matrix, x, tolerance=1e-13, max_steps=updates)
        return -attend(x @ matrix, x, x @ matrix, found.log_weight, scale=1.0).output

    def asymmetry(updates: int) -> float:
        """Return the asymmetry of the Jacobian as a form on the directions, relative to the form."""
        x = tokens.clone().requires_grad_()
        moved = field(x, updates)
        rows = [torch.autograd.grad(moved, x, each, retain_graph=True)[0] for each in directions]
        form = torch.einsum("and,bnd->ab", torch.stack(rows), directions)
        return float((form - form.T).norm() / form.norm())

    slope = gradient(lambda x: energy(x, matrix, 300), tokens)

    return Evidence(
        printed=widest(apart(field(tokens, 500), -slope), Gap(asymmetry(500), TIGHT)),
        control=Gap(asymmetry(trial.control(0, 500)), TIGHT),
        table={
            "updates to rounding": float(balance(tokens @ matrix, tokens, tolerance=1e-13).steps),
            "asymmetry of softmax": asymmetry(0),
            "asymmetry after 1 update": asymmetry(1),
            "after 3": asymmetry(3),
        },
    )
