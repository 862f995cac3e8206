"""Learning from the examples in a context."""

from massieu.context.construction import gradient_descent_transformer, gradient_step_layer, softmax_step_layer
from massieu.context.descent import descent_gaps, gradient_descent, predict, regression_tokens, token_states

__all__ = [
    "descent_gaps",
    "gradient_descent",
    "gradient_descent_transformer",
    "gradient_step_layer",
    "predict",
    "regression_tokens",
    "softmax_step_layer",
    "token_states",
]
