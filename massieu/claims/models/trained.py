"""What the theory predicts for a trained model, measured by an inspection, beside a case built to fulfil it.

The control of each is that case with one thing changed: heads that are not tied, a curve in the place of a line.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import numpy
import torch
from torch import Tensor

from massieu.checks import UserError
from massieu.claims.claim import Curve, Evidence, Gap, Trial, Verdict
from massieu.claims.measures.families import PAPER
from massieu.claims.registry import claim
from massieu.inspection import Inspection, inspect_model
from massieu.inspection.clouds import gaussian_band, projection_kurtosis
from massieu.inspection.regression import Regression, held_out_r2
from massieu.nn import Transformer

QUESTION = f"{PAPER}, section 6 (a question for future work)"
BAND = 1.5  # the band holds nineteen of twenty Gaussian samples, this multiple practically all
DIFFUSE = 0.85  # of the largest entropy, on average over the heads of a layer


@functools.lru_cache(maxsize=2)
def inspection(model: str | None) -> Inspection:
    """The model on the embedded text; all experiments of one process share it."""
    return inspect_model(model, max_length=128 if model is not None else None, progress=False)


@functools.lru_cache(maxsize=8)
def synthetic(seed: int, attention: Literal["tied", "free"]) -> Inspection:
    """A random transformer; if its heads are tied they write what they read, and the theory has to hold in it."""
    generator = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {"attention": attention, "causal": False, "positions": None, "norm": None}
    model = Transformer(32, 3, 2, vocabulary=64, **options, generator=generator)
    tokens = torch.stack([torch.randperm(64, generator=generator)[:48] for _ in range(16)])  # no token twice
    return inspect_model(model, inputs=[{"inputs": part} for part in tokens.split(4)], progress=False)


def profile(found: Inspection, *columns: str) -> Curve:
    """Columns of the layers table over the depth."""
    layers = found.layers
    series = {name: layers[name].tolist() for name in columns}
    return Curve(list(range(len(layers))), series, x_label="layer", y_label=columns[0])


def median(found: Inspection, column: str, table: str = "layers") -> float:
    """Median of a column over the layers or heads that have it."""
    return float(numpy.nanmedian(getattr(found, table)[column].to_numpy(dtype=float)))


@claim(
    "X1",
    source=f"{PAPER}, section 3.1, on a trained model",
    statement="The attention of a trained model is a gradient: its Jacobian in the query token is symmetric.",
    formula="J = J^T",
    correction="It is where every head writes what it reads, B = cA; training does not tie them.",
    expected=Verdict.FAILS,
    trials=1,
    on_model=True,
)
def gradient_field(trial: Trial) -> Evidence:
    """Asymmetric share of the Jacobian with frozen keys: of the model, of tied heads, and of free random ones."""
    found = inspection(trial.model)

    def gap(measured: Inspection) -> Gap:
        return Gap(1 - median(measured, "field_symmetry"), 0.1)

    return Evidence(
        printed=gap(found),
        instead=gap(synthetic(trial.seed, "tied")),
        control=gap(synthetic(trial.seed, trial.control("free", "tied"))),
        table={
            "symmetric share": median(found, "field_symmetry"),
            "positive share": median(found, "field_positive"),
            "cosine of B_h and A_h": median(found, "gradient_cosine", "heads"),
        },
        curve=profile(found, "field_symmetry", "field_symmetry_control"),
    )


@claim(
    "C47",
    source=QUESTION,
    statement="Query and key weights of a trained model combine to the Fisher matrix, an inverse covariance.",
    formula="W_Q^T W_K ≈ Λ^{−1}",
    correction="As for X2: trained heads are not what the theory wants.",
    expected=Verdict.FAILS,
    trials=1,
    on_model=True,
)
@claim(
    "X2",
    source=f"{PAPER}, section 3.2, on a trained model",
    statement="Query and key weights of a trained model combine to the inverse covariance of its hidden states.",
    formula="Λ^{1/2} A_h Λ^{1/2} is a projector of rank d_k",
    correction="Whitened trained heads have neither the trace nor the direction of a projector.",
    expected=Verdict.FAILS,
    trials=1,
    on_model=True,
)
def whitened_heads(trial: Trial) -> Evidence:
    """Trace and cosine of whitened heads over their predictions: of the model, of heads built to pass, of random."""
    table = inspection(trial.model).experiments

    def gap(kind: str, column: str) -> Gap:
        off = []
        for quantity in ("whitened_trace", "whitened_cosine"):
            rows = table[(table["quantity"] == quantity) & (table["experiment"] == kind)]
            share = rows[column].to_numpy(dtype=float) / rows["predicted"].to_numpy(dtype=float)
            off.append(abs(float(numpy.nanmedian(share)) - 1))
        return Gap(max(off), 0.2)

    powers = table[table["quantity"].str.startswith("power_cosine")].groupby("quantity")["value"].median()
    return Evidence(
        printed=gap("X2", "value"),
        instead=gap("X2 constructed", "value"),
        control=gap(*trial.control(("X2", "control"), ("X2 constructed", "value"))),
        table={name.replace("power_cosine", "cosine with Λ to the power"): value for name, value in powers.items()},
    )


@claim(
    "X3",
    source=f"{PAPER}, section 3.3, on a trained model",
    statement="In every layer of a trained model attention pushes tokens apart, pair by pair.",
    formula="(x_i − x_j)·(a_i − a_j) > 0",
    correction="It does where heads are tied and see the same keys; some trained layers pull pairs together.",
    expected=Verdict.FAILS,
    trials=1,
    on_model=True,
)
def expansion(trial: Trial) -> Evidence:
    """Share of pairs that attention does not push apart, in the worst layer: of the model, of tied, of free heads."""
    found = inspection(trial.model)
    layers = found.layers

    def gap(measured: Inspection) -> Gap:
        return Gap(1 - float(measured.layers["monotone_share"].min()), 0.05)

    return Evidence(
        printed=gap(found),
        instead=gap(synthetic(trial.seed, "tied")),
        control=gap(synthetic(trial.seed, trial.control("free", "tied"))),
        table={
            "layers that expand in the median": float((layers["expansion"] > 1).mean()),
            "by more than permuted outputs": float((layers["expansion"] > layers["expansion_control"]).mean()),
            "layers whose norm contracts": float((layers["norm_contraction"] < 1).mean()),
        },
        curve=profile(found, "monotone_share", "monotone_control", "expansion", "expansion_control"),
    )


@claim(
    "C44",
    source=QUESTION,
    statement="The fully connected layers of a trained model are close to linear.",
    formula="m ≈ W x + b",
    correction="As for X4: a matrix explains a part of them.",
    expected=Verdict.FAILS,
    trials=1,
    on_model=True,
)
@claim(
    "X4",
    source=f"{PAPER}, section 6 (a question), on a trained model",
    statement="A single matrix explains nine tenths of the fully connected layers of a trained model.",
    formula="R² > 0.9",
    correction="Measured on documents that the fit has not seen: about half of them.",
    expected=Verdict.FAILS,
    trials=1,
    on_model=True,
)
def linear_mlp(trial: Trial) -> Evidence:
    """What a ridge regression leaves unexplained of unseen rows: of the MLP's update, of a linear map, of squares."""
    found = inspection(trial.model)
    x = torch.randn(2000, 16, generator=trial.generator, dtype=torch.float64)
    matrix = torch.randn(16, 16, generator=trial.generator, dtype=torch.float64)

    def gap(power: int) -> Gap:
        halves = Regression(0, 0), Regression(0, 0)
        for half, rows in zip(halves, x.chunk(2), strict=True):
            half.update(rows, (rows @ matrix) ** power)
        return Gap(1 - held_out_r2(*halves), 0.1)

    return Evidence(
        printed=Gap(1 - median(found, "fc_linear_r2"), 0.1),
        instead=gap(1),
        control=gap(trial.control(2, 1)),
        table={
            "linear R²": median(found, "fc_linear_r2"),
            "linear R², all tokens": median(found, "fc_linear_r2_all_tokens"),
            "identity R² with the residual": median(found, "fc_identity_r2"),
        },
        curve=profile(found, "fc_linear_r2", "fc_linear_control", "fc_identity_r2"),
    )


