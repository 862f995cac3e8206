"""Experiments with derivatives on a few passages: attention as a gradient field, and its ascent of the potential."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from massieu.accumulators.moments import token_hash
from massieu.geometry.jacobians import field_test
from massieu.inspection.response import Response, linear_response
from massieu.inspection.tokens import Tokens
from massieu.models.module_calls import block_input, hidden_tensors, with_input
from massieu.models.residual_stream import BlockCall, ResidualStream
from massieu.models.sublayers import ModuleOutput
from massieu.statistics import RowStatistics, attend
from massieu.taps import AttentionCall, tap
from massieu.taps.passes import in_this_thread

if TYPE_CHECKING:
    import pandas

__all__ = ["Fields", "probe_fields", "probe_responses"]


@dataclass(frozen=True)
class Fields:
    """Columns of the layers table that need derivatives, and sentences about blocks without them."""

    table: pandas.DataFrame
    notes: list[str] = field(default_factory=list)


def probe_fields(
    model: nn.Module,
    inputs: Mapping[str, Any],
    anatomy: ResidualStream,
    content: Tensor | Mapping[str, Tensor],
    keys: Sequence[object],
) -> Fields:
    r"""Test in every block whether attention is the gradient of :math:`\sum_h \log Z_h` and whether it ascends it.

    With :math:`x` a token where the block starts, :math:`a(x)` what attention adds to it and all keys and values
    frozen: the symmetry of :math:`J = \partial a / \partial x` and the sign of its symmetric part; the cosine of a with
    :math:`\nabla_x \sum_h \log Z_h`; whether :math:`\log Z` rises and entropies fall from x to x + a. A norm in
    front of attention is part of the map.

    Args:
        model: the model.
        inputs: keyword arguments of one forward pass over a few passages (see :class:`PassageSample`).
        anatomy: of the model.
        content: boolean, ``(batch, tokens)``, or one for each stack, as in :meth:`LayerObserver.batch`; a stack
            without a mask of its length counts whole.
        keys: what identifies the content of each row.

    Source:
        "A Probabilistic Interpretation of Transformers", Proposition 1, with frozen keys.
    """
    import pandas

    rows, notes = [], []
    scenes = _play(model, inputs, anatomy, None)
    moved = {key: (scene.state + scene.attention).detach() for key, scene in scenes.items()}
    after = {key: scene.call for key, scene in _play(model, inputs, anatomy, moved).items()}
    for key, scene in scenes.items():
        problem = _problem(scene)
        if problem is not None:
            notes.append(f"the gradient tests of {scene.block.name} are left out: {problem}")
            continue
        found = _test(scene, _tokens(scene, key[0], content, keys), after[key])
        rows.append({"stack": key[0], "layer": key[1], **found})
    columns = ["stack", "layer"]
    return Fields(pandas.DataFrame(rows, columns=None if rows else columns), notes)


def probe_responses(
    model: nn.Module,
    inputs: Mapping[str, Any],
    anatomy: ResidualStream,
    content: Tensor | Mapping[str, Tensor],
    key: object,
) -> dict[tuple[str, int], dict[str, Response]]:
    """Compare the outputs of heads with their linear response on one passage.

    Args:
        model: the model.
        inputs: keyword arguments of a forward pass over the passage.
        anatomy: of the model.
        content: as in :func:`probe_fields`.
        key: what identifies the passage.

    Returns:
        By stack and layer, for the columns "corollary_r2" and, with permuted keys, "corollary_control".

    Source:
        "A Probabilistic Interpretation of Transformers", Corollary 1.
    """
    found = {}
    for place, scene in _play(model, inputs, anatomy, None, gradients=False).items():
        tokens = _tokens(scene, place[0], content, [key])
        if scene.call is not None and _unseen(scene) is None and tokens.num_content:
            found[place] = _response(scene.call, tokens)
    return found


def _tokens(scene: _Scene, stack: str, content: Tensor | Mapping[str, Tensor], keys: Sequence[object]) -> Tokens:
    """Tokens that count in a stack: those of its mask, or all if it has none of its length."""
    whole = torch.ones(len(keys), scene.state.shape[0 if scene.tokens_first else 1], dtype=torch.bool)
    mask = content.get(stack, whole) if isinstance(content, Mapping) else content
    return Tokens.of(mask if mask.shape == whole.shape else whole, keys)


@dataclass
class _Scene:
    """One block in one pass: its input, what attention adds to it, and the attention call in between."""

    block: BlockCall
    state: Tensor
    tokens_first: bool
    attention: Tensor = field(default_factory=lambda: torch.zeros(0))
    call: AttentionCall | None = None
    calls: dict[str, int] = field(default_factory=dict)


def _play(
    model: nn.Module,
    inputs: Mapping[str, Any],
    anatomy: ResidualStream,
    states: Mapping[tuple[str, int], Tensor] | None,
    *,
    gradients: bool = True,
) -> dict[tuple[str, int], _Scene]:
    """One pass in which every block starts from a state of its own: the given ones, or a leaf with the usual value."""
    differentiable = states is None and gradients
    modules = dict(model.named_modules())
    readable = [block for block in anatomy.blocks if block.find("attention") is not None]
    scenes: dict[tuple[str, int], _Scene] = {}
    numbers: dict[str, int] = {}
    open_scenes: list[_Scene] = []

    def enter(name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            number = numbers[name] = numbers.get(name, -1) + 1
            block = next(block for block in readable if (block.name, block.number) == (name, number))
            key = (block.stack, block.layer)
            stream = block_input(args, kwargs)
            assert stream is not None
            place, usual = stream
            state = usual.detach().requires_grad_(differentiable) if states is None else states[key]
            first = any(getattr(part, "batch_first", True) is False for part in module.modules())
            scenes[key] = _Scene(block, state, first)
            open_scenes.append(scenes[key])
            return with_input(args, kwargs, place, state)

        return hook

    def see(name: str, path: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if open_scenes and open_scenes[-1].block.name == name:
                scene = open_scenes[-1]
                place = ModuleOutput(path, scene.calls.get(path, 0))
                scene.calls[path] = place.call + 1
                sublayer = scene.block.find("attention")
                assert sublayer is not None
                if place == sublayer.update:
                    # A copy: models add to updates in place.
                    scene.attention = next(hidden_tensors(output)).reshape(scene.state.shape) * sublayer.factor

        return hook

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        open_scenes.pop()

    def receive(call: AttentionCall) -> None:
        if open_scenes and open_scenes[-1].call is None:
            open_scenes[-1].call = call

    with ExitStack() as stack:
        # Only the plain formula can be differentiated twice, which products with the Jacobian need.
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(torch.enable_grad() if differentiable else torch.no_grad())
        for block in {block.name: block for block in readable}.values():
            sublayer = block.find("attention")
            assert sublayer is not None
            path = sublayer.update.path
            module = modules[block.name]
            stack.callback(module.register_forward_pre_hook(in_this_thread(enter(block.name)), with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(in_this_thread(leave)).remove)
            stack.callback(
                modules[f"{block.name}.{path}"].register_forward_hook(in_this_thread(see(block.name, path))).remove
            )
        stack.enter_context(tap(model, receive, this_thread=True))
        model(**inputs)
    return scenes


def _problem(scene: _Scene) -> str | None:
    """Reason against gradient tests of a block, None if there is none."""
    call, unseen = scene.call, _unseen(scene)
    if unseen is not None:
        return unseen
    assert call is not None
    assert call.query is not None
    if not call.query.requires_grad or not scene.attention.requires_grad:
        return "its attention cannot be differentiated"
    return None


def _unseen(scene: _Scene) -> str | None:
    """Reason why the attention of a block is not the softmax of visible scores, None if it is."""
    call = scene.call
    if call is None or call.query is None or call.key is None or call.value is None:
        return "its queries and keys could not be seen"
    if call.softcap is not None:
        return "its softcap leaves the exponential family"
    return None


def _test(scene: _Scene, tokens: Tokens, after: AttentionCall | None) -> dict[str, float]:
    call = scene.call
    assert call is not None
    assert call.query is not None
    update = _rows(scene.attention, tokens, scene.tokens_first).detach()
    before, mean_key = _statistics(call, call.query)
    (climb,) = torch.autograd.grad(call.query, scene.state, call.scale * mean_key.to(call.query), retain_graph=True)
    slope = _rows(climb, tokens, scene.tokens_first)
    found = {
        "ascent_cosine": float(torch.cosine_similarity(update, slope, dim=-1).double().mean()),
        "ascent_control": float(torch.cosine_similarity(update[tokens.permutation], slope, dim=-1).double().mean()),
    }
    if after is not None and after.query is not None:
        later, _ = _statistics(call, after.query)
        rises = (later.log_normalizer - before.log_normalizer).sum(1) > 0
        falls = later.entropy < before.entropy
        found["ascent_share"] = float(_queries(rises[:, None], tokens).double().mean())
        found["entropy_fall_share"] = float(_queries(falls, tokens).double().mean())
    return found | _field(scene, tokens)


def _statistics(call: AttentionCall, query: Tensor) -> tuple[RowStatistics, Tensor]:
    """Row statistics and mean keys of other queries over the keys of a call."""
    assert call.key is not None
    key = call.key.detach().double()
    weight = call.log_weight
    if weight is not None and weight.is_floating_point():
        weight = weight.detach().double()
    sink = None if call.sink is None else call.sink.detach().double()
    options = {"scale": call.scale, "causal": call.causal, "window": call.window, "sink": sink}
    attended = attend(query.detach().double(), key, key, weight, **options, statistics="light")  # type: ignore[arg-type]
    assert attended.statistics is not None
    return attended.statistics, attended.output


def _field(scene: _Scene, tokens: Tokens) -> dict[str, float]:
    call, state, update = scene.call, scene.state, scene.attention
    assert call is not None
    query = call.query
    assert query is not None
    start = torch.zeros_like(update, requires_grad=True)
    (inner,) = torch.autograd.grad(update, query, start, create_graph=True)
    (pulled,) = torch.autograd.grad(query, state, inner, create_graph=True)

    def push(direction: Tensor) -> Tensor:
        # The derivative of a vector-Jacobian product in its vector is the Jacobian-vector product.
        spread = _spread(direction, state, tokens, scene.tokens_first)
        (found,) = torch.autograd.grad(pulled, start, spread, retain_graph=True)
        return _rows(found, tokens, scene.tokens_first).double()

    def pull(direction: Tensor) -> Tensor:
        spread = _spread(direction, update, tokens, scene.tokens_first)
        (middle,) = torch.autograd.grad(update, query, spread, retain_graph=True)
        (found,) = torch.autograd.grad(query, state, middle, retain_graph=True)
        return _rows(found, tokens, scene.tokens_first).double()

    def draw(salt: int) -> Tensor:
        entries = torch.arange(update.shape[-1])
        bits = token_hash(tokens.hashes[:, None], entries, salt) & 1
        return (2.0 * bits - 1).double()

    found = field_test(push, pull, draw)
    return {
        "field_symmetry": found.symmetry,
        "field_symmetry_control": found.control,
        "field_positive": found.positive,
    }


def _response(call: AttentionCall, tokens: Tokens) -> dict[str, Response]:
    assert call.query is not None
    assert call.key is not None
    assert call.output is not None
    key = call.key.detach()
    target = _queries(call.output.detach(), tokens)
    columns = {"corollary_r2": key, "corollary_control": _permute_atoms(key, tokens)}
    return {name: Response.of(_queries(linear_response(call, own), tokens), target) for name, own in columns.items()}


def _permute_atoms(key: Tensor, tokens: Tokens) -> Tensor:
    """Keys of the content tokens of a sequence in another order."""
    flat = key.transpose(1, 2).reshape(-1, key.shape[1], key.shape[3]).clone()
    if len(flat) != tokens.num_places:
        return torch.full_like(key, torch.nan)
    places = tokens.index[: tokens.num_content]
    flat[places] = flat[places[tokens.permutation]]
    return flat.view(key.shape[0], key.shape[2], key.shape[1], key.shape[3]).transpose(1, 2)


def _rows(x: Tensor, tokens: Tokens, tokens_first: bool) -> Tensor:
    """The content tokens of a stream, ``(tokens, dim)``."""
    x = x.transpose(0, 1) if tokens_first and x.dim() == 3 else x
    return x.reshape(-1, x.shape[-1])[tokens.index[: tokens.num_content].to(x.device)]


def _spread(rows: Tensor, like: Tensor, tokens: Tokens, tokens_first: bool) -> Tensor:
    """A stream with given content tokens and zeros elsewhere."""
    flat = torch.zeros(tokens.num_places, rows.shape[-1], dtype=like.dtype, device=like.device)
    flat[tokens.index[: tokens.num_content].to(like.device)] = rows.to(flat)
    if tokens_first and like.dim() == 3:
        return flat.view(like.shape[1], like.shape[0], -1).transpose(0, 1)
    return flat.view(like.shape)


def _queries(x: Tensor, tokens: Tokens) -> Tensor:
    """The content tokens of ``(batch, heads, queries, ...)`` as ``(tokens, heads, ...)``."""
    return x.transpose(1, 2).flatten(0, 1)[tokens.index[: tokens.num_content].to(x.device)]
