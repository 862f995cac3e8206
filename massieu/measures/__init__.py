"""Intrinsic measures and their exponential families."""

from massieu.measures.compose import Convolution, Mixture, Tilted
from massieu.measures.counts import DirichletMultinomial, Multinomial
from massieu.measures.elementary import Gamma, Hypercube, Laplace, Poisson
from massieu.measures.gaussian import Gaussian, GaussianMixture
from massieu.measures.measure import Measure
from massieu.measures.points import Points
from massieu.measures.prior import ConjugatePrior
from massieu.measures.sphere import Ball, Box, Sphere

__all__ = [
    "Ball",
    "Box",
    "ConjugatePrior",
    "Convolution",
    "DirichletMultinomial",
    "Gamma",
    "Gaussian",
    "GaussianMixture",
    "Hypercube",
    "Laplace",
    "Measure",
    "Mixture",
    "Multinomial",
    "Points",
    "Poisson",
    "Sphere",
    "Tilted",
]
