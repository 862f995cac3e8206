"""What the theory predicts for a trained model, measured by an inspection, beside a case built to fulfil it."""

from __future__ import annotations

import functools
from typing import Any

import numpy
import torch

from massieu.claims.claim import Curve, Evidence, Gap, Trial, Verdict
from massieu.claims.families import PAPER
from massieu.claims.registry import claim
from massieu.inspection import Inspection, inspect_model
from massieu.inspection.clouds import gaussian_band, projection_kurtosis
from massieu.nn import Transformer


@functools.lru_cache(maxsize=2)
def inspection(model: str | None) -> Inspection:
    """The model on the embedded text; all experiments of one process share it."""
    return inspect_model(model, max_length=128 if model is not None else None)


@functools.lru_cache(maxsize=4)
def tied_model(seed: int) -> Inspection:
    """A random transformer whose heads write what they read: the theory has to hold in it."""
    generator = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {"attention": "tied", "causal": False, "positions": None, "norm": None}
    model = Transformer(32, 3, 2, vocabulary=64, **options, generator=generator)
    tokens = torch.stack([torch.randperm(64, generator=generator)[:48] for _ in range(16)])  # no token twice
    return inspect_model(model, inputs=[{"inputs": part} for part in tokens.split(4)])


def profile(found: Inspection, *columns: str) -> Curve:
    """Columns of the layers table over the depth."""
    layers = found.layers
    return Curve(
        list(range(len(layers))), {name: layers[name].tolist() for name in columns}, x_label="layer", y_label=columns[0]
    )


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
    """Symmetric share of the Jacobian with frozen keys: of the model, of random weights, and of a tied model."""
    found, tied = inspection(trial.model), tied_model(trial.seed)
    return Evidence(
        printed=Gap(1 - median(found, "field_symmetry"), 0.1),
        instead=Gap(1 - median(tied, "field_symmetry"), 1e-3),
        control=Gap(1 - median(found, "field_symmetry_control"), 0.1),
        table={
            "symmetric share": median(found, "field_symmetry"),
            "positive share": median(found, "field_positive"),
            "cosine of B_h and A_h": median(found, "gradient_cosine", "heads"),
        },
        curve=profile(found, "field_symmetry", "field_symmetry_control"),
    )


@claim(
    "C47",
    source=f"{PAPER}, section 6",
    statement="Query and key weights of a trained model combine to the Fisher matrix, an inverse covariance.",
    formula="W_Q^T W_K ≈ Λ^{−1}",
    correction="A head as the theory wants it has the whitened trace d_k; trained heads do not.",
    expected=Verdict.FAILS,
    trials=1,
    on_model=True,
)
@claim(
    "X2",
    source=f"{PAPER}, section 3.2, on a trained model",
    statement="Query and key weights of a trained model combine to the inverse covariance of its hidden states.",
    formula="Λ^{1/2} A_h Λ^{1/2} is a projector of rank d_k",
    correction="A head as the theory wants it has the whitened trace d_k; trained heads do not.",
    expected=Verdict.FAILS,
    trials=1,
    on_model=True,
)
def whitened_heads(trial: Trial) -> Evidence:
    """Whitened trace over its prediction: of the model's heads, of random heads, and of heads built to pass."""
    table = inspection(trial.model).experiments
    traces = table[table["quantity"] == "whitened_trace"]
    built = traces["experiment"] == "X2 constructed"

    def off(rows: object, column: str) -> float:
        share = traces[rows][column].to_numpy(dtype=float) / traces[rows]["predicted"].to_numpy(dtype=float)
        return abs(float(numpy.nanmedian(share)) - 1)

    powers = table[table["quantity"].str.startswith("power_cosine")].groupby("quantity")["value"].median()
    return Evidence(
        printed=Gap(off(~built, "value"), 0.2),
        instead=Gap(off(built, "value"), 0.2),
        control=Gap(off(~built, "control"), 0.2),
        table={name.replace("power_cosine", "cosine with Λ to the power"): value for name, value in powers.items()},
    )


