"""Multi-head softmax attention whose output map may be tied to its scores."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from massieu.checks import UserError, check_choice
from massieu.kernels.graphs import call_eagerly
from massieu.measures import Measure
from massieu.nn.association import attend_eagerly
from massieu.nn.cache import KeyValueCache
from massieu.nn.inputs import check_measure
from massieu.nn.multihead import Heads, present
from massieu.nn.positions import rotate
from massieu.patterns import Pattern
from massieu.statistics import Attended

__all__ = ["MeasureAttention", "Tying"]

Tying = Literal["free", "tied", "source"]


class MeasureAttention(Heads):
    r"""Multi-head attention: keys are atoms, queries are natural parameters, outputs are gradients of log Z.

    With tokens as columns, :math:`A_h = \mathrm{scale} \, W_{Q,h}^\top W_{K,h}` and :math:`B_h = W_{O,h} W_{V,h}`,
    biases aside,

    .. math:: o_i = \sum_h B_h \sum_j p_{ij}^h x_j, \qquad
              p_{ij}^h = \frac{e^{x_i^\top A_h x_j + \log h_{ij}}}{Z_h(x_i)}

    The tying selects the gradient.

    ``"free"``
        Ordinary attention: in general not a gradient in :math:`x_i` of anything.
    ``"tied"``
        :math:`B_h = c_h A_h`: the values are the keys and the output map is the transposed query map, so that
        :math:`o_i = \nabla_{x_i} \sum_h c_h \log Z_h(x_i)` with the keys held fixed, biases, rotary positions and
        shared key heads included. The :math:`c_h` are learned (``coefficient``) and start at one.
    ``"source"``
        Free values with a learned source :math:`a_h` (``source``, zero at first), which weighs the atoms by
        :math:`e^{a_h^\top v_j}`. Each head then returns :math:`\partial_a \log \sum_j e^{s_{ij} + a^\top v_j}` at
        :math:`a = a_h`: a gradient in the source, whatever the values are. At zero this is free attention.

    With an ``activation`` the projected keys are natural parameters of a measure too, and its mean maps them to the
    expected statistics that the queries are multiplied with:

    .. math:: p_{ij}^h \propto e^{\mathrm{scale}\, q_i \cdot \nabla G(k_j)}

    For a :class:`~massieu.Gaussian` this is an affine map of the keys, which their projection can do itself; for any
    other family it is not, and the Fisher matrix is its affine approximation.

    ``dropout`` acts on the output: the weights never exist as a matrix.

    Args:
        dim: size of the tokens.
        num_heads: number of query heads.
        num_key_heads: number of key heads, a divisor of ``num_heads`` (grouped-query attention).
        head_dim: size of queries, keys and values; the share of a head in ``dim`` by default.
        context_dim: size of the tokens of a context, where it differs.
        bias: whether the projections have biases.
        tying: see above.
        causal: each token sees itself and the tokens before it.
        window: each token sees only tokens less than this many positions away.
        pattern: each token sees only tokens that a pattern of :mod:`massieu.patterns` lists, in self-attention; of a
            schedule every layer takes its own, ``schedule[layer]``. A cache needs one that is ``stable``: a window
            and not a ring, say, in which rows of earlier tokens change as more come.
        scale: factor of the inner products; one over the square root of ``head_dim`` by default.
        rotary: base of rotary positions, such as 10000.0; None for none.
        sink: whether every head has one more atom at the origin, with value zero and a learned log weight (``sink``,
            zero at first), that every query sees. It keeps a tied layer a gradient, counts in every statistic and
            has no place in a cache.
        activation: a measure on the space of a head, whose mean the keys pass through before rotary positions and the
            inner products, such as ``Hypercube(head_dim)`` (tanh) or ``Sphere(head_dim)``; None for keys as projected.
            Its parameters are fixed and not part of the state of the layer.
        dropout: probability of dropping an entry of the output in training.
        generator: draws the weights.

    Source:
        "A Probabilistic Interpretation of Transformers", Proposition 1a, with weights, and section 6 for the
        activation. It takes values = keys and leaves heads with weights open (section 5); :math:`B = cA` is when they
        have a potential, and for free values the gradient is the one in a source.

    Example:
        >>> layer = MeasureAttention(16, num_heads=4, tying="tied")
        >>> x = torch.randn(2, 5, 16, requires_grad=True)
        >>> output, statistics = layer(x, context=x.detach(), return_statistics=True)
        >>> (slope,) = torch.autograd.grad(statistics.log_normalizer.sum(), x)
        >>> torch.allclose(output, slope, atol=1e-6)
        True
    """

    cache_type = KeyValueCache

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_key_heads: int | None = None,
        head_dim: int | None = None,
        *,
        context_dim: int | None = None,
        bias: bool = True,
        tying: Tying = "free",
        causal: bool = False,
        window: int | None = None,
        pattern: Pattern | None = None,
        scale: float | None = None,
        rotary: float | None = None,
        sink: bool = False,
        activation: Measure | None = None,
        dropout: float = 0.0,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_choice(tying, "tying", get_args(Tying))
        super().__init__(
            dim,
            num_heads,
            num_key_heads,
            head_dim,
            context_dim=context_dim,
            bias=bias,
            has_values=tying != "tied",
            causal=causal,
            window=window,
            rotary=rotary,
            dropout=dropout,
            device=device,
            dtype=dtype,
        )
        if pattern is not None and not isinstance(pattern, Pattern):
            raise UserError(
                f"pattern must be one of massieu.patterns, got {type(pattern).__name__}; of a schedule take"
                " schedule[layer], and from_mask makes a pattern of a boolean matrix"
            )
        _check_activation(activation, self.head_dim)
        self.tying, self.pattern, self.activation = tying, pattern, activation
        self.scale = self.head_dim**-0.5 if scale is None else scale
        if tying == "tied":
            self.coefficient = nn.Parameter(torch.ones(num_heads, device=device, dtype=dtype))
        if tying == "source":
            self.source = nn.Parameter(torch.zeros(num_heads, self.head_dim, device=device, dtype=dtype))
        self.sink = nn.Parameter(torch.zeros(num_heads, device=device, dtype=dtype)) if sink else None
        self.reset_parameters(generator)

    def extra_repr(self) -> str:
        """Options beside the projections."""
        shown = f"tying={self.tying!r}, {super().extra_repr()}, sink={self.sink is not None}"
        options = {"pattern": self.pattern, "activation": self.activation}
        return shown + "".join(f", {name}={option!r}" for name, option in options.items() if option is not None)

    def activate(self, key: Tensor) -> Tensor:
        """Means of the members of the activation's family that have the projected keys as natural parameters."""
        return key if self.activation is None else call_eagerly(self.activation.mean, key)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        log_weight: Tensor | None = None,
        *,
        lengths: Tensor | int | None = None,
        cache: KeyValueCache | None = None,
        return_statistics: bool = False,
    ) -> Tensor | Attended:
        """Attend from the tokens to themselves or to a context.

        Args:
            x: shape ``(batch, queries, dim)``.
            context: tokens that give keys and values, ``(batch, atoms, context_dim)``; those of ``x`` by default.
            log_weight: added to the scores; broadcasts to ``(batch, heads, queries, atoms)``. A boolean mask is True
                where the atom is present: ``mask[:, None, None, :]`` for padding.
            lengths: number of atoms present, from the first; ``(batch,)`` or one for all. With the query as last
                token, ``lengths=tokens - 1`` keeps it out of the keys.
            cache: keys and values of earlier tokens, which this call extends; the atoms are then all tokens so far.
            return_statistics: whether to return the statistics of every row too.

        Returns:
            The output, ``(batch, queries, dim)``, or with statistics ``(output, statistics)``, whose fields have shape
            ``(batch, heads, queries)``.
        """
        self.check_cache(context, cache)
        if self.pattern is not None and context is not None:
            raise UserError(
                "a pattern is for self-attention, got a context; build the layer with pattern=None and pass a mask as"
                " log_weight"
            )
        if self.pattern is not None and cache is not None and not self.pattern.stable:
            raise UserError(
                f"a cache needs a pattern whose rows do not depend on the length, got {self.pattern!r}; pass it for all"
                " tokens to come, as pattern.laid_out(length), or go without a cache"
            )
        query, key, value = self.project(x, context, 0 if cache is None else cache.length)
        if cache is not None:
            key, value = cache.append(key, value)
        value = key if value is None else value
        if self.tying == "source":
            check_measure(query, key, log_weight, lengths)
            log_weight = _add_log_weight(self._tilt(value, lengths), log_weight)
        if self.pattern is not None:
            mask = call_eagerly(_rows, self.pattern, query.shape[-2], key.shape[-2]).to(query.device)
            log_weight = _present(mask, log_weight)
        heads, rows = attend_eagerly(
            query,
            key,
            value,
            log_weight,
            scale=self.scale,
            causal=self.causal,
            window=self.window,
            lengths=lengths,
            sink=self.sink,
            statistics="full" if return_statistics else None,
        )
        output = self._pull_back(heads, key.shape[-2]) if self.tying == "tied" else self.finish(heads)
        return Attended(output, rows) if return_statistics else output

    def new_cache(self, capacity: int = 0) -> KeyValueCache:
        """An empty cache for this layer."""
        return KeyValueCache(capacity)

    def matrices(self) -> tuple[Tensor, Tensor]:
        r"""The maps :math:`A_h` and :math:`B_h` of every head, each ``(heads, dim, context_dim)``, without biases.

        An activation between the two factors of :math:`A_h` is left out, as are rotary positions.

        Example:
            >>> score, output = MeasureAttention(16, num_heads=4, tying="tied").matrices()
            >>> torch.equal(score, output)
            True
        """
        share = self.num_heads // self.num_key_heads
        query = self.q_proj.weight.unflatten(0, (self.num_heads, -1))
        key = self.k_proj.weight.unflatten(0, (self.num_key_heads, -1)).repeat_interleave(share, 0)
        score = self.scale * torch.einsum("hkd,hke->hde", query, key)
        if self.v_proj is None or self.out_proj is None:
            return score, self.coefficient[:, None, None] * score
        value = self.v_proj.weight.unflatten(0, (self.num_key_heads, -1)).repeat_interleave(share, 0)
        out = self.out_proj.weight.unflatten(1, (self.num_heads, -1))
        return score, torch.einsum("dhk,hke->hde", out, value)

    def _tilt(self, value: Tensor, lengths: Tensor | int | None) -> Tensor:
        """Log weights of the source, ``(batch, heads, 1, atoms)``, zero in the padding."""
        source = self.source.unflatten(0, (self.num_key_heads, -1))
        tilt = torch.einsum("gsk,bgnk->bgsn", source, value).flatten(1, 2).unsqueeze(2)
        return tilt if lengths is None else tilt.masked_fill(~present(lengths, value.shape[-2], value.device), 0.0)

    def _pull_back(self, mean: Tensor, atoms: int) -> Tensor:
        """Map mean keys to the gradient in the tokens, by the chain rule through the query map."""
        if self.rotary is not None:
            mean = rotate(mean, atoms - mean.shape[-2], base=self.rotary, inverse=True)
        mean = self.scale * self.coefficient[:, None, None] * mean
        output: Tensor = self.dropout(functional.linear(self.merge(mean), self.q_proj.weight.mT))
        return output


