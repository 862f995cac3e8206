"""The measures of all contract tests, one row each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import massieu
from massieu import Measure


@dataclass(frozen=True)
class Row:
    """A measure, natural parameters inside its domain, and whether its mean map is one-to-one."""

    name: str
    measure: Measure
    natural: Tensor
    minimal: bool = True


def _rows() -> list[Row]:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def covariance(*shape: int) -> Tensor:
        factor = randn(*shape)
        return factor @ factor.mT / shape[-1] + 0.3 * torch.eye(shape[-1], dtype=torch.float64)

    def double(*numbers: float) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float64)

    def rows(*points: list[float]) -> Tensor:
        return torch.tensor(points, dtype=torch.float64)

    absent = randn(9)
    absent[2] = -torch.inf
    return [
        Row("points", massieu.Points(randn(9, 4)), randn(5, 4)),
        Row("points weighted", massieu.Points(randn(9, 4), randn(9)), 2 * randn(5, 4)),
        Row("points with an absent atom", massieu.Points(randn(9, 4), absent), randn(5, 4)),
        Row("points in a batch", massieu.Points(randn(3, 9, 4), randn(3, 1, 9)), randn(3, 5, 4)),
        Row("points far from the origin", massieu.Points(randn(9, 3) + 100), randn(5, 3)),
        Row("points on a plane", massieu.Points(randn(4, 6)), randn(5, 6), minimal=False),
        Row("gaussian", massieu.Gaussian(randn(3), covariance(3, 3)), randn(2, 5, 3)),
        Row("gaussian mixture", massieu.GaussianMixture(randn(4), randn(4, 3), covariance(4, 3, 3)), randn(5, 3)),
        Row("gaussian mixture shared", massieu.GaussianMixture(randn(4), randn(4, 3), covariance(3, 3)), randn(5, 3)),
        Row("hypercube", massieu.Hypercube(4), 2 * randn(5, 4)),
        Row("box", massieu.Box(3, 1.7), 4 * randn(5, 3)),
        Row("sphere 2", massieu.Sphere(2), 5 * randn(5, 2)),
        Row("sphere 8", massieu.Sphere(8), torch.cat([1e-8 * randn(2, 8), 5 * randn(2, 8), 40 * randn(2, 8)])),
        Row("sphere 64", massieu.Sphere(64), 3 * randn(3, 64)),
        Row("ball", massieu.Ball(3, 2.0), 2 * randn(5, 3)),
        Row("gamma", massieu.Gamma(double(2.5, 1.0), double(0.7, 2.0)), 0.3 - randn(5, 2).abs()),
        Row("poisson", massieu.Poisson(double(1.5, 4.0, 0.3)), randn(5, 3)),
        Row("laplace", massieu.Laplace(double(0.5, 1.0, 2.0)), 0.45 * randn(5, 3).tanh()),
        Row("multinomial", massieu.Multinomial(randn(5), 7), randn(5, 5), minimal=False),
        Row("dirichlet multinomial", massieu.DirichletMultinomial(randn(4).exp(), 6), randn(5, 4), minimal=False),
        Row("categorical prior", massieu.ConjugatePrior("categorical", double(2.0, 3.0), 9.0), randn(5, 2).tanh()),
        Row("poisson prior", massieu.ConjugatePrior("poisson", double(2.0, 3.0), 9.0), 1.5 * randn(5, 2).tanh()),
        Row(
            "mixture",
            massieu.Mixture(
                randn(3), [massieu.Sphere(3), massieu.Gaussian(randn(3), covariance(3, 3)), massieu.Points(randn(6, 3))]
            ),
            randn(5, 3),
        ),
        Row(
            "convolution",
            massieu.Convolution(
                [randn(4, 3), randn(4, 4), randn(4, 2)],
                [massieu.Points(randn(6, 3)), massieu.Hypercube(4), massieu.Points(randn(7, 2))],
            ),
            0.7 * randn(5, 4),
        ),
        Row("gamma near its edge", massieu.Gamma(double(2.5, 0.3), double(0.7, 2.0)), rows([0.6, -3.0], [1.4, 0.45])),
        Row("poisson far out", massieu.Poisson(double(0.2, 4.0)), rows([0.0, 0.0], [-2.0, 1.5])),
        Row("laplace near its edge", massieu.Laplace(double(0.5, 2.0)), rows([1.9, -0.3], [-1.0, 0.49])),
        Row("logit beta", massieu.ConjugatePrior("categorical", 2.0, 4.1), rows([0.0], [0.5], [-1.9], [2.05])),
        Row("log rate", massieu.ConjugatePrior("poisson", double(2.0, 0.4), 3.0), rows([0.0, 0.0], [4.0, -0.3])),
        Row(
            "multinomial with an absent cell",
            massieu.Multinomial(double(0.3, -torch.inf, 0.1), 4),
            rows([0.0, 0.0, 0.0], [0.7, -1.2, 0.4], [3.0, -2.0, 3.5]),
            minimal=False,
        ),
        Row("tilted gamma", massieu.Gamma(2.5, 0.7).tilt(double(0.5)), 0.3 - randn(5, 1).abs()),
        Row("tilted points", massieu.Points(randn(9, 4), randn(9)).tilt(randn(4)), randn(5, 4)),
    ]


ROWS = _rows()
