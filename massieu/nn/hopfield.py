"""Hopfield memories as layers: association of two sets of patterns, pooling by trained states, and lookup."""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from massieu import statistics
from massieu.kernels.graphs import call_eagerly
from massieu.nn.association import Gradient, association, settle
from massieu.nn.block import Activation, FeedForward
from massieu.nn.checks import check_count, check_dtype, check_tokens, unknown
from massieu.nn.inputs import build_scaling, log_weight_of

__all__ = ["Associated", "Hopfield", "HopfieldEncoderLayer", "HopfieldLayer", "HopfieldPooling"]

MOST_STEPS = 10_000
"""Where a layer that iterates without limit stops nevertheless."""

Patterns = Tensor | tuple[Tensor, Tensor, Tensor]


class Associated(NamedTuple):
    """What an association found, and how the updates of every state ended.

    Attributes:
        output: shape ``(batch, queries, output_size)``, or the first two exchanged.
        state: the settled states in the association space, ``(batch, heads, queries, hidden_size)``.
        converged: whether the last update moved the state by no more than ``update_steps_eps``; ``(batch, heads,
            queries)``, as all that follow.
        residual: how far the last update moved it; infinite where there was none.
        steps: number of updates before the last association.
    """

    output: Tensor
    state: Tensor
    converged: Tensor
    residual: Tensor
    steps: Tensor


