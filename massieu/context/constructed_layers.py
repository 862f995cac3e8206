"""Attention layers with set weights that take steps of gradient descent on the examples of a context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from massieu.checks import UserError, check_count, check_number
from massieu.context.context_descent import check_matrix
from massieu.nn import LinearAttention, MeasureAttention, Transformer

__all__ = ["gradient_descent_transformer", "gradient_step_layer", "softmax_step_layer"]

Layer = TypeVar("Layer", LinearAttention, MeasureAttention)


def gradient_step_layer(
    input_dim: int,
    output_dim: int = 1,
    *,
    step: float,
    examples: int | None = None,
    start: Tensor | None = None,
    preconditioner: Tensor | None = None,
    curvature: float = 0.0,
    dtype: torch.dtype | None = torch.float64,
) -> LinearAttention:
    r"""Build a linear attention whose output, added to tokens :math:`(x_j, y_j)`, is a step of gradient descent.

    .. math:: W_Q = W_K = \begin{pmatrix} I & 0 \\ 0 & 0 \end{pmatrix}, \quad
              W_V = \begin{pmatrix} 0 & 0 \\ W_0 & -I \end{pmatrix}, \quad P = \frac{\eta}{N} I, \qquad
              y_j \leftarrow y_j - \Delta W x_j, \quad \Delta W = -\eta \nabla L(W_0)

    with the loss :math:`L(W) = \frac1{2N} \sum_i \|W x_i - y_i\|^2` of the :math:`N` examples. Applied again with the
    same weights it is the next step. Only the examples may be keys: pass ``lengths=examples``, with the queries as
    last tokens. A query starts as :math:`(x, -W_0 x)` and contains **minus** its prediction, see
    :func:`massieu.context.context_descent.predict`.

    Args:
        input_dim: size of :math:`x`.
        output_dim: size of :math:`y`.
        step: :math:`\eta`, the step size of descent.
        examples: :math:`N`; None divides by the number of keys (``form="mean"``).
        start: :math:`W_0`, shape ``(output_dim, input_dim)``; None for zero.
        preconditioner: :math:`A`, shape ``(input_dim, input_dim)``, for steps :math:`-\eta \nabla L(W) A`; then
            :math:`W_Q` has :math:`A` in the place of the identity.
        curvature: :math:`\gamma` of GD++, which moves the inputs too, :math:`x_j \leftarrow (I - \gamma S) x_j` with
            the second moment :math:`S = \frac1N \sum_i x_i x_i^\top` of the inputs in this layer; only from zero.
        dtype: of the weights; the construction is exact to rounding, hence double.

    Returns:
        A layer with one head, of size ``input_dim + output_dim``.

    Source:
        von Oswald et al. 2022, Proposition 1 and appendix A.10 (GD++), which do not state that the query is no key and
        the sign of its slot.

    Example:
        >>> from massieu.context.context_descent import regression_tokens
        >>> layer = gradient_step_layer(2, step=0.5)
        >>> inputs, ones = torch.eye(2).double()[None], torch.ones(1, 2, 2).double()
        >>> tokens = regression_tokens(inputs, ones[..., :1], ones[:, :1])
        >>> (tokens + layer(tokens, lengths=2))[0, -1].tolist()  # W = (1/4, 1/4), so that the prediction is 1/2
        [1.0, 1.0, -0.5]
    """
    check_number(step, "step")
    check_number(curvature, "curvature")
    if examples is not None:
        check_count(examples, "examples", remedy="pass None to divide by the number of keys")
    layer = _blank(LinearAttention, input_dim, output_dim, 1, dtype, form="mean" if examples is None else "sum")
    if start is not None and curvature:
        raise UserError(
            f"curvature must be zero with a start, got {curvature}; GD++ moves the inputs, so that start @ inputs is"
            " lost: subtract it from the targets and add it to the predictions"
        )
    matrix = check_matrix(preconditioner, "preconditioner", (input_dim, input_dim))
    with torch.no_grad():
        into_x, into_y = slice(None, input_dim), slice(input_dim, None)
        # In the dtype of the weights: an entry of step / examples in float would cost eight digits.
        identity, outputs = (torch.eye(size, dtype=dtype) for size in (input_dim, output_dim))
        layer.q_proj.weight[into_x, into_x] = identity if matrix is None else matrix.to(layer.q_proj.weight)
        layer.k_proj.weight[into_x, into_x] = identity
        value, out = _maps(layer)
        value[into_y] = _residual(input_dim, output_dim, start, dtype)
        scale = 1.0 if examples is None else 1.0 / examples
        out[into_y, into_y] = step * scale * outputs
        if curvature:
            value[into_x, into_x] = identity
            out[into_x, into_x] = -curvature * scale * identity
    return layer


def gradient_descent_transformer(
    input_dim: int,
    output_dim: int = 1,
    *,
    step: float | Sequence[float],
    layers: int,
    examples: int | None = None,
    start: Tensor | None = None,
    preconditioner: Tensor | None = None,
    curvature: float = 0.0,
    dtype: torch.dtype | None = torch.float64,
) -> Transformer:
    """Build a transformer whose layers are steps of gradient descent: no norms, no feed-forward nets, no positions.

    Args:
        step: one step size for all layers, which then share their weights, or one for each.
        layers: number of steps.
        input_dim, output_dim, examples, start, preconditioner, curvature, dtype: as in :func:`gradient_step_layer`.

    Example:
        >>> from massieu.context.context_descent import gradient_descent, predict
        >>> model = gradient_descent_transformer(3, 2, step=0.5, layers=10)
        >>> inputs, targets, query = (torch.randn(1, size, dim).double() for size, dim in ((5, 3), (5, 2), (1, 3)))
        >>> weights = gradient_descent(inputs, targets, step=0.5, steps=10)[-1]
        >>> bool((predict(model, inputs, targets, query) - query @ weights.mT).abs().max() < 1e-12)
        True
    """
    check_count(layers, "layers")
    shared = not isinstance(step, Sequence)
    sizes = [step] if not isinstance(step, Sequence) else list(step)
    if len(sizes) != (1 if shared else layers):
        raise UserError(f"step must be one number or one for each of {layers} layers, got {len(sizes)}; give all")

    def attention(size: float) -> LinearAttention:
        options: dict[str, Any] = {"examples": examples, "start": start, "preconditioner": preconditioner}
        return gradient_step_layer(input_dim, output_dim, step=size, curvature=curvature, dtype=dtype, **options)

    return Transformer(
        input_dim + output_dim,
        layers,
        1,
        attention=[attention(size) for size in sizes],
        shared_layers=shared,
        causal=False,
        positions=None,
        norm=None,
        hidden_dim=0,
        dtype=dtype,
    )


def softmax_step_layer(
    input_dim: int,
    output_dim: int = 1,
    *,
    step: float,
    beta: float,
    start: Tensor | None = None,
    dtype: torch.dtype | None = torch.float64,
) -> MeasureAttention:
    r"""Build a softmax attention of two heads whose output is nearly a step of gradient descent on centered examples.

    A head returns the mean of :math:`y` under the measure :math:`e^{\beta \langle x_i, x \rangle}`, which is a gradient
    of :math:`\log Z`; its derivative in :math:`\beta` at zero is a covariance. Two heads at :math:`\pm \beta` with
    opposite output maps are the central difference:

    .. math:: \frac{o(\beta) - o(-\beta)}{2 \beta} = \mathrm{Cov}(y, x) \, x + O(\beta^2)

    where :math:`\mathrm{Cov}(y - W_0 x, x)` is minus the slope at :math:`W_0` of
    :math:`\frac1{2N} \sum_i \|W (x_i - \bar x) - (y_i - \bar y)\|^2`. Tokens, keys and sign as in
    :func:`gradient_step_layer`; the number of examples need not be known.

    Args:
        step: step size of descent.
        beta: inverse temperature, positive; rounding errors grow like its inverse.
        input_dim, output_dim, start, dtype: as in :func:`gradient_step_layer`.

    Source:
        Derived here from "attention is the gradient of log Z"; it explains the two heads of softmax in von Oswald et
        al. 2022 for the step of one linear head.

    Example:
        >>> inputs, targets, query = (torch.randn(1, *shape).double() for shape in ((9, 2), (9, 1), (1, 2)))
        >>> from massieu.context.context_descent import regression_tokens
        >>> layer = softmax_step_layer(2, step=1.0, beta=1e-4)
        >>> tokens = regression_tokens(inputs, targets, query)
        >>> centered = inputs - inputs.mean(1, keepdim=True)
        >>> covariance = (targets * centered).mean(1)
        >>> torch.allclose(layer(tokens, lengths=9)[:, -1, -1], -(covariance * query[:, 0]).sum(-1), atol=1e-6)
        True
    """
    check_number(step, "step")
    check_number(beta, "beta", above=0, remedy="0.01 is close to the limit and far from rounding")
    layer = _blank(MeasureAttention, input_dim, output_dim, 2, dtype, scale=1.0)
    size = input_dim + output_dim
    into_x, into_y = slice(None, input_dim), slice(input_dim, None)
    value, out = _maps(layer)
    with torch.no_grad():
        for head, sign in enumerate((1.0, -1.0)):
            rows = slice(head * size, (head + 1) * size)
            layer.q_proj.weight[rows][into_x, into_x] = sign * beta * torch.eye(input_dim, dtype=dtype)
            layer.k_proj.weight[rows][into_x, into_x] = torch.eye(input_dim)
            value[rows][into_y] = _residual(input_dim, output_dim, start, dtype)
            out[:, rows][into_y, into_y] = sign * step / (2 * beta) * torch.eye(output_dim, dtype=dtype)
    return layer


def _blank(
    kind: type[Layer], input_dim: int, output_dim: int, num_heads: int, dtype: torch.dtype | None, **options: Any
) -> Layer:
    """Return a layer whose weights are zero, with heads of the size of a token."""
    check_count(input_dim, "input_dim")
    check_count(output_dim, "output_dim")
    size = input_dim + output_dim
    layer = kind(size, num_heads, head_dim=size, bias=False, dtype=dtype, **options)
    for weight in layer.parameters():
        nn.init.zeros_(weight)
    return layer


def _maps(layer: LinearAttention | MeasureAttention) -> tuple[Tensor, Tensor]:
    assert layer.v_proj is not None
    assert layer.out_proj is not None
    return layer.v_proj.weight, layer.out_proj.weight


def _residual(input_dim: int, output_dim: int, start: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    r"""Return the map of a token to :math:`W_0 x - y`."""
    matrix = check_matrix(start, "start", (output_dim, input_dim))
    first = torch.zeros(output_dim, input_dim) if matrix is None else matrix.detach()
    return torch.cat([first.to(dtype or torch.get_default_dtype()), -torch.eye(output_dim, dtype=dtype)], 1)