@claim(
    "X5",
    source=f"{PAPER}, section 6, on a trained model",
    statement="The hidden states of a trained model are Gaussian.",
    formula="excess kurtosis of whitened projections = 0",
    correction="They lie outside the band in which a Gaussian sample of the same size stays.",
    expected=Verdict.FAILS,
    trials=1,
    on_model=True,
)
def gaussian_states(trial: Trial) -> Evidence:
    """Kurtosis of random projections over its sampling band: of hidden states, of a Gaussian, of a heavy-tailed law."""
    layers = inspection(trial.model).layers
    share = (layers["kurtosis"].abs() / layers["kurtosis_band"]).to_numpy(dtype=float)
    normal = torch.randn(1024, inspection(trial.model).facts["model"]["hidden"] or 128, generator=trial.generator)
    spread = torch.rand(len(normal), 1, generator=trial.generator).rsqrt()

    return Evidence(
        printed=Gap(float(numpy.nanmedian(share)), BAND),
        instead=Gap(over_band(normal), BAND),
        control=Gap(over_band(normal * trial.control(spread, torch.ones(()))), BAND),
        table={"median excess kurtosis": float(layers["kurtosis"].median())},
        curve=profile(inspection(trial.model), "kurtosis", "kurtosis_band"),
    )


def over_band(x: Tensor) -> float:
    """Kurtosis of random projections in units of the band in which a Gaussian sample of this size stays."""
    x = x.double()
    kurtosis = projection_kurtosis(x, x.mean(0), torch.cov(x.T, correction=0))
    return abs(kurtosis) / gaussian_band(len(x), len(x), x.shape[-1])


