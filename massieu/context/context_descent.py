"""Regression in a context: its tokens, gradient descent on its examples, and the gap of a model to descent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from massieu.checks import UserError, check_count, check_floating, check_shape
from massieu.nn import Transformer

__all__ = ["descent_gaps", "gradient_descent", "predict", "regression_tokens", "token_states"]


def regression_tokens(inputs: Tensor, targets: Tensor, query: Tensor, start: Tensor | None = None) -> Tensor:
    r"""Return the tokens of examples :math:`(x_i, y_i)` and then of queries :math:`(x, -W_0 x)`.

    Args:
        inputs: shape ``(batch, examples, input_dim)``.
        targets: shape ``(batch, examples, output_dim)``.
        query: shape ``(batch, queries, input_dim)``.
        start: :math:`W_0`, shape ``(output_dim, input_dim)``; None for zero.

    Returns:
        Tokens, ``(batch, examples + queries, input_dim + output_dim)``.

    Source:
        von Oswald et al. 2022, section 2, where the slot of the query holds minus the first prediction.

    Example:
        >>> inputs, targets = torch.tensor([[[1.0], [2.0]]]), torch.tensor([[[3.0], [6.0]]])
        >>> regression_tokens(inputs, targets, torch.tensor([[[5.0]]]), start=torch.tensor([[0.1]])).tolist()
        [[[1.0, 3.0], [2.0, 6.0], [5.0, -0.5]]]
    """
    for name, tensor in (("inputs", inputs), ("targets", targets), ("query", query)):
        check_floating(tensor, name)
    fits = inputs.dim() == targets.dim() == query.dim() == 3
    if not (fits and inputs.shape[:2] == targets.shape[:2] and inputs.shape[::2] == query.shape[::2]):
        raise UserError(
            "inputs, targets and query must have shapes (batch, examples, input_dim), (batch, examples, output_dim) and"
            f" (batch, queries, input_dim), got {tuple(inputs.shape)}, {tuple(targets.shape)} and {tuple(query.shape)};"
            " a single output needs an axis, targets[..., None]"
        )
    matrix = check_matrix(start, "start", (targets.shape[2], inputs.shape[2]))
    slot = query.new_zeros(*query.shape[:2], targets.shape[2]) if matrix is None else -query @ matrix.to(query).mT
    return torch.cat([torch.cat([inputs, targets], -1), torch.cat([query, slot], -1)], 1)


def predict(model: nn.Module, inputs: Tensor, targets: Tensor, query: Tensor, start: Tensor | None = None) -> Tensor:
    """Return the predictions of a model of :func:`regression_tokens` for the queries: minus their slots.

    Args:
        model: from tokens and ``lengths`` to tokens, such as :func:`massieu.context.gradient_descent_transformer`.
        inputs, targets, query, start: as in :func:`regression_tokens`.

    Returns:
        Predictions, ``(batch, queries, output_dim)``.

    Example:
        >>> model = massieu.context.gradient_descent_transformer(1, step=1.0, layers=1)
        >>> inputs, query = torch.ones(1, 1, 1).double(), torch.full((1, 1, 1), 5.0).double()
        >>> predict(model, inputs, 3 * inputs, query).item()
        15.0
    """
    tokens = regression_tokens(inputs, targets, query, start)
    output: Tensor = model(tokens, lengths=inputs.shape[1])
    return -output[:, inputs.shape[1] :, inputs.shape[2] :]


def gradient_descent(
    inputs: Tensor,
    targets: Tensor,
    *,
    step: float | Sequence[float],
    steps: int,
    start: Tensor | None = None,
    preconditioner: Tensor | None = None,
) -> Tensor:
    r"""Return the iterates :math:`W_{k+1} = W_k - \eta_k \nabla L(W_k) A`, without attention.

    Returns:
        Weights, ``(steps + 1, batch, output_dim, input_dim)``, from :math:`W_0` on.

    Example:
        >>> gradient_descent(torch.ones(1, 1, 1), torch.ones(1, 1, 1), step=0.5, steps=3).flatten()
        tensor([0.0000, 0.5000, 0.7500, 0.8750])
    """
    check_count(steps, "steps", least=0)
    sizes = list(step) if isinstance(step, Sequence) else [step] * steps
    shape = (targets.shape[2], inputs.shape[2])
    matrix = check_matrix(start, "start", shape)
    weights = (inputs.new_zeros(shape) if matrix is None else matrix.to(inputs)).expand(inputs.shape[0], *shape)
    found = [weights]
    for size in sizes:
        slope = (inputs @ weights.mT - targets).mT @ inputs / inputs.shape[1]
        weights = weights - size * (slope if preconditioner is None else slope @ preconditioner.to(inputs))
        found.append(weights)
    return torch.stack(found)


def token_states(model: Transformer, tokens: Tensor, lengths: int | None = None) -> Tensor:
    """Return the tokens before the first and after every layer, ``(layers + 1, batch, tokens, dim)``.

    Example:
        >>> model = massieu.context.gradient_descent_transformer(1, step=0.5, layers=4)
        >>> token_states(model, torch.ones(1, 2, 2).double(), lengths=1)[:, 0, 0, 1].tolist()
        [1.0, 0.5, 0.25, 0.125, 0.0625]
    """
    states = [tokens]
    hooks = [block.register_forward_hook(lambda *call: states.append(call[-1])) for block in model.blocks]
    try:
        model(tokens, lengths=lengths)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(states)


def descent_gaps(
    model: Transformer,
    inputs: Tensor,
    targets: Tensor,
    query: Tensor,
    *,
    step: float | Sequence[float],
    start: Tensor | None = None,
    preconditioner: Tensor | None = None,
    query_is_key: bool = False,
) -> Tensor:
    r"""Return the distance of the tokens of a transformer from gradient descent, after each layer.

    After :math:`k` layers an example should contain :math:`y_j - (W_k - W_0) x_j` and a query :math:`-W_k x`. A layer
    whose keys contain the query fits its own prediction as if it were an example: from zero, one layer is the same
    (the slot is empty), and two are not; from :math:`W_0 \neq 0` the first differs already.

    Args:
        model: such as :func:`gradient_descent_transformer`.
        inputs, targets, query, start: as in :func:`regression_tokens`.
        step, preconditioner: of the descent to compare with.
        query_is_key: run the model with the queries among its keys, the variant without descent. If the layers divide
            by the number of keys, the first layer differs too.

    Returns:
        The largest absolute difference over all tokens, ``(layers,)``.

    Example:
        >>> inputs, targets, query = (torch.randn(1, *shape).double() for shape in ((9, 2), (9, 1), (1, 2)))
        >>> model = massieu.context.gradient_descent_transformer(2, step=0.5, layers=3, examples=9)
        >>> (descent_gaps(model, inputs, targets, query, step=0.5) < 1e-12).tolist()
        [True, True, True]
        >>> (descent_gaps(model, inputs, targets, query, step=0.5, query_is_key=True) < 1e-12).tolist()
        [True, False, False]
    """
    tokens = regression_tokens(inputs, targets, query, start)
    states = token_states(model, tokens, None if query_is_key else inputs.shape[1])
    steps, dim = len(states) - 1, inputs.shape[2]
    weights = gradient_descent(inputs, targets, step=step, steps=steps, start=start, preconditioner=preconditioner)
    slots = tokens[..., dim:] - tokens[..., :dim] @ (weights - weights[0]).mT
    expected = torch.cat([tokens[..., :dim].expand(*slots.shape[:-1], -1), slots], -1)
    return (states - expected).abs().flatten(1).amax(-1)[1:].detach()


def check_matrix(given: Tensor | None, name: str, shape: tuple[int, int]) -> Tensor | None:
    """Return the argument; raise unless it is None or a floating-point matrix of this shape."""
    if given is not None:
        check_floating(given, name)
        check_shape(given, name, *shape)
    return given
