"""Translation of the arguments of attention functions to scores in one form."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from massieu.taps.calls import Scores
from massieu.taps.masks import Visible, absent, add_bias, first_atoms, read_mask

__all__ = ["from_attend", "from_interface", "from_sdpa", "from_softmax"]

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "num_attn_heads", "heads")


def from_interface(
    name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Scores:
    """Translate a call ``function(module, query, key, value, mask, ...)`` of transformers' attention interface.

    Flags depend on the function: "sdpa" aligns causality with the first keys and cuts the others off, flash functions
    align it with the last ones and use the window, and functions in a model's own file use only the mask.
    """
    given = _bound(function, args, kwargs)
    query, key, value = given["query"], given["key"], given["value"]
    mask, bias = given.get("attention_mask"), given.get("position_bias")
    if name == "sdpa" and _is_causal(given) and mask is None and query.shape[2] > 1:
        visible = first_atoms(query.shape[2], key.shape[2], query.device)
    elif "flash" in name:
        visible = _flash(given, query, key, mask)
    else:
        visible = read_mask(_dense(mask, query, key), query.shape[2], key.shape[2])
    key, value, bias = _cut(visible, key, value, bias)
    scale, softcap = given.get("scaling"), given.get("softcap")
    sink = None if name == "sdpa" else given.get("s_aux")
    # A function that does not name the argument ignores it.
    names = inspect.signature(function).parameters
    if "flash" not in name and "softcap" not in names:
        softcap = None
    if "position_bias" in names:
        visible = add_bias(visible, bias)
    return Scores(
        query,
        key,
        value,
        log_weight=visible.log_weight,
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        causal=visible.causal,
        window=visible.window,
        sink=None if sink is None else sink.reshape(-1),
        softcap=None if softcap is None else float(softcap),
        output=_by_heads(result, query),
        present=visible.rows,
    )


def _by_heads(result: Any, query: Tensor) -> Tensor | None:
    """The output of an interface function, ``(batch, queries, heads, value_dim)``, with heads first."""
    output = result[0] if isinstance(result, tuple) else result
    shape = (query.shape[0], query.shape[2], query.shape[1])
    return output.transpose(1, 2) if isinstance(output, Tensor) and output.shape[:3] == shape else None


def from_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    result: Tensor,
) -> Scores:
    """Translate a call of ``scaled_dot_product_attention``, whose causality is aligned with the first keys."""
    query, key, value, output = (_four_axes(x) for x in (query, key, value, result))
    key, value = (x.expand(query.shape[0], *x.shape[1:]) for x in (key, value))
    queries, atoms = query.shape[2], key.shape[2]
    if is_causal:
        visible = first_atoms(queries, atoms, query.device)
    else:
        visible = read_mask(_materialized(attn_mask), queries, atoms)
    key, value, _ = _cut(visible, key, value, None)
    return Scores(
        query,
        key,
        value,
        log_weight=visible.log_weight,
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        causal=visible.causal,
        window=visible.window,
        output=output,
        present=visible.rows,
    )


def from_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_weight: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
    lengths: Tensor | int | None = None,
    sink: Tensor | float | None = None,
    statistics: Any = None,
    result: Any,
) -> Scores:
    """Translate a call of :func:`massieu.attend`; lengths become a mask of the keys."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    atoms = key.shape[-2]
    if lengths is not None:
        lengths = torch.as_tensor(lengths, device=query.device)
        lengths = lengths.reshape(*lengths.shape, *(1,) * (4 - lengths.dim()))
        inside = torch.arange(atoms, device=query.device) < lengths
        log_weight = _within(inside, log_weight)
    if sink is not None:
        sink = torch.as_tensor(sink, device=query.device).expand(query.shape[1])
    return Scores(
        query,
        key,
        value,
        log_weight=log_weight,
        scale=float(scale),
        causal=causal,
        window=window,
        sink=sink,
        output=result.output,
    )


def from_softmax(scores: Tensor, dim: int | None, module: nn.Module, rows: int | None) -> Scores | None:
    """Translate a softmax over complete scores, in a model that multiplies queries and keys itself; None for others.

    Softmax over keys is over the last axis of ``(batch, heads, queries, keys)``, or of three axes whose first holds
    batch and heads. The numbers of heads and of query rows must agree with those of the module, if known: attention in
    blocks or bands has other shapes.
    """
    if dim not in (-1, scores.dim() - 1):
        return None
    heads = _heads(module)
    if scores.dim() == 3 and heads and scores.shape[0] % heads == 0:
        scores = scores.unflatten(0, (-1, heads))
    if scores.dim() != 4 or (heads and scores.shape[1] != heads):
        return None
    if rows is not None and scores.shape[0] * scores.shape[2] != rows:
        return None
    # A model in half precision may add the smallest number of its dtype to scores in float32.
    own = next((p.dtype for p in module.parameters() if p.is_floating_point()), scores.dtype)
    gone = absent(scores) if own == scores.dtype else absent(scores) | absent(scores, own)
    if not bool(gone.any()):
        return Scores(scores=scores)
    some = (~gone).any(-1).any(1)
    return Scores(scores=scores.masked_fill(gone, -torch.inf), present=None if bool(some.all()) else some)


def _bound(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, those of ``**kwargs`` included."""
    signature = inspect.signature(function)
    given = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    return given


def _is_causal(given: dict[str, Any]) -> bool:
    declared = given.get("is_causal")
    return bool(getattr(given["module"], "is_causal", True) if declared is None else declared)


def _flash(given: dict[str, Any], query: Tensor, key: Tensor, mask: Tensor | None) -> Visible:
    keys = None if mask is None else mask[:, None, None, : key.shape[2]].bool()
    return Visible(keys, _is_causal(given) and query.shape[2] > 1, given.get("sliding_window"))


def _cut(visible: Visible, key: Tensor, value: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys, values and bias without the room of a cache."""
    atoms = visible.atoms
    return key[:, :, :atoms], value[:, :, :atoms], None if bias is None else bias[..., :atoms]


def _dense(mask: Any, query: Tensor, key: Tensor) -> Tensor | None:
    """Tensor of a mask; those of FlexAttention are functions of the indices."""
    if mask is None or isinstance(mask, Tensor):
        return _materialized(mask)
    from torch.nn.attention.flex_attention import create_mask

    shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    return create_mask(mask.mask_mod, *shape, device=query.device)


def _materialized(mask: Tensor | None) -> Tensor | None:
    # The masks of torch.nn.attention.bias are tensors without entries.
    materialize = getattr(mask, "_materialize", None)
    return mask if materialize is None or mask is None else materialize(mask.device)


def _within(inside: Tensor, log_weight: Tensor | None) -> Tensor:
    if log_weight is None:
        return inside
    return log_weight & inside if log_weight.dtype == torch.bool else log_weight.masked_fill(~inside, -torch.inf)


def _four_axes(x: Tensor) -> Tensor:
    if x.dim() > 4:
        return x.flatten(0, -4)
    return x if x.dim() == 4 else x.unsqueeze(-3) if x.dim() == 3 else x[None, None]


def _heads(module: nn.Module) -> int:
    return next((n for n in (getattr(module, name, None) for name in HEADS) if isinstance(n, int) and n > 0), 0)