def _add_log_weight(own: Tensor, given: Tensor | None) -> Tensor:
    if given is None:
        return own
    if given.dtype == torch.bool:
        given = torch.zeros(given.shape, device=given.device, dtype=own.dtype).masked_fill(~given, -torch.inf)
    return own + given


def _rows(pattern: Pattern, queries: int, atoms: int) -> Tensor:
    """Rows of a pattern for the last tokens, as a boolean mask ``(queries, atoms)``."""
    return torch.from_numpy(pattern.at(atoms).unpack(slice(atoms - queries, atoms)))


def _present(mask: Tensor, given: Tensor | None) -> Tensor:
    if given is None:
        return mask
    return given & mask if given.dtype == torch.bool else given.masked_fill(~mask, -torch.inf)


def _check_activation(activation: Any, head_dim: int) -> None:
    if activation is None:
        return
    if not isinstance(activation, Measure):
        name = activation.__name__ if isinstance(activation, type) else type(activation).__name__
        raise UserError(f"activation must be a massieu.Measure, got {name}; massieu.Hypercube(head_dim) is tanh")
    if activation.dim != head_dim or activation.batch_shape:
        raise UserError(
            f"activation must be one measure of dimension head_dim = {head_dim}, got {activation!r} of dimension"
            f" {activation.dim} and batch {activation.batch_shape}; build it for the size of a head"
        )
