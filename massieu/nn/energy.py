"""Block that descends the joint energy of attention and a Hopfield memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from massieu.checks import UserError, check_count, check_number
from massieu.nn.association_inputs import build_scaling, check_presence, log_weight_of
from massieu.nn.inputs import check_dtype, check_tokens
from massieu.statistics import attend, row_statistics

__all__ = ["Descent", "EnergyTransformer"]


class Descent(NamedTuple):
    """States and energies of a block's steps.

    Attributes:
        state: shape ``(batch, tokens, dim)``.
        energy: before the first step and after each, shape ``(steps + 1, batch)``.
        descended: True where a step raised the energy by no more than rounding, shape ``(steps, batch)``.
    """

    state: Tensor
    energy: Tensor
    descended: Tensor


class EnergyTransformer(nn.Module):
    r"""Tokens that descend the energy of their attention and of a Hopfield memory.

    With :math:`g = \nabla L(x)` the layer norm of a token, :math:`L(x) = D \gamma \sqrt{\mathrm{Var}(x) + \epsilon} +
    \delta \cdot x`, queries :math:`q = W_Q g` and keys :math:`k = W_K g`,

    .. math:: E(g) = -\sum_{h, i} \beta_h^{-1} \log \sum_j e^{\beta_h \langle q_i^h, k_j^h \rangle}
                     - \tfrac12 \sum_{i, m} \mathrm{relu}(\langle \xi_m, g_i \rangle)^2, \qquad
              x \leftarrow x - \alpha \, \partial E / \partial g

    The gradient has a term for a token as query and one as key; ordinary attention lacks the second. Since L is convex
    for :math:`\gamma \ge 0`, in continuous time
    :math:`\dot E = -(\partial_g E)^\top \nabla^2 L \, (\partial_g E) \le 0`; a step of finite size may raise E, and
    :meth:`descend` checks. No matrix of size tokens x tokens is stored, not in training either.

    Args:
        dim: size of the tokens.
        num_heads: number of heads.
        head_dim: size of queries and keys; the share of a head in ``dim`` by default.
        num_memories: number of stored patterns :math:`\xi_m`; four times ``dim`` by default.
        steps: number of steps.
        step: :math:`\alpha`, positive.
        scaling: :math:`\beta`, as in :class:`massieu.nn.Hopfield`.
        exclude_self: whether a token is no key of itself.
        eps: :math:`\epsilon`.
        generator: draws the weights.

    Source:
        Hoover et al. 2023, "Energy Transformer", eq. 1 to 7; there tokens do not see themselves.

    Example:
        >>> block = EnergyTransformer(8, num_heads=2, generator=torch.Generator().manual_seed(0))
        >>> bool(block.descend(torch.randn(3, 5, 8)).descended.all())
        True
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int | None = None,
        *,
        num_memories: int | None = None,
        steps: int = 12,
        step: float = 0.1,
        scaling: float | Tensor | None = None,
        exclude_self: bool = False,
        eps: float = 1e-5,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("dim", dim), ("num_heads", num_heads)):
            check_count(size, name)
        if head_dim is None and dim % num_heads:
            raise UserError(f"dim must be a multiple of num_heads, got {dim} and {num_heads}; or say head_dim yourself")
        head_dim = check_count(dim // num_heads if head_dim is None else head_dim, "head_dim")
        num_memories = check_count(4 * dim if num_memories is None else num_memories, "num_memories")
        self.dim, self.num_heads = dim, num_heads
        self.steps, self.step = check_count(steps, "steps", least=0), check_number(step, "step", above=0)
        self.exclude_self, self.eps = exclude_self, eps
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.gain = nn.Parameter(torch.ones((), **factory))
        self.shift = nn.Parameter(torch.zeros(dim, **factory))
        self.query_weight = nn.Parameter(torch.empty(num_heads, head_dim, dim, **factory))
        self.key_weight = nn.Parameter(torch.empty(num_heads, head_dim, dim, **factory))
        self.memories = nn.Parameter(torch.empty(num_memories, dim, **factory))
        self.scaling = build_scaling(head_dim**-0.5 if scaling is None else scaling, num_heads, self, device, dtype)
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw weights with the variance that keeps the size of a token; the norm starts with gain one, shift zero."""
        for weight in (self.query_weight, self.key_weight, self.memories):
            nn.init.normal_(weight, std=self.dim**-0.5, generator=generator)
        nn.init.ones_(self.gain)
        nn.init.zeros_(self.shift)

    def extra_repr(self) -> str:
        """Options beside the parameters."""
        return f"dim={self.dim}, num_heads={self.num_heads}, steps={self.steps}, step={self.step:g}"

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """The tokens after all steps, ``(batch, tokens, dim)``.

        Args:
            x: shape ``(batch, tokens, dim)``.
            key_padding_mask: ``(batch, tokens)``, True where a token is absent: it neither moves nor moves others.
        """
        for _ in range(self.steps):
            x = x + self.step * self.force(x, key_padding_mask)
        return x

    def activations(self, x: Tensor) -> Tensor:
        r""":math:`g = \nabla L(x) = \gamma \, (x - \bar x) / \sqrt{\mathrm{Var}(x) + \epsilon} + \delta`."""
        check_tokens(x, "x", self.dim)
        check_dtype(x, "x", self)
        normed = functional.layer_norm(x, (self.dim,), eps=self.eps)
        return self.gain * normed + self.shift

    def energy(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Energy of every entry, shape ``(batch,)``; a token without visible keys adds no attention energy.

        In float32 at least, under autocast too: rounding to half precision is larger than the change of a step.
        """
        g = self.activations(x)
        with torch.autocast(x.device.type, enabled=False):
            return self._energy(g.to(torch.promote_types(g.dtype, torch.float32)), key_padding_mask)

    def force(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        r"""Minus the gradient of the energy in g, :math:`-\partial E / \partial g`, ``(batch, tokens, dim)``.

        In closed form, by two attentions. As a query a token is drawn to :math:`\sum_j p_{ij} k_j`; as a key to
        :math:`\sum_i p_{ij} q_i`, which is attention of keys to queries with log weights :math:`-\log Z_i`, times its
        own normalizer.
        """
        g = self.activations(x)
        query, key = self._heads(g)
        weight, seeing = self._visible(g, key_padding_mask)
        # Under autocast beta is wider than the projections.
        beta = self._beta(3)
        drawn, found = attend((beta * query).to(key.dtype), key, key, weight, scale=1.0, statistics="light")
        assert found is not None
        hidden = -torch.inf * torch.ones_like(found.log_normalizer)
        incoming = torch.where(seeing[:, None], -found.log_normalizer, hidden)[:, :, None]
        if self.exclude_self:
            incoming = incoming.masked_fill(self._diagonal(g), -torch.inf)
        pulled, back = attend((beta * key).to(key.dtype), query, query, incoming, scale=1.0, statistics="light")
        assert back is not None
        # The mass of a column, zero for a key that no query sees.
        mass = torch.nan_to_num(back.log_normalizer, nan=-torch.inf).exp().to(pulled.dtype)
        force = torch.einsum("bhnk,hkd->bnd", drawn, self.query_weight)
        force = force + torch.einsum("bhn,bhnk,hkd->bnd", mass, pulled, self.key_weight)
        force = force + functional.relu(g @ self.memories.mT) @ self.memories
        return force if key_padding_mask is None else force.masked_fill(key_padding_mask[..., None], 0.0)

    def descend(self, x: Tensor, key_padding_mask: Tensor | None = None, *, steps: int | None = None) -> Descent:
        """Take the steps of :meth:`forward`, or ``steps`` of them, and record the energies."""
        energies = [self.energy(x, key_padding_mask)]
        for _ in range(self.steps if steps is None else steps):
            x = x + self.step * self.force(x, key_padding_mask)
            energies.append(self.energy(x, key_padding_mask))
        energy = torch.stack(energies)
        rounding = 16 * torch.finfo(energy.dtype).eps * (1 + energy.detach().abs())
        return Descent(x, energy, energy[1:].detach() <= energy[:-1].detach() + rounding[:-1])

    def _energy(self, g: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        query, key = self._heads(g)
        weight, seeing = self._visible(g, key_padding_mask)
        log_normalizer = row_statistics((self._beta(3) * query).to(key.dtype), key, weight).log_normalizer
        # A row without atoms has no log normalizer: its gradient would be nan.
        attention = torch.where(seeing[:, None], log_normalizer, 0.0) / self._beta(2)
        memory = functional.relu(g @ self.memories.mT.to(g.dtype)).square().sum(-1)
        if key_padding_mask is not None:
            memory = memory.masked_fill(key_padding_mask, 0.0)
        return -attention.sum((1, 2)) - 0.5 * memory.sum(1)

    def _heads(self, g: Tensor) -> tuple[Tensor, Tensor]:
        query = torch.einsum("bnd,hkd->bhnk", g, self.query_weight.to(g.dtype))
        return query, torch.einsum("bnd,hkd->bhnk", g, self.key_weight.to(g.dtype))

    def _beta(self, axes: int) -> Tensor | float:
        """Beta for tensors with ``axes`` axes after the batch, heads first."""
        return self.scaling.reshape(-1, *[1] * (axes - 1)) if isinstance(self.scaling, Tensor) else self.scaling

    def _diagonal(self, g: Tensor) -> Tensor:
        return torch.eye(g.shape[1], dtype=torch.bool, device=g.device)

    def _visible(self, g: Tensor, key_padding_mask: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """Log weights of the visible atoms, and the present tokens ``(batch, tokens)`` that see at least one."""
        batch, tokens = g.shape[:2]
        if key_padding_mask is not None and key_padding_mask.dtype != torch.bool:
            raise UserError(
                f"key_padding_mask must be boolean, got {key_padding_mask.dtype}; it is True where a token is absent"
            )
        own = self._diagonal(g) if self.exclude_self else None
        weight = log_weight_of(key_padding_mask, own, (batch, self.num_heads, tokens, tokens), g)
        there = torch.ones(batch, tokens, dtype=torch.bool, device=g.device)
        if key_padding_mask is not None:
            check_presence(key_padding_mask, "they have no token")
            there = ~key_padding_mask
        return weight, there & (there.sum(1, keepdim=True) > int(self.exclude_self))
