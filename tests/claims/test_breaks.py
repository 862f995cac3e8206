"""Every claim can go wrong: code that is wrong changes its verdict."""

import importlib
from dataclasses import fields, replace

import pytest
import torch

pytest.importorskip("scipy")
pytest.importorskip("pandas")
pytest.importorskip("transformers")
from massieu import measures
from massieu.claims import all_claims, examine, select
from massieu.claims.dynamics import hopfield_steps, operator
from massieu.claims.models import feed_forward, key_laws, trained_model
from massieu.claims.recent import freezing
from massieu.context import LeastSquares, Linear, LinearModel, SoftmaxModel, optimum, step_sizes
from massieu.context.hidden_markov import ConceptMixture
from massieu.dynamics import evolution, maps, particles
from massieu.memory import Classical, Continuous, Dense, Exponential, Kernel, Sparse
from massieu.nn import LinearAttention, MeasureAttention
from massieu.patterns import Schedule, dilated, full, star, window


def stretched(found, factor):
    """All numbers in a result times a factor; of a solver's result, those of its first field."""
    if found is None or (isinstance(found, torch.Tensor) and not found.is_floating_point()):
        return found
    if isinstance(found, tuple):
        values = [stretched(each, factor) for each in found]
        return type(found)(*values) if hasattr(found, "_fields") else tuple(values)
    if isinstance(found, torch.Tensor | int | float):
        return found * factor
    first = fields(found)[0].name
    return replace(found, **{first: getattr(found, first) * factor})


def changed(change):
    """Break a function by a change of its result."""
    return lambda original: lambda *given, **options: change(original(*given, **options))


def scaled(factor, name="weights"):
    """Break a function by a factor on one field of its result."""

    def change(found):
        value = {name: getattr(found, name) * factor}
        return found._replace(**value) if hasattr(found, "_replace") else replace(found, **value)

    return changed(change)