@claim(
    "X3",
    source=f"{PAPER}, section 3.3, on a trained model",
    statement="In every layer of a trained model attention pushes tokens apart.",
    formula="|x_i + a_i − x_j − a_j| > |x_i − x_j|",
    correction="Sums expand by themselves: only what exceeds permuted outputs is due to attention, in few layers.",
    expected=Verdict.FAILS,
    trials=1,
    on_model=True,
)
def expansion(trial: Trial) -> Evidence:
    """The least expansion of any layer beyond its permuted control, which must be above zero; in a tied model it is."""
    found, tied = inspection(trial.model), tied_model(trial.seed)

    def short(table: Inspection, column: str) -> float:
        beyond = table.layers[column] - table.layers["expansion_control"]
        return max(0.0, -float(beyond.min()))

    return Evidence(
        printed=Gap(short(found, "expansion"), 1e-3),
        instead=Gap(max(0.0, 1 - float(tied.layers["monotone_share"].min())), 0.01),
        control=Gap(max(0.0, 1 - float(tied.layers["monotone_control"].min())), 0.01),
        table={
            "layers that expand": float((found.layers["expansion"] > 1).mean()),
            "beyond the control": float((found.layers["expansion"] > found.layers["expansion_control"]).mean()),
            "layers whose norm contracts": float((found.layers["norm_contraction"] < 1).mean()),
        },
        curve=profile(found, "expansion", "expansion_control", "norm_contraction"),
    )


@claim(
    "C44",
    source=f"{PAPER}, section 6",
    statement="The fully connected layers are close to a linear map.",
    formula="m ≈ W x + b",
    correction="Measured on unseen text and content tokens only: special tokens alone make an R² of one.",
    expected=Verdict.FAILS,
    trials=1,
    on_model=True,
)
@claim(
    "X4",
    source=f"{PAPER}, section 6, on a trained model",
    statement="A single matrix explains the fully connected layers of a trained model.",
    formula="R² > 0.9",
    correction="Measured on unseen text and content tokens only: special tokens alone make an R² of one.",
    expected=Verdict.FAILS,
    trials=1,
    on_model=True,
)
def linear_mlp(trial: Trial) -> Evidence:
    """What a ridge regression leaves unexplained of the MLP's update on held-out documents."""
    found = inspection(trial.model)
    return Evidence(
        printed=Gap(1 - median(found, "fc_linear_r2"), 0.1),
        control=Gap(1 - median(found, "fc_linear_control"), 0.1),
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
    """Kurtosis of random projections over its sampling band: hidden states, a Gaussian sample, a heavy-tailed one."""
    layers = inspection(trial.model).layers
    gap = float(numpy.nanmedian((layers["kurtosis"].abs() / layers["kurtosis_band"]).to_numpy(dtype=float)))
    rows, width = 1024, 64
    normal = torch.randn(rows, width, generator=trial.generator, dtype=torch.float64)
    heavy = normal / torch.rand(rows, 1, generator=trial.generator, dtype=torch.float64).sqrt()

    def over_band(x: torch.Tensor) -> float:
        return abs(projection_kurtosis(x, x.mean(0), torch.cov(x.T, correction=0))) / gaussian_band(rows, rows, width)

    return Evidence(
        printed=Gap(gap, 1.0),
        instead=Gap(over_band(normal), 1.5),
        control=Gap(over_band(heavy), 1.0),
        table={"median excess kurtosis": float(layers["kurtosis"].median())},
        curve=profile(inspection(trial.model), "kurtosis", "kurtosis_band"),
    )


@claim(
    "X6",
    source=f"{PAPER}, section 3.1, on a trained model",
    statement="The attention sublayer of a trained model ascends the log normaliser of its heads.",
    formula="a ∥ ∇ Σ_h log Z_h",
    correction="It does where every head writes what it reads; trained updates are nearly orthogonal to the slope.",
    expected=Verdict.FAILS,
    trials=1,
    on_model=True,
)
def ascent(trial: Trial) -> Evidence:
    """One minus the cosine of the update with the slope: of the model, with permuted updates, and of a tied model."""
    found, tied = inspection(trial.model), tied_model(trial.seed)
    return Evidence(
        printed=Gap(1 - median(found, "ascent_cosine"), 0.2),
        instead=Gap(1 - float(tied.layers["ascent_share"].min()), 0.01),
        control=Gap(1 - median(found, "ascent_control"), 0.2),
        table={
            "cosine with the slope": median(found, "ascent_cosine"),
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
    correction="Where attention is diffuse: to first order in the query.",
    expected=Verdict.CONDITIONAL,
    trials=1,
    on_model=True,
)
def linear_response(trial: Trial) -> Evidence:
    """What the first order in the query leaves unexplained: in all layers, and in the one with the highest entropy."""
    found = inspection(trial.model)
    own = found.layers[found.layers["stack"] != "cross"]
    best = float(own["corollary_r2"].max())
    return Evidence(
        printed=Gap(1 - median(found, "corollary_r2"), 0.2),
        conditional=Gap(1 - best, 0.2),
        control=Gap(1 - median(found, "corollary_control"), 0.2),
        table={"median R²": median(found, "corollary_r2"), "best layer": best},
        curve=profile(found, "corollary_r2", "corollary_control"),
    )
