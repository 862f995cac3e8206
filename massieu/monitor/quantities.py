"""Quantities of a reading, each with its title, formula and explanation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from massieu.checks import UserError, did_you_mean
from massieu.inspection.quantities import GEOMETRY, QUANTITIES, Quantity

__all__ = ["HEADS", "LAYERS", "WATCHED", "check_quantities"]

_SHARED = (
    *("log_normalizer", "entropy", "normalized_entropy", "perplexity", "effective_atoms", "score_variance"),
    *("score_max", "score_range", "peak", "sink_mass", "qk_norm"),
)

_OWN = (
    Quantity(
        "qk_size",
        "heads",
        GEOMETRY,
        "Size, query-key",
        "|A|_F",
        "|A|_F,  A = scale W_Q^⊤ W_K",
        "",
        "The Frobenius norm of the query-key map: how large scores are for tokens in all directions.",
        scale="logarithmic",
    ),
    Quantity(
        "output_share",
        "heads",
        "Heads beside each other",
        "Size of the output",
        "|o_h|",
        "sqrt(mean over rows of |o_h|^2), divided by that of all heads of the layer",
        "",
        "Size of a head's output relative to the heads of its layer. One is average; a head near zero is dead.",
        scale="logarithmic",
    ),
    Quantity(
        "likeness",
        "heads",
        "Heads beside each other",
        "Likeness to another head",
        "max cos",
        "largest over other heads h′ of the layer of cos(p_h − u, p_h′ − u),  p without the first token, u uniform",
        "",
        "Similarity of the head's departure from uniform attention to that of the most similar head of the layer, over"
        " sampled rows. The first token, on which idle heads rest, is left out. One is a copy.",
    ),
    Quantity(
        "broken_rows",
        "heads",
        "Training",
        "Rows with nan or infinity",
        "nan",
        "share of the rows in which a score is nan or infinite",
        "",
        "Zero in a healthy model. A pass with such rows is lost, and so is the step if its gradients are used.",
    ),
    replace(
        QUANTITIES["effective_rank"],
        formula="exp of the entropy of λ_i / Σ λ_i,  λ = eigenvalues of the covariance of x_i / |x_i|",
        explanation="Number of directions in which up to 64 evenly spread tokens of a sequence differ behind the block."
        " One token of huge norm does not count more than the others.",
    ),
    QUANTITIES["token_cosine"],
    Quantity(
        "update_ratio",
        "layers",
        "Training",
        "Update of the weights",
        "|ΔW| / |W|",
        "|W_t − W_{t−1}|_F / |W_{t−1}|_F over the parameters of the attention module",
        "",
        "Relative change of the attention weights in the last step before the reading: about 0.001 in long runs of"
        " large models, some hundredths in the first steps of small ones.",
        scale="logarithmic",
        digits=5,
    ),
)

WATCHED: dict[str, Quantity] = {**{name: QUANTITIES[name] for name in _SHARED}, **{own.name: own for own in _OWN}}
"""Every quantity by name; those shared with :func:`massieu.inspect_model` mean the same there."""

HEADS: tuple[str, ...] = tuple(name for name, quantity in WATCHED.items() if quantity.table == "heads")
LAYERS: tuple[str, ...] = tuple(name for name, quantity in WATCHED.items() if quantity.table == "layers")


def check_quantities(quantities: Iterable[str] | str) -> frozenset[str]:
    """Return the names of quantities: "all", one name, or several.

    Example:
        >>> sorted(check_quantities(("entropy", "log_normalizer")))
        ['entropy', 'log_normalizer']
    """
    if isinstance(quantities, str) and quantities == "all":
        return frozenset(WATCHED)
    names = list(quantities) if isinstance(quantities, Iterable) and not isinstance(quantities, str) else [quantities]
    unknown = [name for name in names if not isinstance(name, str) or name not in WATCHED]
    if unknown or not names:
        got = ", ".join(f"{name!r}{did_you_mean(str(name), WATCHED)}" for name in unknown) or "none"
        raise UserError(f'quantities must be "all" or some of {", ".join(WATCHED)}, got {got}; "all" costs little')
    return frozenset(names)