def turned(by=0.5):
    """Break a solver by noise on its weights, of a share of their length."""

    def change(found):
        noise = torch.randn(found.weights.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return replace(found, weights=found.weights + by * found.weights.norm() * noise / noise.norm())

    return changed(change)


def shortened(original):
    """Break training: the weights stay those after the first step."""

    def train(*given, steps, **options):
        return replace(original(*given, steps=steps, **options), weights=original(*given, steps=1, **options).weights)

    return train


def slowed(original):
    """Break training: its steps shrink, as those of gradient descent do."""
    return lambda problem, method, **options: original(problem, "gd", **options)


def query_in_output(original):
    """Break attention: its outputs keep something of the queries."""

    def attend(query, *rest, **options):
        found = original(query, *rest, **options)
        return found._replace(output=found.output + 1e-3 * query)

    return attend


def without_a_start(original):
    """Break a task: the start token looks like any other."""

    def sequences(*given):
        inputs, targets = original(*given)
        inputs[..., 0] = 0
        return inputs, targets

    return sequences


def same_codes(found):
    codes = found.codes.clone()
    codes[1] = codes[2]
    return replace(found, codes=codes)


def shifted_keys(original):
    return lambda dim, keys, values: original(dim, keys + 3 * keys.diff().min() * torch.arange(len(keys)), values)


coarse = changed(lambda found: replace(found, identifiers=found.identifiers // 1000))
CONSTRUCTION, MEMORIZATION = "universal.construction", "universal.memorization"
NARROW, SPARSE = "universal.narrow_construction", "universal.sparse_construction"
FINITE, TRAJECTORY, PATH = "margin.finite", "margin.trajectory", "margin.path"

# Module (or several) or class, the name of its function, a factor on the result or a wrong function, and claims that must notice.
BREAKS = [
    # Families, duality and thermodynamics
    (measures.Points, "log_normalizer", 1 + 1e-6, ["C2", "C36"]),
    (measures.Points, "mean", 1 + 1e-6, ["C4", "C5", "C6", "C9", "C15", "C37"]),
    (measures.Points, "fisher", 1 + 1e-6, ["C5", "C18"]),
    (measures.Hypercube, "mean", 1 + 1e-6, ["C37", "C53"]),
    (measures.Hypercube, "fisher", 1 + 1e-3, ["C53"]),
    (measures.Poisson, "mean", 1 + 1e-6, ["C53"]),
    (measures.Gaussian, "fisher", 1 + 1e-6, ["C53"]),
    (measures.Gamma, "log_normalizer", 1 + 1e-6, ["C1"]),
    (measures.Gamma, "mean", 1 + 1e-6, ["C7"]),
    (measures.Gaussian, "mean", 1 + 1e-6, ["C8"]),
    (measures.GaussianMixture, "mean", 1 + 1e-6, ["C9"]),
    (measures.GaussianMixture, "lower_bound", 1 + 1e-6, ["C10"]),
    (measures.GaussianMixture, "lower_bound_gradient", 1 + 1e-6, ["C50"]),
    (measures.ConjugatePrior, "mean", 1 + 1e-6, ["C28"]),
    ("claims.measures.exponential_families", "attend", 1 + 1e-6, ["C3", "C5", "C13"]),
    ("claims.measures.thermodynamics", "row_statistics", 1 + 1e-6, ["C35"]),
    ("claims.measures.conjugates", "bregman", 1 + 1e-6, ["C14"]),
    ("claims.measures.conjugates", "conjugate", 1 + 1e-6, ["C15", "C16", "C17"]),
    ("claims.measures.conjugates", "natural_from_mean", 1 + 1e-6, ["C15", "C17"]),
    # Contrastive losses and boosting
    (measures.Points, "probabilities", 1 + 1e-6, ["C32"]),
    (measures.Points, "log_normalizer", 1.001, ["C33"]),
    ("claims.measures.contrastive", "adaboost_step", 1 + 1e-6, ["C29"]),
    ("claims.measures.contrastive", "neighbor_probabilities", 1 + 1e-6, ["C30"]),
    ("claims.measures.contrastive", "nca", 1 + 1e-6, ["C30"]),
    ("claims.measures.contrastive", "skip_gram", 1 + 1e-6, ["C31"]),
    ("claims.measures.contrastive", "attend", 1 + 1e-6, ["C31"]),
    ("claims.measures.contrastive", "info_nce", 1 + 1e-6, ["C32"]),
    ("claims.measures.contrastive", "classical_mds", 1 + 1e-6, ["C34"]),
    ("claims.measures.contrastive", "pca", 1 + 1e-6, ["C34"]),
    ("claims.measures.losses", "adaboost_step", 1 + 1e-6, ["C51"]),
    ("claims.measures.losses", "n_pair", 0.03, ["C52"]),  # at step sizes that are all too small
    # Heads
    (measures.Points, "log_normalizer", 1 + 1e-6, ["C39"]),
    (measures.Points, "log_normalizer", 1.01, ["C42"]),  # whose bound is a sampling error
    (measures.Points, "mean", 1 + 1e-6, ["C39"]),
    (measures.Points, "mean", 1.1, ["X12"]),
    (measures.Points, "fisher", 1 + 1e-6, ["C19"]),
    (measures.Convolution, "mean", 1 + 1e-6, ["C39"]),
    (measures.GaussianMixture, "mean", 1 + 1e-6, ["C54"]),
    (measures.GaussianMixture, "lower_bound", 1 + 1e-6, ["C54"]),
    (measures.GaussianMixture, "lower_bound_gradient", 1 + 1e-6, ["C54"]),
    ("claims.dynamics.head_symmetry", "attend", 1.2, ["C54"]),
    ("claims.dynamics.head_symmetry", "floored_spectrum", 1 + 1e-6, ["C19"]),
    # The operator, its equilibrium and samples
    ("claims.dynamics.operator", "ascend", 1 + 1e-6, ["C11", "C12", "C23"]),
    ("claims.dynamics.operator", "attend", 1 + 1e-6, ["C48"]),
    ("claims.dynamics.operator", "ascend", 1.01, ["C41"]),
    ("claims.dynamics.operator", "attend", -0.1, ["C21"]),  # an inequality with room
    ("claims.dynamics.hopfield_steps", "hopfield_step", 1 + 1e-6, ["C38"]),
    ("claims.dynamics.hopfield_steps", "ascend", 1 + 1e-6, ["C38"]),
    ("claims.dynamics.hopfield_steps", "hopfield_time", 1 + 1e-6, ["C38", "X10"]),
    ("claims.dynamics.operator", "prox", 1 + 1e-6, ["C48"]),
    ("claims.dynamics.resampled_tokens", "resample", 1.1, ["C40", "C55"]),
    ("claims.dynamics.resampled_tokens", "halve", 1.1, ["C55"]),
    (evolution, "ascend", 1.02, ["C55"]),
    (evolution, "attend", 1 + 1e-6, ["C20"]),
    (evolution, "ascend", 1e-3, ["X11"]),  # tokens so short that attention is affine
    ("claims.dynamics.equilibrium", "normal_scores", 1 + 1e-6, ["X11"]),
    ("claims.dynamics.equilibrium", "normal_ranks", 0.0, ["X11"]),
    (maps, "attend", 1e-3, ["C45"]),  # layer normalization undoes the former
    (measures.Points, "fisher", 1 + 1e-6, ["C23"]),
    (measures.Points, "mean", 1.1, ["X8"]),
    (measures.Gaussian, "mean", 1 + 1e-6, ["C25"]),
    (measures.Sphere, "mean", torch.linspace(1, 1.001, 8), ["C26"]),  # no longer parallel
    ("claims.dynamics.equilibrium", "renormalization", 1 + 1e-6, ["C24"]),
    ("claims.dynamics.equilibrium", "gaussian_moments", 1 + 1e-6, ["C25"]),
    ("claims.dynamics.resampled_tokens", "attend", 1.5, ["C27", "X9"]),
    ("claims.dynamics.resampled_tokens", "token_limit", 1.3, ["X9"]),
    ("claims.dynamics.equilibrium", "cumulant_amplification", 1.02, ["X8"]),
    ("claims.dynamics.residual_gradients", "layer_norm", 10.0, ["C56"]),
    # Associative memories
    (Classical, "update", -1.0, ["M1", "M4"]),
    (Classical, "retrieve", -1.0, ["M2", "M14", "P1"]),
    (Classical, "energy", -1.0, ["M3"]),
    (Classical, "flip_cost", -1.0, ["P2"]),
    (Exponential, "retrieve", -1.0, ["M6", "M9", "M17", "M18"]),
    (Exponential, "flip_cost", -1.0, ["P4", "P6"]),
    (Continuous, "retrieve", -1.0, ["M18"]),
    (Dense, "retrieve", -1.0, ["M17"]),
    (Dense, "flip_cost", -1.0, ["P3"]),
    (Continuous, "update", 1 + 1e-6, ["M10", "M11", "M13"]),
    (Continuous, "retrieve", 1 + 1e-3, ["M5", "P9"]),
    (Continuous, "retrieve", 1.1, ["P8"]),
    (Continuous, "retrieve", -1.0, ["M7"]),
    (Continuous, "update", 1.01, ["M8", "M16", "M19"]),
    (Continuous, "energy", 1 + 1e-6, ["M15"]),
    (Kernel, "update", -1.0, ["P5"]),
    ("claims.memory.softmax_memories", "log_density", 1 + 1e-6, ["M12"]),
    ("claims.memory.softmax_memories", "denoise", 1 + 1e-6, ["M13"]),
    ("claims.memory.guarantees", "guaranteed_storage", 1.001, ["M7", "P7"]),
    ("claims.memory.guarantees", "theorem_3", 1.001, ["M7", "P7"]),
    ("claims.memory.guarantees", "one_step_bound", 10.0, ["M8"]),
    ("claims.memory.guarantees", "separations", 1.001, ["M8", "M16", "P8"]),
    ("claims.memory.guarantees", "farthest", 1.001, ["M8", "M16", "P8"]),
    ("claims.memory.guarantees", "certificate", scaled(1 + 1e-6, "radius"), ["P8"]),
    ("claims.memory.guarantees", "certificate", scaled(10.0, "bound"), ["M16", "P8"]),
    ("claims.memory.guarantees", "certificate", scaled(0.1, "ramsauer_radius"), ["P8"]),
    ("claims.memory.polar_memories", "capacity", 1.05, ["M2"]),
    ("claims.memory.retrieval_numbers", "capacity", 0.9, ["P2", "P3"]),
    ("claims.memory.retrieval_numbers", "patterns_in_the_limit", 1.05, ["P2"]),
    # Learning in a context
    (LinearAttention, "forward", 1 + 1e-6, ["I1", "I2", "I3", "I4"]),
    (LinearAttention, "forward", 1.2, ["I9"]),
    (MeasureAttention, "forward", 1.001, ["I10"]),
    (optimum, "_solve", 1.01, ["I5", "I6", "I7", "I8", "I16"]),
    (optimum.Optimum, "loss_of", 1.01, ["I7"]),
    (step_sizes, "descent_loss", 2.0, ["I9"]),
    (LeastSquares, "predict", 1.5, ["I11", "I18"]),
    (LeastSquares, "predict", 1.01, ["I12"]),
    (ConceptMixture, "_posterior", 0.0, ["I13"]),
    ("claims.context.ideal_predictors", "tree_posterior", 1.5, ["I14"]),
    (LinearModel, "_read", 1.3, ["I15"]),
    (MeasureAttention, "forward", 0.0, ["I17"]),
    (Linear, "values", 1.5, ["I19"]),
    (ConceptMixture, "log_likelihood", 0.0, ["I20"]),
    (SoftmaxModel, "predict", 2.0, ["I21", "I22"]),  # once the models are trained
    (SoftmaxModel, "predict", 0.0, ["I23", "R10"]),
    # Token selection
    ([FINITE, "claims.margin.selected_tokens"], "max_margin", turned(), ["T4", "T5"]),
    ("claims.margin.selection_heads", "max_margin", turned(), ["T16"]),
    # Beside the finite part a part of the error is lost in the fit, and the bound is on a mean.
    (FINITE, "max_margin", turned(1.0), ["T15"]),
    ([FINITE, "claims.margin.selection_limits"], "max_margin", turned(), ["T17", "T18"]),
    ([TRAJECTORY, PATH], "max_margin", turned(), ["T7", "T8", "T9", "T10", "T11", "T12", "T13"]),
    ("claims.margin.selected_tokens", "max_margin", scaled(-1.0), ["T1"]),
    ("claims.margin.selected_tokens", "attend", scaled(1 + 1e-6, "output"), ["T2", "T3"]),
    ("claims.margin.selected_tokens", "finite_component", scaled(1.1), ["T6"]),
    ("claims.margin.selection_tables", "finite_component", scaled(1.1), ["T14"]),
    ("claims.margin.selection_limits", "finite_component", scaled(1.1), ["T17"]),
    ("claims.margin.selection_limits", "descend", shortened, ["T17", "T18"]),
    ("claims.margin.descent_directions", "descend", slowed, ["T8", "T9"]),
    # Trained models
    ("claims.models.feed_forward", "held_out_r2", 0.8, ["C44"]),
    ("claims.models.trained_model", "projection_kurtosis", 30.0, ["C46", "X5"]),
    (
        "claims.models.trained_model",
        "synthetic",
        lambda made: lambda seed, attention: made(seed, "free"),
        ["X1", "X3", "X6"],
    ),
    (torch.nn.functional, "layer_norm", lambda _: lambda x, *_, **__: x / x.square().mean(-1, True).sqrt(), ["C22"]),
    ("claims.models.primer", "two_largest", 1.2, ["A3"]),
    ("claims.models.primer", "norms_of", 1 + 1e-6, ["A3"]),
    ("claims.models.primer", "scores_at", 1 + 1e-5, ["A2"]),
    ("claims.models.primer", "_normalized", 1 + 1e-6, ["A2"]),
    ("claims.models.feed_forward", "field_test", 0.8, ["X18"]),
    (key_laws.KeyMixture, "log_density", -1.0, ["X14"]),
    (
        feed_forward.LayerStatistics,
        "finish",
        changed(lambda found: {name: value - 0.1 for name, value in found.items()}),
        ["X16"],
    ),
    # Later results
    (LinearAttention, "forward", 1.001, ["R8"]),
    ("claims.recent.preconditioned", "residual_map", 1.01, ["R8"]),
    ("claims.recent.long_inputs", "attend", 1 + 1e-6, ["R1", "R7"]),
    ("claims.recent.long_inputs", "written_out", 1 + 1e-6, ["R7"]),
    (Sparse, "update", 1 + 1e-6, ["R9", "R14"]),
    ("claims.recent.fenchel_young", "by_bisection", 1 + 1e-6, ["R9"]),
    ("claims.recent.gradient_flows", "balance", 1.001, ["R4"]),
    ("claims.recent.gradient_flows", "attend", 1 + 1e-6, ["R4"]),
    ("claims.recent.gradient_flows", "energy", 1 + 1e-6, ["R4"]),
    (particles, "attend", 1.01, ["R5"]),  # the rate at the end
    (particles, "attend", 1.05, ["R13"]),  # the life of two clusters
    ("claims.recent.clusters", "velocity", 1.05, ["R5"]),
    ("claims.recent.freezing", "row_statistics", 1.1, ["R6"]),
    ("claims.recent.freezing", "limit", 1.02, ["R6"]),
    ("claims.recent.freezing", "correction", 1.5, ["R6"]),
    (
        "claims.recent.collapse",
        "row_statistics",
        lambda usual: lambda natural, *rest, **more: usual(2 * natural, *rest, **more),
        ["R2"],
    ),
    ("claims.recent.collapse", "entropy_floor", 0.5, ["R2"]),
    ("claims.recent.collapse", "attend", query_in_output, ["R3"]),
    ("claims.recent.collapse", "_cubic_bound", changed(lambda found: (0 * found[0], found[1])), ["R3"]),
    ("claims.recent.trigger_averages", "_sequences", without_a_start, ["R12"]),
    ("claims.recent.next_token", "finite_component", scaled(1.001), ["R11"]),
    (
        "claims.recent.next_token",
        "finite_component",
        changed(lambda found: replace(found, solution=replace(found.solution, weights=1.001 * found.solution.weights))),
        ["R11"],
    ),
    ("claims.recent.next_token", "descend", scaled(-1.0, "snapshots"), ["R11"]),
    # Sparse patterns; the wrong schedule keeps tokens of different remainder apart
    (
        "claims.universal.pattern_conditions",
        "strided",
        lambda _: lambda *_, **__: Schedule((dilated(1, 2), dilated(2, 2))),
        ["U1", "U4"],
    ),
    (
        "claims.universal.pattern_conditions",
        "fixed",
        lambda _: lambda *_, **__: Schedule((dilated(1, 2), dilated(2, 2))),
        ["U1", "U4"],
    ),
    ("claims.universal.pattern_conditions", "star_ring", lambda _: star, ["U1", "U2", "U3"]),
    (
        "claims.universal.pattern_conditions",
        "check_universality",
        changed(lambda found: replace(found, hub=None)),
        ["U3"],
    ),
    ("claims.universal.pattern_conditions", "Schedule", lambda _: lambda given: given[1], ["U7"]),
    ("claims.universal.pattern_theorems", "by_table", lambda _: lambda points, *rest: 0 * points[:, 0], ["U5"]),
    ("claims.universal.pattern_theorems", "star_ring", lambda _: lambda: window(1), ["U6"]),
    (
        "claims.universal.pattern_theorems",
        "Transformer",
        lambda model: lambda *given, **options: model(*given, **{**options, "positions": None}),
        ["U8"],
    ),
    # Universal approximation
    ("claims.universal.shift_identifiers", "shift_stack", coarse, ["U21", "U22", "U23"]),
    ("claims.universal.contextual_maps", "boltz", 1.001, ["U24"]),
    ("claims.universal.contextual_maps", "_exact_boltz", changed(lambda found: 0 * found), ["U25", "U27"]),
    ("claims.universal.contextual_maps", "_hardmax", lambda _: lambda scores: (10 * scores).softmax(-1), ["U26"]),
    ("claims.universal.contextual_maps", "contextual_map", changed(same_codes), ["U28"]),
    (CONSTRUCTION, "contextual_map", changed(same_codes), ["U29", "U32"]),
    (MEMORIZATION, "interpolant", lambda usual: lambda a, b, c, d: usual(a, b, c, d.flip(0)), ["U30"]),
    ("claims.universal.contextual_maps", "attended", changed(lambda found: found**2), ["U31"]),
    (MEMORIZATION, "table", shifted_keys, ["U34"]),
    (SPARSE, "table", shifted_keys, ["U36"]),
    ("claims.universal.approximation", "star_ring", lambda _: full, ["U36"]),
    (NARROW, "shift_stack", coarse, ["U35"]),
    (NARROW, "_clear", lambda _: lambda *_: torch.nn.Identity(), ["U35"]),
    (CONSTRUCTION, "table", shifted_keys, ["U29", "U33"]),
]
# An inspection's table and column, the factor on it, and claims that must notice.
COLUMNS = [
    ("experiments", "value", 9.0, ["C47"]),
    ("layers", "corollary_r2", 0.9, ["X7"]),
    ("layers", "fc_linear_r2", 2.0, ["C44"]),
    ("layers", "kurtosis", 0.1, ["X5"]),
]
# Claims that are broken in the tests of their own modules.
ELSEWHERE = {"A1", "S1", "S2", "S3", "S4", "S5", "S6", "X13", "X15", "X17", "X19"}


def unmoved(keys):
    return [claim.key for claim in select(keys) if not examine(claim).surprises]


def test_every_claim_has_a_break_that_it_notices():
    broken = {key for *_, keys in [*BREAKS, *COLUMNS] for key in keys}
    assert broken | ELSEWHERE == {claim.key for claim in all_claims()}


@pytest.mark.parametrize(("owners", "name", "wrong", "keys"), BREAKS)
def test_code_that_is_wrong_changes_a_verdict(owners, name, wrong, keys, monkeypatch):
    trained_model.inspection(None)  # read by the right code
    freezing.mean_log_normalizer.cache_clear()
    for owner in owners if isinstance(owners, list) else [owners]:
        target = importlib.import_module(f"massieu.{owner}") if isinstance(owner, str) else owner
        original = getattr(target, name)
        break_ = wrong if callable(wrong) else changed(lambda found: stretched(found, wrong))
        monkeypatch.setattr(target, name, break_(original))
    assert unmoved(keys) == []
    freezing.mean_log_normalizer.cache_clear()


@pytest.mark.parametrize(("table", "column", "factor", "keys"), COLUMNS)
def test_numbers_of_an_inspection_that_are_wrong_change_the_verdict(table, column, factor, keys, monkeypatch):
    own = trained_model.inspection(None)
    rows = getattr(own, table)
    wrong = replace(own, **{table: rows.assign(**{column: factor * rows[column]})})
    for owner in (trained_model, feed_forward):
        monkeypatch.setattr(owner, "inspection", lambda name: wrong)
    assert unmoved(keys) == []


def test_a_wrong_sign_of_the_mean_changes_the_verdicts_of_claims_that_use_it(monkeypatch):
    mean = measures.Points.mean
    monkeypatch.setattr(measures.Points, "mean", lambda self, natural: -mean(self, natural))
    used, unused = (
        {"C4", "C5", "C6", "C9", "C14", "C15", "C18", "C37", "C39"},
        {"C1", "C3", "C7", "C10", "C13", "C28", "C35"},
    )
    assert set(unmoved([*used, *unused])) == unused


def test_steps_in_the_wrong_direction_change_the_verdicts_of_claims_that_take_them(monkeypatch):
    ascend = operator.ascend
    for owner in (operator, hopfield_steps, evolution):
        monkeypatch.setattr(owner, "ascend", lambda x, *keys, step=1.0, **more: ascend(x, *keys, step=-step, **more))
    used, unused = {"C11", "C12", "C23", "C38", "C41", "X10"}, {"C20", "C21", "C48"}
    assert set(unmoved([*used, *unused])) == unused
