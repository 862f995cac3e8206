"""Learning from the examples in a context; more tasks, predictors and layers are in the modules of this package."""

from massieu.context.baselines import predictors_for
from massieu.context.constructed_layers import gradient_descent_transformer, gradient_step_layer, softmax_step_layer
from massieu.context.curves import error_curve
from massieu.context.definition import learns_in_context
from massieu.context.hypotheses import separate
from massieu.context.learner_comparison import LearnerComparison, compare
from massieu.context.learning import Learned, learn
from massieu.context.learning_recipe import LearningRecipe
from massieu.context.models import LinearModel, SoftmaxModel
from massieu.context.optimum import Optimum, optimal_linear_attention
from massieu.context.pools import Pool, draw_pool
from massieu.context.predictors import LeastSquares, Predictor, Ridge, bayes_predictor
from massieu.context.prompts import Prompts
from massieu.context.tasks import Linear, Task, shifted, task_named

__all__ = [
    "Learned",
    "LearnerComparison",
    "LearningRecipe",
    "LeastSquares",
    "Linear",
    "LinearModel",
    "Optimum",
    "Pool",
    "Predictor",
    "Prompts",
    "Ridge",
    "SoftmaxModel",
    "Task",
    "bayes_predictor",
    "compare",
    "draw_pool",
    "error_curve",
    "gradient_descent_transformer",
    "gradient_step_layer",
    "learn",
    "learns_in_context",
    "optimal_linear_attention",
    "predictors_for",
    "separate",
    "shifted",
    "softmax_step_layer",
    "task_named",
]
