r"""Weights of queries and keys, recognized in a running model by the outputs of projections.

Blocks of the output of a projection have the norms of the observed queries (or keys), token by token, up to one factor.
Rotary positions keep norms, so this finds fused, interleaved, grouped, scaled and rotated projections alike. It finds
none behind a norm or another nonlinearity, nor for a first sequence of one token or of equal tokens.

This is the search for training loops: it uses the forward pass that runs anyway. The search by differentiation in
:mod:`massieu.models.head_weights` finds values, outputs and nonlinear projections too, and needs runs of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from massieu.taps import AttentionCall

__all__ = ["Seen", "is_projection", "score_sizes"]

TOKENS = 8  # compared
TOLERANCE = 0.02  # relative, of a norm: bfloat16 has eight bits
ROUNDING = 1e-5  # of a ratio of norms
FIRST, LATER = 64, 8  # steps of the power iteration
TINY = 1e-30  # smaller than any norm


class Seen(NamedTuple):
    """A projection and its output ``(..., tokens, width)``."""

    module: nn.Module
    output: Tensor


def is_projection(module: nn.Module) -> bool:
    """Return whether a module is ``nn.Linear``, or ``Conv1D`` of transformers, which holds the transpose."""
    weight = getattr(module, "weight", None)
    own = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    return own and isinstance(weight, Tensor) and weight.dim() == 2 and weight.is_floating_point()


def score_sizes(call: AttentionCall, seen: list[Seen], start: Tensor | None) -> tuple[dict[str, Tensor], Tensor | None]:
    r"""Return the largest singular value and Frobenius norm of :math:`A = \mathrm{scale}\, W_Q^\top W_K`, ``(heads,)``.

    .. math:: \sigma_1(A)^2 = \mathrm{scale}^2 \lambda_1(G_K G_Q), \quad
              |A|_F^2 = \mathrm{scale}^2 \, \mathrm{tr}\, G_K G_Q, \quad G_Q = W_Q W_Q^\top, \; G_K = W_K W_K^\top

    The eigenvalue comes from a power iteration that starts at the vectors of the last reading; as a Rayleigh quotient
    it is never above the true one.

    Args:
        call: the attention call.
        seen: the projections of its module that ran before it.
        start: vectors of the last reading, or None.

    Returns:
        The two by name, none if the weights were not found, and vectors for the next reading if finite.
    """
    weights = _weights(call, seen)
    if weights is None:
        return {}, None
    query, key = weights
    # Where only the scores were observed, the scale is in them.
    scale = abs(call.scale) if call.query is not None else query.shape[1] ** -0.5
    share = query.shape[0] // key.shape[0]
    left, right = query @ query.mT, (key @ key.mT).repeat_interleave(share, 0)
    vector = left.new_ones(left.shape[:2]) if start is None or start.shape != left.shape[:2] else start
    for _ in range(FIRST if vector is not start else LATER):
        vector = _unit((right @ (left @ vector[..., None]))[..., 0])
    image = (left @ vector[..., None])[..., 0]
    square = torch.einsum("hi,hij,hj->h", image, right, image) / (vector * image).sum(-1).clamp_min(TINY)
    size = (left * right.mT).sum((-2, -1))
    found = {"qk_norm": square, "qk_size": size}
    sizes = {name: scale * value.clamp_min(0).sqrt().double().cpu() for name, value in found.items()}
    return sizes, vector if bool(vector.isfinite().all()) else None


def _weights(call: AttentionCall, seen: list[Seen]) -> tuple[Tensor, Tensor] | None:
    """``(heads, head_dim, dim)`` and ``(key_heads, head_dim, context_dim)``."""
    if isinstance(call.module, nn.MultiheadAttention):
        return _multihead(call.module)
    if call.query is None or call.key is None:
        return None
    query, key = _match(call.query, seen), _match(call.key, seen)
    if query is None or key is None or call.query.shape[1] % key.shape[0]:
        return None
    return query, key


def _multihead(module: nn.MultiheadAttention) -> tuple[Tensor, Tensor]:
    if module.in_proj_weight is not None:
        query, key, _ = module.in_proj_weight.detach().chunk(3)
    else:
        query, key = module.q_proj_weight.detach(), module.k_proj_weight.detach()
    return query.float().unflatten(0, (module.num_heads, -1)), key.float().unflatten(0, (module.num_heads, -1))


def _match(observed: Tensor, seen: list[Seen]) -> Tensor | None:
    """Rows of the projections, ``(heads, head_dim, dim)``, whose outputs have the norms of the observed vectors."""
    batch, _, tokens, dim = observed.shape
    at = torch.linspace(0, tokens - 1, min(TOKENS, tokens)).long().to(observed.device)
    norms = observed[0, :, at].float().norm(dim=-1)  # (heads, some tokens)
    blocks: list[Tensor] = []
    sizes: list[Tensor] = []
    for module, output in seen:
        rows = _rows(output, batch, tokens)
        if rows is None or rows.shape[-1] % dim:
            continue
        weight = module.get_parameter("weight").detach()
        blocks += (weight if isinstance(module, nn.Linear) else weight.mT).unflatten(0, (-1, dim)).unbind(0)
        sizes.append(rows[at].float().unflatten(-1, (-1, dim)).norm(dim=-1).mT)
    if not blocks or tokens == 1:
        return None
    ratio = norms[:, None] / torch.cat(sizes)[None]  # (heads, blocks, some tokens)
    factor = ratio.mean(-1)
    spread = ((ratio / factor[..., None]) - 1).abs().amax(-1).nan_to_num(nan=torch.inf)
    best, place = spread.min(-1)
    if not bool((best < TOLERANCE).all()):
        return None
    # Tokens of equal norms cannot tell blocks apart: then all blocks that fit must be equal.
    for head, block in (spread <= 2 * best[:, None] + ROUNDING).nonzero().tolist():
        if not torch.equal(blocks[block], blocks[int(place[head])]):
            return None
    chosen = [factor[head, int(block)] * blocks[int(block)].float() for head, block in enumerate(place)]
    return torch.stack(chosen)


def _rows(output: Tensor, batch: int, tokens: int) -> Tensor | None:
    """The vectors of the first sequence, ``(tokens, width)``."""
    if output.dim() == 3 and output.shape[:2] == (batch, tokens):
        return output[0]
    if output.dim() == 3 and output.shape[:2] == (tokens, batch):
        return output[:, 0]
    return output[:tokens] if output.dim() == 2 and len(output) == batch * tokens else None


def _unit(vector: Tensor) -> Tensor:
    # Rescaled before the norm: entries of large products would overflow when squared.
    vector = vector / vector.abs().amax(-1, keepdim=True).clamp_min(TINY)
    return torch.nn.functional.normalize(vector, dim=-1)