@claim(
    "X6",
    source=f"{PAPER}, section 3.1, on a trained model",
    statement="The attention sublayer of a trained model ascends the log normaliser of its heads.",
    formula="a ∥ ∇ Σ_h log Z_h",
    correction="It does where every head writes what it reads; trained layers go across the slope, some against it.",
    expected=Verdict.FAILS,
    trials=1,
    on_model=True,
)
def ascent(trial: Trial) -> Evidence:
    """One minus the cosine of the update with the slope: of the model, of tied heads, and of free random ones."""
    found = inspection(trial.model)

    def gap(measured: Inspection) -> Gap:
        return Gap(1 - median(measured, "ascent_cosine"), 0.2)

    return Evidence(
        printed=gap(found),
        instead=gap(synthetic(trial.seed, "tied")),
        control=gap(synthetic(trial.seed, trial.control("free", "tied"))),
        table={
            "cosine with the slope": median(found, "ascent_cosine"),
            "in the layer that goes down most": float(found.layers["ascent_cosine"].min()),
            "share of tokens with rising log Z": median(found, "ascent_share"),
            "share of rows with falling entropy": median(found, "entropy_fall_share"),
        },
        curve=profile(found, "ascent_cosine", "ascent_control"),
    )


@claim(
    "X7",
    source=f"{PAPER}, Corollary 1, on a trained model",
    statement="The mean and covariance of keys and values predict the output of a head, without its softmax.",
    formula="o ≈ v̄ + Cov(v, k) q / √d_k",
    correction="In layers whose attention is diffuse: to first order in the query.",
    expected=Verdict.CONDITIONAL,
    trials=1,
    on_model=True,
)
def linear_response(trial: Trial) -> Evidence:
    """What the first order in the query leaves unexplained: in all layers, in diffuse ones, with shuffled keys."""
    found = inspection(trial.model)
    entropy = found.heads.groupby(["stack", "layer"])["normalized_entropy"].mean().rename("share").reset_index()
    layers = found.layers.merge(entropy, on=["stack", "layer"])
    diffuse = layers[layers["share"] > DIFFUSE]
    if diffuse.empty:
        raise UserError(f"no layer of the model has diffuse attention, above {DIFFUSE} of the largest entropy")

    def gap(table: Any, column: str) -> Gap:
        return Gap(1 - float(numpy.nanmedian(table[column].to_numpy(dtype=float))), 0.05)

    return Evidence(
        printed=gap(layers, "corollary_r2"),
        conditional=gap(diffuse, "corollary_r2"),
        control=gap(diffuse, trial.control("corollary_control", "corollary_r2")),
        table={"diffuse layers": float(len(diffuse)), "median R² there": float(diffuse["corollary_r2"].median())},
        curve=profile(found, "corollary_r2", "corollary_control"),
    )
