"""Learning from the examples in a context."""

from massieu.context.baselines import Learner, fitted_for, learner_for, predictors_for
from massieu.context.comparison import Comparison, compare, sensitivities
from massieu.context.construction import gradient_descent_transformer, gradient_step_layer, softmax_step_layer
from massieu.context.curves import error_curve
from massieu.context.definition import ContextLearning, learns_in_context, squared_error
from massieu.context.descent import descent_gaps, gradient_descent, predict, regression_tokens, token_states
from massieu.context.fitted import Boosting, Lasso, TrainedNetwork, Tree
from massieu.context.gradient_predictors import (
    GradientDescent,
    GradientDescentPlus,
    GradientStep,
    TunedDescent,
    best_rate,
)
from massieu.context.hidden_markov import ConceptMixture, SymbolPrompts, concept_mixture, draw_symbol_prompts
from massieu.context.hypotheses import separate
from massieu.context.learning import Learned, learn
from massieu.context.models import ContextModel, LinearModel, SoftmaxModel
from massieu.context.optimum import (
    FourthMoment,
    IsotropicOptimum,
    Optimum,
    gaussian_moment,
    independent_moment,
    isotropic_optimum,
    optimal_linear_attention,
    sampled_moment,
)
from massieu.context.pools import Pool, draw_pool
from massieu.context.predictors import Averaging, LeastSquares, Neighbors, Predictor, Ridge, bayes_predictor
from massieu.context.prompts import Interleaved, Layout, Pairs, Prompts, layout_named
from massieu.context.recipes import Recipe
from massieu.context.robustness import errors_under_shifts
from massieu.context.steps import Schedule, StepSizes, descent_loss, moment_eigenvalues, optimal_step_sizes
from massieu.context.tasks import (
    DecisionTree,
    Linear,
    Logistic,
    NoisyLinear,
    OrthogonalQueries,
    Quadrants,
    Quadratic,
    Scaled,
    Sine,
    Skewed,
    SparseLinear,
    Task,
    TwoLayer,
    shifted,
    task_named,
)

__all__ = [
    "Averaging",
    "Boosting",
    "Comparison",
    "ConceptMixture",
    "ContextLearning",
    "ContextModel",
    "DecisionTree",
    "FourthMoment",
    "GradientDescent",
    "GradientDescentPlus",
    "GradientStep",
    "Interleaved",
    "IsotropicOptimum",
    "Lasso",
    "Layout",
    "Learned",
    "Learner",
    "LeastSquares",
    "Linear",
    "LinearModel",
    "Logistic",
    "Neighbors",
    "NoisyLinear",
    "Optimum",
    "OrthogonalQueries",
    "Pairs",
    "Pool",
    "Predictor",
    "Prompts",
    "Quadrants",
    "Quadratic",
    "Recipe",
    "Ridge",
    "Scaled",
    "Schedule",
    "Sine",
    "Skewed",
    "SoftmaxModel",
    "SparseLinear",
    "StepSizes",
    "SymbolPrompts",
    "Task",
    "TrainedNetwork",
    "Tree",
    "TunedDescent",
    "TwoLayer",
    "bayes_predictor",
    "best_rate",
    "compare",
    "concept_mixture",
    "descent_gaps",
    "descent_loss",
    "draw_pool",
    "draw_symbol_prompts",
    "error_curve",
    "errors_under_shifts",
    "fitted_for",
    "gaussian_moment",
    "gradient_descent",
    "gradient_descent_transformer",
    "gradient_step_layer",
    "independent_moment",
    "isotropic_optimum",
    "layout_named",
    "learn",
    "learner_for",
    "learns_in_context",
    "moment_eigenvalues",
    "optimal_linear_attention",
    "optimal_step_sizes",
    "predict",
    "predictors_for",
    "regression_tokens",
    "sampled_moment",
    "sensitivities",
    "separate",
    "shifted",
    "softmax_step_layer",
    "squared_error",
    "task_named",
    "token_states",
]
