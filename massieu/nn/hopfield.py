"""Layer that associates two sets of patterns by the updates of a continuous Hopfield memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from massieu.checks import UserError, check_choice, check_count, check_number
from massieu.duality import convergence_message
from massieu.kernels.graphs import call_eagerly
from massieu.nn.association import Gradient, Settled, association, association_weights, settle
from massieu.nn.association_inputs import (
    build_scaling,
    check_presence,
    expand_heads,
    find_sizes,
    log_weight_of,
    split_input,
)
from massieu.nn.inputs import check_dtype, check_tokens

__all__ = ["Associated", "Hopfield"]

MOST_STEPS = 10_000
"""Largest number of updates without ``update_steps_max``."""

Patterns = Tensor | tuple[Tensor, Tensor, Tensor]
Pointwise = Literal["relu", "gelu", "silu", "selu", "celu", "tanh", "sigmoid"]


class Associated(NamedTuple):
    """Outcome of an association.

    Attributes:
        output: shape ``(batch, queries, output_size)``, or the first two exchanged.
        state: the settled states in the association space, ``(batch, heads, queries, hidden_size)``, in float32 at
            least.
        converged: whether the last update moved the state by no more than ``update_steps_eps``; ``(batch, heads,
            queries)``, as all that follow.
        residual: distance of the last update; infinite where there was none.
        steps: number of updates before the last association.
    """

    output: Tensor
    state: Tensor
    converged: Tensor
    residual: Tensor
    steps: Tensor

    @property
    def message(self) -> str:
        """Outcome as a sentence."""
        return convergence_message(self.converged, self.steps, "states")


class Hopfield(nn.Module):
    r"""Association of state patterns with stored patterns, by the updates of a continuous Hopfield memory.

    With the state :math:`\xi = W_Q r`, keys :math:`k_j = W_K y_j` and values :math:`v_j = W_V z_j` of every head,

    .. math:: \xi \leftarrow \sum_j p_j k_j \quad (\text{up to } s \text{ times}), \qquad
              o = \sum_j p_j v_j, \qquad p_j \propto e^{\beta \langle k_j, \xi \rangle}

    so that ``update_steps_max=0`` is softmax attention. Every state stops on its own when an update moves it by no more
    than ``update_steps_eps``, so that its result does not depend on the batch. A state that sees no pattern retrieves
    zero, and the output is the bias of the output map; an entry of the batch without any pattern is an error.
    Arguments have the names of the original layers; the page on memories compares them.

    Args:
        input_size: size of the state patterns; None where nothing is projected or normalized.
        hidden_size: size of the association space of one head; the share of a head in ``input_size`` by default.
        output_size: size of the output; ``input_size`` by default.
        pattern_size: size of the values of one head; ``hidden_size`` by default.
        num_heads: number of heads.
        scaling: :math:`\beta`: a number or a tensor, one for all heads or one for each; a ``nn.Parameter`` is
            learned. One over the square root of ``hidden_size`` by default, or one if nothing is projected.
        update_steps_max: updates of the state before the last association, at most; None to go on until all rest.
        update_steps_eps: tolerance, the distance of an update that counts as rest.
        gradient: ``"unroll"`` differentiates every update, ``"implicit"`` the fixed point: in the memory of one update,
            and a state that converged has no derivative in where it started. One that did not is unrolled.
        normalize_stored_pattern, normalize_state_pattern, normalize_pattern_projection: whether a layer norm comes
            first.
        normalize_hopfield_space: whether states and keys go through a layer norm in the association space, one for
            both and for all heads. The updates then run among the keys as they are; they are not normalized again.
        normalize_stored_pattern_affine, normalize_state_pattern_affine, normalize_pattern_projection_affine,
            normalize_hopfield_space_affine: whether that layer norm has weights.
        normalize_stored_pattern_eps, normalize_state_pattern_eps, normalize_pattern_projection_eps,
            normalize_hopfield_space_eps: floor of the variance in that layer norm.
        stored_pattern_as_static, state_pattern_as_static, pattern_projection_as_static: whether these patterns are
            taken as they are, without a projection, the same for all heads.
        pattern_projection_as_connected: whether values go through the projection of the stored patterns first,
            :math:`v_j = W_V W_K z_j`, with :math:`W_V` from all heads to each; static ones through that alone.
        stored_pattern_size, pattern_projection_size: sizes of these inputs; ``input_size`` by default.
        batch_first: whether the batch is the first axis, or the second.
        association_activation: function of every entry of the output.
        dropout: probability of dropping an entry of the output in training; weights never exist as a matrix.
        input_bias: whether projections have biases.
        concat_bias_pattern: whether there is one more pattern that every state sees, with a learned key and value for
            each head (``bias_k`` and ``bias_v``), as ``add_bias_kv`` of ``nn.MultiheadAttention``.
        add_zero_association: whether there is one more pattern, at the origin and with value zero.
        disable_out_projection: whether the heads are put side by side instead of projected.
        generator: draws the weights.

    Source:
        Ramsauer et al. 2020, eq. 10 and the layers of section 3; there values are connected.

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
        normalize_stored_pattern_eps: float = 1e-5,
        normalize_state_pattern: bool = True,
        normalize_state_pattern_affine: bool = True,
        normalize_state_pattern_eps: float = 1e-5,
        normalize_pattern_projection: bool = True,
        normalize_pattern_projection_affine: bool = True,
        normalize_pattern_projection_eps: float = 1e-5,
        normalize_hopfield_space: bool = False,
        normalize_hopfield_space_affine: bool = False,
        normalize_hopfield_space_eps: float = 1e-5,
        stored_pattern_as_static: bool = False,
        state_pattern_as_static: bool = False,
        pattern_projection_as_static: bool = False,
        pattern_projection_as_connected: bool = False,
        stored_pattern_size: int | None = None,
        pattern_projection_size: int | None = None,
        batch_first: bool = True,
        association_activation: Pointwise | None = None,
        dropout: float = 0.0,
        input_bias: bool = True,
        concat_bias_pattern: bool = False,
        add_zero_association: bool = False,
        disable_out_projection: bool = False,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {
            "num_heads": num_heads,
            "input_size": input_size,
            "output_size": output_size,
            "pattern_size": pattern_size,
            "stored_pattern_size": stored_pattern_size,
            "pattern_projection_size": pattern_projection_size,
        }
        for name, size in sizes.items():
            if size is not None:
                check_count(size, name)
        check_choice(gradient, "gradient", get_args(Gradient))
        check_choice(association_activation, "association_activation", (None, *get_args(Pointwise)))
        if update_steps_max is not None:
            check_count(update_steps_max, "update_steps_max", least=0, remedy="pass None for no limit")
        check_number(update_steps_eps, "update_steps_eps", least=0)
        if normalize_hopfield_space_affine and not normalize_hopfield_space:
            raise UserError(
                "normalize_hopfield_space_affine needs normalize_hopfield_space, got False; switch both on or off"
            )
        if concat_bias_pattern and (stored_pattern_as_static or pattern_projection_as_static):
            raise UserError(
                "concat_bias_pattern needs projected stored patterns and projections, got static ones;"
                " append a pattern of your own to those"
            )
        self.num_heads, self.gradient, self.batch_first = num_heads, gradient, batch_first
        self.update_steps_max, self.update_steps_eps = update_steps_max, float(update_steps_eps)
        self.association_activation = association_activation
        statics = (state_pattern_as_static, stored_pattern_as_static, pattern_projection_as_static)
        inputs = [input_size if size is None else size for size in (None, stored_pattern_size, pattern_projection_size)]
        untouched = all(statics) and disable_out_projection and not normalize_hopfield_space
        normalized = normalize_state_pattern or normalize_stored_pattern or normalize_pattern_projection
        self.state_size, self.stored_size, self.projection_size, self.hidden_size, self.pattern_size = find_sizes(
            (inputs[0], inputs[1], inputs[2]),
            hidden_size,
            pattern_size,
            num_heads,
            statics=statics,
            connected=pattern_projection_as_connected,
            needed=normalized or not untouched,
        )
        self.output_size = input_size if output_size is None else output_size
        factory: dict[str, Any] = {"device": device, "dtype": dtype}

        def norm(size: int | None, wanted: bool, affine: bool, eps: float) -> nn.Module:
            return nn.LayerNorm(size or 1, eps, affine, **factory) if wanted else nn.Identity()

        self.norm_state_pattern = norm(
            self.state_size, normalize_state_pattern, normalize_state_pattern_affine, normalize_state_pattern_eps
        )
        self.norm_stored_pattern = norm(
            self.stored_size, normalize_stored_pattern, normalize_stored_pattern_affine, normalize_stored_pattern_eps
        )
        self.norm_pattern_projection = norm(
            self.projection_size,
            normalize_pattern_projection,
            normalize_pattern_projection_affine,
            normalize_pattern_projection_eps,
        )
        self.norm_hopfield_space = norm(
            self.hidden_size, normalize_hopfield_space, normalize_hopfield_space_affine, normalize_hopfield_space_eps
        )
        hidden, values = num_heads * (self.hidden_size or 1), num_heads * (self.pattern_size or 1)

        def linear(wanted: bool, inputs: int | None, outputs: int) -> nn.Linear | None:
            return nn.Linear(inputs or 1, outputs, bias=input_bias, **factory) if wanted else None

        self.connected = pattern_projection_as_connected and not stored_pattern_as_static
        self.q_proj = linear(not state_pattern_as_static, self.state_size, hidden)
        self.k_proj = linear(not stored_pattern_as_static, self.stored_size, hidden)
        self.v_proj = linear(
            not pattern_projection_as_static, hidden if self.connected else self.projection_size, values
        )
        self.out_proj = linear(not disable_out_projection, values, self.output_size or 1)
        self.bias_k: nn.Parameter | None = None
        self.bias_v: nn.Parameter | None = None
        if concat_bias_pattern:
            self.bias_k = nn.Parameter(torch.empty(num_heads, self.hidden_size or 1, **factory))
            self.bias_v = nn.Parameter(torch.empty(num_heads, self.pattern_size or 1, **factory))
        self.dropout = nn.Dropout(dropout)
        self.sink = 0.0 if add_zero_association else None
        default = 1.0 if untouched or self.hidden_size is None else self.hidden_size**-0.5
        self.scaling = build_scaling(default if scaling is None else scaling, num_heads, self, device, dtype)
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Xavier-uniform matrices and zero biases, as in ``nn.MultiheadAttention``; norms start as the identity."""
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight, generator=generator)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for pattern in (self.bias_k, self.bias_v):
            if pattern is not None:
                nn.init.normal_(pattern, std=0.02, generator=generator)

    def extra_repr(self) -> str:
        """Options beside the projections."""
        steps = f"update_steps_max={self.update_steps_max}, update_steps_eps={self.update_steps_eps:g}"
        return f"num_heads={self.num_heads}, {steps}, gradient={self.gradient!r}, batch_first={self.batch_first}"

    def forward(
        self, input: Patterns, stored_pattern_padding_mask: Tensor | None = None, association_mask: Tensor | None = None
    ) -> Tensor:
        """The output alone; arguments as in :meth:`associate`."""
        return self.associate(input, stored_pattern_padding_mask, association_mask).output

    def associate(
        self, input: Patterns, stored_pattern_padding_mask: Tensor | None = None, association_mask: Tensor | None = None
    ) -> Associated:
        """Associate states with stored patterns.

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
        settled = self._settle(query, key, log_weight)
        heads = association(settled.state.to(key.dtype), key, value, self._beta(), log_weight, self.sink)
        output = heads.transpose(1, 2).flatten(2)
        output = output if self.out_proj is None else self.out_proj(output)
        if self.association_activation is not None:
            pointwise: Callable[[Tensor], Tensor] = getattr(functional, self.association_activation)
            output = pointwise(output)
        output = self.dropout(output)
        return Associated(output if self.batch_first else output.transpose(0, 1), *settled)

    @torch.no_grad()
    def get_association_matrix(
        self, input: Patterns, stored_pattern_padding_mask: Tensor | None = None, association_mask: Tensor | None = None
    ) -> Tensor:
        """Weights of the last association, ``(batch, heads, states, stored)``; a row without atoms is zero.

        A bias pattern and a zero association hold their share of the mass but have no columns.
        """
        query, key, _ = self._project(input)
        log_weight = self._log_weight(query, key, stored_pattern_padding_mask, association_mask)
        state = self._settle(query, key, log_weight).state.to(key.dtype)
        weights = association_weights(state, key, self._beta(), log_weight, self.sink)
        return weights if self.bias_k is None else weights[..., :-1]

    def _beta(self) -> Tensor | float:
        return self.scaling[:, None, None] if isinstance(self.scaling, Tensor) else self.scaling

    def _settle(self, query: Tensor, key: Tensor, log_weight: Tensor | None) -> Settled:
        steps = MOST_STEPS if self.update_steps_max is None else self.update_steps_max
        # Rounding to half precision is larger than any useful tolerance.
        wide = torch.promote_types(query.dtype, torch.float32)
        stored, beta = key.to(wide) if steps else key, self._beta()

        def update(state: Tensor) -> Tensor:
            return association(state, stored, stored, beta, log_weight, self.sink)

        options = {"steps": steps, "tolerance": self.update_steps_eps, "gradient": self.gradient}
        return call_eagerly(settle, update, query.to(wide), **options)

    def _project(self, input: Patterns) -> tuple[Tensor, Tensor, Tensor]:
        """States, keys and values by heads, ``(batch, heads, patterns, size)``; static ones have one head for all."""
        stored, state, projection = split_input(input)
        query = self._by_heads("state", state, self.state_size, self.norm_state_pattern, self.q_proj)
        key = self._by_heads("stored", stored, self.stored_size, self.norm_stored_pattern, self.k_proj)
        first = self.k_proj if self.connected else None
        norm, size = self.norm_pattern_projection, self.projection_size
        value = self._by_heads("projection", projection, size, norm, first, self.v_proj)
        query, key = self.norm_hopfield_space(query), self.norm_hopfield_space(key)
        query, key, value = expand_heads(query, key, value, self.num_heads)
        if self.bias_k is not None and self.bias_v is not None:
            key = torch.cat([key, self.bias_k[:, None].to(key).expand(len(key), -1, -1, -1)], -2)
            value = torch.cat([value, self.bias_v[:, None].to(value).expand(len(value), -1, -1, -1)], -2)
        return query, key, value

    def _by_heads(
        self, name: str, patterns: Tensor, size: int | None, norm: nn.Module, *maps: nn.Linear | None
    ) -> Tensor:
        check_tokens(patterns, name, patterns.shape[-1] if size is None and isinstance(patterns, Tensor) else size or 1)
        check_dtype(patterns, name, self)
        patterns = norm(patterns if self.batch_first else patterns.transpose(0, 1))
        linears = [linear for linear in maps if linear is not None]
        for linear in linears:
            patterns = linear(patterns)
        return patterns.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) if linears else patterns[:, None]

    def _log_weight(self, query: Tensor, key: Tensor, padding: Tensor | None, mask: Tensor | None) -> Tensor | None:
        biased = self.bias_k is not None
        atoms = key.shape[-2] - biased
        log_weight = log_weight_of(padding, mask, (*query.shape[:3], atoms), query)
        if padding is not None and not biased and self.sink is None:
            check_presence(padding, "or build the layer with add_zero_association=True")
        if biased and log_weight is not None:
            return functional.pad(log_weight, (0, 1), value=log_weight.dtype == torch.bool)
        return log_weight
