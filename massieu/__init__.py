"""Massieu: softmax attention as an exponential family, measured on any transformer.

The query is the natural parameter, the keys carry the measure, and the attention output is the gradient of the log
normalizer, the Massieu potential. Start with :func:`inspect_model` (what the heads of a model do), :func:`attend`
(attention with the statistics of every row), :class:`Points` (keys as a measure) and :func:`natural_from_mean` (from an
output back to its query).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from massieu import accumulators as accumulators
    from massieu import claims as claims
    from massieu import context as context
    from massieu import contrast as contrast
    from massieu import corpus as corpus
    from massieu import duality as duality
    from massieu import dynamics as dynamics
    from massieu import engine as engine
    from massieu import figures as figures
    from massieu import geometry as geometry
    from massieu import inspection as inspection
    from massieu import kernels as kernels
    from massieu import margin as margin
    from massieu import measures as measures
    from massieu import memory as memory
    from massieu import models as models
    from massieu import monitor as monitor
    from massieu import nn as nn
    from massieu import patterns as patterns
    from massieu import report as report
    from massieu import statistics as statistics
    from massieu import taps as taps
    from massieu import universal as universal
    from massieu.duality import Inversion, Proximal, bregman, conjugate, natural_from_mean, natural_gradient, prox
    from massieu.inspection import Inspection, NotObservable, inspect_model, read_inspection
    from massieu.measures import (
        Ball,
        Box,
        ConjugatePrior,
        Convolution,
        DirichletMultinomial,
        Gamma,
        Gaussian,
        GaussianMixture,
        Hypercube,
        Laplace,
        Measure,
        Mixture,
        Multinomial,
        Points,
        Poisson,
        Sphere,
        Tilted,
    )
    from massieu.monitor import Watch, watch
    from massieu.statistics import Attended, RowStatistics, attend, mass_count, row_statistics

__version__ = "0.1.0"

__all__ = [
    "Attended",
    "Ball",
    "Box",
    "ConjugatePrior",
    "Convolution",
    "DirichletMultinomial",
    "Gamma",
    "Gaussian",
    "GaussianMixture",
    "Hypercube",
    "Inspection",
    "Inversion",
    "Laplace",
    "Measure",
    "Mixture",
    "Multinomial",
    "NotObservable",
    "Points",
    "Poisson",
    "Proximal",
    "RowStatistics",
    "Sphere",
    "Tilted",
    "Watch",
    "attend",
    "bregman",
    "conjugate",
    "inspect_model",
    "mass_count",
    "natural_from_mean",
    "natural_gradient",
    "prox",
    "read_inspection",
    "row_statistics",
    "watch",
]

# Names are looked up on first use, so that the command line answers without waiting for torch.
_HOMES = ("statistics", "measures", "duality", "inspection", "monitor")
_SUBMODULES = (
    *("accumulators", "checks", "claims", "context", "contrast", "corpus", "duality", "dynamics", "engine", "figures"),
    *("geometry", "inspection", "kernels", "margin", "measures", "memory", "models", "monitor", "nn", "patterns"),
    *("report", "statistics", "taps", "universal"),
)


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"massieu.{name}")
    if name in __all__:
        for home in _HOMES:
            module = importlib.import_module(f"massieu.{home}")
            if name in module.__all__:
                return globals().setdefault(name, getattr(module, name))
    raise AttributeError(f"module 'massieu' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