class Hopfield(nn.Module):
    r"""Association of state patterns with stored patterns, by the updates of a continuous Hopfield memory.

    With the state :math:`\xi = W_Q r`, keys :math:`k_j = W_K y_j` and values :math:`v_j = W_V z_j` of every head,

    .. math:: \xi \leftarrow \sum_j p_j k_j \quad (\text{up to } s \text{ times}), \qquad
              o = \sum_j p_j v_j, \qquad p_j \propto e^{\beta \langle k_j, \xi \rangle}

    so that ``update_steps_max=0`` is softmax attention, and s adds as many updates of the state. Every state stops by
    itself when an update moves it by no more than ``update_steps_eps``: its answer does not depend on the batch. A
    state that sees no pattern retrieves zero, and the output is the bias of the output map. Arguments have the names
    of the original layers; there the stopping is shared by the batch, and a tensor as ``scaling`` is not one per head.

    Args:
        input_size: size of the state patterns; None where nothing is projected or normalized.
        hidden_size: size of the association space of one head; the share of a head in ``input_size`` by default.
        output_size: size of the output; ``input_size`` by default.
        pattern_size: size of the values of one head; ``hidden_size`` by default.
        num_heads: number of heads.
        scaling: :math:`\beta`: a number or a tensor, one for all heads or one for each; a ``nn.Parameter`` is
            learned. One over the square root of ``hidden_size`` by default, or one if nothing is projected.
        update_steps_max: updates of the state before the last association, at most; None to go on until all rest.
        update_steps_eps: what counts as rest.
        gradient: ``"unroll"`` differentiates every update, ``"implicit"`` the fixed point: in the memory of one update,
            and a state that converged has no derivative in where it started.
        normalize_stored_pattern, normalize_state_pattern, normalize_pattern_projection: whether a layer norm comes
            first.
        normalize_stored_pattern_affine, normalize_state_pattern_affine, normalize_pattern_projection_affine: whether
            that layer norm has weights.
        stored_pattern_as_static, state_pattern_as_static, pattern_projection_as_static: whether these patterns are
            taken as they are, without a projection, the same for all heads.
        stored_pattern_size, pattern_projection_size: sizes of these inputs; ``input_size`` by default.
        batch_first: whether the batch is the first axis, or the second.
        dropout: probability of dropping an entry of the output in training; weights never exist as a matrix.
        input_bias: whether projections have biases.
        add_zero_association: whether there is one more pattern, at the origin and with value zero.
        disable_out_projection: whether the heads are put side by side instead of projected.
        generator: draws the weights.

    Source:
        Ramsauer et al. 2020, eq. 10 and the layers of section 3.

    Example:
        >>> static = dict.fromkeys(["stored_pattern_as_static", "state_pattern_as_static"], True)
        >>> plain = {"pattern_projection_as_static": True, "disable_out_projection": True} | static
        >>> raw = dict.fromkeys(["normalize_stored_pattern", "normalize_state_pattern"], False)
        >>> memory = Hopfield(scaling=8.0, update_steps_max=3, normalize_pattern_projection=False, **plain, **raw)
        >>> stored, state = torch.eye(3)[None], torch.tensor([[[0.9, 0.3, 0.0]]])
        >>> memory((stored, state, stored)).round(decimals=3)
        tensor([[[0.9990, 0.0000, 0.0000]]])
    """

    def __init__(
        self,
        input_size: int | None = None,
        hidden_size: int | None = None,
        output_size: int | None = None,
        pattern_size: int | None = None,
        num_heads: int = 1,
        scaling: float | Tensor | None = None,
        update_steps_max: int | None = 0,
        update_steps_eps: float = 1e-4,
        *,
        gradient: Gradient = "unroll",
        normalize_stored_pattern: bool = True,
        normalize_stored_pattern_affine: bool = True,
        normalize_state_pattern: bool = True,
        normalize_state_pattern_affine: bool = True,
        normalize_pattern_projection: bool = True,
        normalize_pattern_projection_affine: bool = True,
        stored_pattern_as_static: bool = False,
        state_pattern_as_static: bool = False,
        pattern_projection_as_static: bool = False,
        stored_pattern_size: int | None = None,
        pattern_projection_size: int | None = None,
        batch_first: bool = True,
        dropout: float = 0.0,
        input_bias: bool = True,
        add_zero_association: bool = False,
        disable_out_projection: bool = False,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_count(num_heads, "num_heads", "it is the number of heads")
        if gradient not in get_args(Gradient):
            unknown("gradient", get_args(Gradient), gradient)
        if update_steps_max is not None:
            check_count(update_steps_max, "update_steps_max", "pass None to go on until all states rest", least=0)
        if not update_steps_eps >= 0:
            raise ValueError(f"update_steps_eps must not be negative, got {update_steps_eps}; 1e-4 is usual")
        self.num_heads, self.gradient, self.batch_first = num_heads, gradient, batch_first
        self.update_steps_max, self.update_steps_eps = update_steps_max, float(update_steps_eps)
        self.state_size = input_size
        self.stored_size = input_size if stored_pattern_size is None else stored_pattern_size
        self.projection_size = input_size if pattern_projection_size is None else pattern_projection_size
        statics = (state_pattern_as_static, stored_pattern_as_static, pattern_projection_as_static)
        untouched = all(statics) and disable_out_projection
        sizes = (self.state_size, self.stored_size, self.projection_size)
        normalized = (normalize_state_pattern, normalize_stored_pattern, normalize_pattern_projection)
        if None in sizes and (any(normalized) or not untouched):
            raise ValueError(
                "input_size must be given unless all patterns are static, not normalized and not projected, got None;"
                " it is the size of the state patterns"
            )
        self.hidden_size = self._hidden_size(hidden_size, statics)
        self.pattern_size = (
            self.projection_size
            if pattern_projection_as_static
            else self.hidden_size
            if pattern_size is None
            else pattern_size
        )
        self.output_size = input_size if output_size is None else output_size
        factory: dict[str, Any] = {"device": device, "dtype": dtype}

        def norm(wanted: bool, size: int | None, affine: bool) -> nn.Module:
            return nn.LayerNorm(size or 1, elementwise_affine=affine, **factory) if wanted else nn.Identity()

        def linear(static: bool, inputs: int | None, outputs: int | None) -> nn.Linear | None:
            return None if static else nn.Linear(inputs or 1, num_heads * (outputs or 1), bias=input_bias, **factory)

        self.norm_state_pattern = norm(normalize_state_pattern, self.state_size, normalize_state_pattern_affine)
        self.norm_stored_pattern = norm(normalize_stored_pattern, self.stored_size, normalize_stored_pattern_affine)
        self.norm_pattern_projection = norm(
            normalize_pattern_projection, self.projection_size, normalize_pattern_projection_affine
        )
        self.q_proj = linear(state_pattern_as_static, self.state_size, self.hidden_size)
        self.k_proj = linear(stored_pattern_as_static, self.stored_size, self.hidden_size)
        self.v_proj = linear(pattern_projection_as_static, self.projection_size, self.pattern_size)
        self.out_proj: nn.Linear | None = None
        if not disable_out_projection:
            self.out_proj = nn.Linear(
                num_heads * (self.pattern_size or 1), self.output_size or 1, bias=input_bias, **factory
            )
        self.dropout = nn.Dropout(dropout)
        self.sink = 0.0 if add_zero_association else None
        default = 1.0 if untouched or self.hidden_size is None else self.hidden_size**-0.5
        self.scaling = build_scaling(default if scaling is None else scaling, num_heads, self, device, dtype)
        self.reset_parameters(generator)

    def _hidden_size(self, given: int | None, statics: tuple[bool, bool, bool]) -> int | None:
        """Size of the association space: that of the patterns that stay as they are, or the one that was given."""
        fixed = {size for size, static in zip((self.state_size, self.stored_size), statics, strict=False) if static}
        if len(fixed) > 1 or (fixed and given is not None and given not in fixed):
            raise ValueError(
                f"hidden_size must be the size of static patterns, got {given} with static patterns of"
                f" {', '.join(map(str, sorted(map(str, fixed))))}; leave it out, or project one of them"
            )
        if fixed:
            return fixed.pop()
        assert self.state_size is not None
        if given is None and self.state_size % self.num_heads:
            raise ValueError(
                f"input_size must be a multiple of num_heads, got {self.state_size} and {self.num_heads};"
                " or say hidden_size yourself"
            )
        size = self.state_size // self.num_heads if given is None else given
        check_count(size, "hidden_size", "it is the size of the association space of one head")
        return size

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Xavier-uniform matrices and zero biases, as in ``nn.MultiheadAttention``; norms start as the identity."""
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight, generator=generator)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def extra_repr(self) -> str:
        """The options that the projections do not show."""
        steps = f"update_steps_max={self.update_steps_max}, update_steps_eps={self.update_steps_eps:g}"
        return f"num_heads={self.num_heads}, {steps}, gradient={self.gradient!r}, batch_first={self.batch_first}"

    def forward(
        self,
        input: Patterns,
        stored_pattern_padding_mask: Tensor | None = None,
        association_mask: Tensor | None = None,
    ) -> Tensor:
        """The output alone; arguments as in :meth:`associate`."""
        return self.associate(input, stored_pattern_padding_mask, association_mask).output

    def associate(
        self,
        input: Patterns,
        stored_pattern_padding_mask: Tensor | None = None,
        association_mask: Tensor | None = None,
    ) -> Associated:
        """Associate states with stored patterns, and say how every state ended.

        Args:
            input: ``(stored, state, projection)``, each ``(batch, patterns, size)``, stored patterns and projections
                in equal number; or one tensor that serves as all three. A batch of one serves every entry.
            stored_pattern_padding_mask: ``(batch, stored)``, True where a stored pattern is absent, or a number that is
                added to its scores.
            association_mask: ``(states, stored)`` or ``(batch * heads, states, stored)``, True where a state does
                not see a pattern, or numbers that are added to the scores.
        """
        query, key, value = self._project(input)
        log_weight = self._log_weight(query, key, stored_pattern_padding_mask, association_mask)
        beta = self._beta()

        def update(state: Tensor) -> Tensor:
            return association(state, key, key, beta, log_weight, self.sink)

        steps = MOST_STEPS if self.update_steps_max is None else self.update_steps_max
        options = {"steps": steps, "tolerance": self.update_steps_eps, "gradient": self.gradient}
        settled = call_eagerly(settle, update, query, **options)
        heads = association(settled.state, key, value, beta, log_weight, self.sink)
        output = heads.transpose(1, 2).flatten(2)
        output = self.dropout(output if self.out_proj is None else self.out_proj(output))
        return Associated(output if self.batch_first else output.transpose(0, 1), *settled)

    @torch.no_grad()
    def get_association_matrix(
        self,
        input: Patterns,
        stored_pattern_padding_mask: Tensor | None = None,
        association_mask: Tensor | None = None,
    ) -> Tensor:
        """The weights of the last association, ``(batch, heads, states, stored)``; a row that sees nothing is zero.

        A zero association takes its share of the mass and has no column.
        """
        query, key, _ = self._project(input)
        state = self.associate(input, stored_pattern_padding_mask, association_mask).state
        log_weight = self._log_weight(query, key, stored_pattern_padding_mask, association_mask)
        scores = torch.einsum("...qd,...nd->...qn", self._beta() * state, key)
        if log_weight is not None and log_weight.dtype == torch.bool:
            log_weight = torch.zeros_like(log_weight, dtype=scores.dtype).masked_fill(~log_weight, -torch.inf)
        if self.sink is not None:
            zero = torch.zeros_like(scores[..., :1])
            scores = torch.cat([scores if log_weight is None else scores + log_weight, zero], -1)
            return statistics.attention.probabilities(scores)[..., :-1]
        return statistics.attention.probabilities(scores, log_weight)

    def _beta(self) -> Tensor | float:
        return self.scaling[:, None, None] if isinstance(self.scaling, Tensor) else self.scaling

    def _project(self, input: Patterns) -> tuple[Tensor, Tensor, Tensor]:
        """States, keys and values by heads, ``(batch, heads, patterns, size)``; static ones have one head for all."""
        stored, state, projection = (input,) * 3 if isinstance(input, Tensor) else _three(input)
        given = (
            ("state", state, self.state_size, self.norm_state_pattern, self.q_proj),
            ("stored", stored, self.stored_size, self.norm_stored_pattern, self.k_proj),
            ("projection", projection, self.projection_size, self.norm_pattern_projection, self.v_proj),
        )
        heads = []
        for name, patterns, size, norm, linear in given:
            check_tokens(
                patterns, name, patterns.shape[-1] if size is None and isinstance(patterns, Tensor) else size or 1
            )
            check_dtype(patterns, name, self)
            patterns = norm(patterns if self.batch_first else patterns.transpose(0, 1))
            own = (
                patterns[:, None]
                if linear is None
                else linear(patterns).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            )
            heads.append(own)
        query, key, value = heads
        if key.shape[-2] != value.shape[-2] or query.shape[-1] != key.shape[-1]:
            raise ValueError(
                "stored and projection must have as many patterns, and static patterns one size, got"
                f" {key.shape[-2]} and {value.shape[-2]} patterns of size {key.shape[-1]}, states of {query.shape[-1]};"
                " give every stored pattern its value"
            )
        batches = {each.shape[0] for each in heads} - {1}
        if len(batches) > 1:
            raise ValueError(
                f"input must have one batch size, or one, got {', '.join(map(str, sorted(batches)))};"
                " give every entry its patterns"
            )
        batch = batches.pop() if batches else 1
        return (
            query.expand(batch, self.num_heads, -1, -1),
            key.expand(batch, -1, -1, -1),
            value.expand(batch, -1, -1, -1),
        )

    def _log_weight(self, query: Tensor, key: Tensor, padding: Tensor | None, mask: Tensor | None) -> Tensor | None:
        return log_weight_of(padding, mask, (*query.shape[:3], key.shape[-2]), query)


class HopfieldPooling(nn.Module):
    """Pooling of a set of patterns by trained states: each state asks the set one question.

    Args:
        input_size: size of the patterns.
        quantity: number of states.
        trainable: whether the states (``pooling_weights``) are trained.
        options: those of :class:`Hopfield`.

    Example:
        >>> pool = HopfieldPooling(8, num_heads=2, quantity=3)
        >>> absent = torch.arange(5) >= torch.tensor([[5], [2]])
        >>> pool(torch.randn(2, 5, 8), stored_pattern_padding_mask=absent).shape
        torch.Size([2, 24])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int | None = None,
        output_size: int | None = None,
        pattern_size: int | None = None,
        num_heads: int = 1,
        *,
        quantity: int = 1,
        trainable: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        check_count(quantity, "quantity", "it is the number of states that pool")
        # A tensor serves as stored patterns and projections, whose sizes may differ from that of the states.
        self.hopfield = Hopfield(input_size, hidden_size, output_size, pattern_size, num_heads, **options)
        self.pooling_weights = _trained(quantity, input_size, trainable, options)

    def forward(
        self,
        input: Tensor | tuple[Tensor, Tensor],
        stored_pattern_padding_mask: Tensor | None = None,
        association_mask: Tensor | None = None,
    ) -> Tensor:
        """Pool ``(batch, patterns, size)``, or ``(stored, projection)``, to ``(batch, quantity * output_size)``."""
        return self.associate(input, stored_pattern_padding_mask, association_mask).output

    def associate(
        self,
        input: Tensor | tuple[Tensor, Tensor],
        stored_pattern_padding_mask: Tensor | None = None,
        association_mask: Tensor | None = None,
    ) -> Associated:
        """As :meth:`Hopfield.associate`, with one row of outputs for every entry of the batch."""
        found = self.hopfield.associate(self._patterns(input), stored_pattern_padding_mask, association_mask)
        output = found.output if self.hopfield.batch_first else found.output.transpose(0, 1)
        return found._replace(output=output.flatten(1))

    def get_association_matrix(
        self,
        input: Tensor | tuple[Tensor, Tensor],
        stored_pattern_padding_mask: Tensor | None = None,
        association_mask: Tensor | None = None,
    ) -> Tensor:
        """Which patterns each state pools, ``(batch, heads, quantity, patterns)``."""
        given = self._patterns(input)
        return self.hopfield.get_association_matrix(given, stored_pattern_padding_mask, association_mask)

    def _patterns(self, input: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        stored, projection = (input, input) if isinstance(input, Tensor) else _three((*input, None))[:2]
        return stored, _placed(self.pooling_weights, self.hopfield.batch_first), projection


class HopfieldLayer(nn.Module):
    """Lookup in trained stored patterns: a layer that memorizes prototypes.

    Args:
        input_size: size of the states.
        quantity: number of stored patterns.
        trainable: whether the stored patterns (``lookup_weights``) are trained.
        lookup_weights_as_separated: whether the values have their own weights (``target_weights``).
        lookup_targets_as_trainable: whether these are trained.
        options: those of :class:`Hopfield`.

    Example:
        >>> HopfieldLayer(8, quantity=100, output_size=3)(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 3])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int | None = None,
        output_size: int | None = None,
        pattern_size: int | None = None,
        num_heads: int = 1,
        *,
        quantity: int = 1,
        trainable: bool = True,
        lookup_weights_as_separated: bool = False,
        lookup_targets_as_trainable: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        check_count(quantity, "quantity", "it is the number of stored patterns")
        self.hopfield = Hopfield(input_size, hidden_size, output_size, pattern_size, num_heads, **options)
        stored, projection = self.hopfield.stored_size or 1, self.hopfield.projection_size or 1
        self.lookup_weights = _trained(quantity, stored, trainable, options)
        self.target_weights: nn.Parameter | None = None
        if lookup_weights_as_separated:
            self.target_weights = _trained(quantity, projection, lookup_targets_as_trainable, options)

    def forward(
        self,
        input: Tensor,
        stored_pattern_padding_mask: Tensor | None = None,
        association_mask: Tensor | None = None,
    ) -> Tensor:
        """Look up states ``(batch, states, input_size)``: ``(batch, states, output_size)``."""
        return self.associate(input, stored_pattern_padding_mask, association_mask).output

    def associate(
        self,
        input: Tensor,
        stored_pattern_padding_mask: Tensor | None = None,
        association_mask: Tensor | None = None,
    ) -> Associated:
        """As :meth:`Hopfield.associate`."""
        return self.hopfield.associate(self._patterns(input), stored_pattern_padding_mask, association_mask)

    def get_association_matrix(
        self,
        input: Tensor,
        stored_pattern_padding_mask: Tensor | None = None,
        association_mask: Tensor | None = None,
    ) -> Tensor:
        """Which stored patterns each state found, ``(batch, heads, states, quantity)``."""
        given = self._patterns(input)
        return self.hopfield.get_association_matrix(given, stored_pattern_padding_mask, association_mask)

    def _patterns(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = self.hopfield.batch_first
        stored = _placed(self.lookup_weights, first)
        return stored, input, stored if self.target_weights is None else _placed(self.target_weights, first)


class HopfieldEncoderLayer(nn.Module):
    """An encoder layer around a :class:`Hopfield` association, for ``nn.TransformerEncoder``.

    Args:
        hopfield_association: output and input of one size; it normalizes its patterns itself if it was built so.
        dim_feedforward: width of the feed-forward net; four times the input size by default.
        dropout: probability of dropping an entry of what is added to the residual connection.
        activation: of the feed-forward net.
        norm_first: whether norms stand before the sublayers, or after the residual sums.

    Example:
        >>> layer = HopfieldEncoderLayer(Hopfield(8, num_heads=2, update_steps_max=3))
        >>> encoder = torch.nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        >>> encoder(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        hopfield_association: Hopfield,
        dim_feedforward: int | None = None,
        dropout: float = 0.1,
        activation: Activation = "relu",
        *,
        norm_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(hopfield_association, Hopfield):
            got = type(hopfield_association).__name__
            raise TypeError(f"hopfield_association must be a Hopfield, got {got}; build it first, as in Hopfield(dim)")
        size = hopfield_association.state_size
        if size is None or hopfield_association.output_size != size:
            raise ValueError(
                f"hopfield_association must map a size to itself, got {size} to {hopfield_association.output_size};"
                " the output is added to the input"
            )
        # The name by which nn.TransformerEncoder asks for batch_first.
        self.self_attn = hopfield_association
        self.norm1 = nn.LayerNorm(size, device=device, dtype=dtype)
        self.norm2 = nn.LayerNorm(size, device=device, dtype=dtype)
        self.feed_forward = FeedForward(
            size, dim_feedforward, activation=activation, dropout=dropout, device=device, dtype=dtype
        )
        self.dropout = nn.Dropout(dropout)
        self.norm_first = norm_first

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Arguments as in ``nn.TransformerEncoderLayer``; ``is_causal`` only describes the mask."""

        def attention(x: Tensor) -> Tensor:
            attended: Tensor = self.dropout(self.self_attn(x, src_key_padding_mask, src_mask))
            return attended

        if self.norm_first:
            src = src + attention(self.norm1(src))
            output: Tensor = src + self.feed_forward(self.norm2(src))
            return output
        src = self.norm1(src + attention(src))
        output = self.norm2(src + self.feed_forward(src))
        return output


def _three(input: Any) -> Any:
    if not isinstance(input, (tuple, list)) or len(input) != 3:
        got = f"{len(input)} of them" if isinstance(input, (tuple, list)) else type(input).__name__
        raise TypeError(
            f"input must be a tensor, or stored patterns, states and projections, got {got}; pass one or all"
        )
    return input


def _trained(quantity: int, size: int, trainable: bool, options: dict[str, Any]) -> nn.Parameter:
    """Patterns that belong to a layer, ``(quantity, size)``, drawn with standard deviation 0.02."""
    patterns = torch.empty(quantity, size, device=options.get("device"), dtype=options.get("dtype"))
    return nn.Parameter(nn.init.normal_(patterns, std=0.02, generator=options.get("generator")), trainable)


def _placed(patterns: Tensor, batch_first: bool) -> Tensor:
    return patterns[None] if batch_first else patterns[:, None]
