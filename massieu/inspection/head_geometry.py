"""The geometry of head weights as tables: spectra, symmetry and the whitened test, each beside random heads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from massieu import geometry
from massieu.checks import UserError
from massieu.geometry import Spectrum
from massieu.models.head_weights import HeadWeights

if TYPE_CHECKING:
    import pandas

__all__ = ["FIGURES", "HeadGeometry", "head_geometry"]


class HeadGeometry(NamedTuple):
    """The geometry of all heads as tables.

    Attributes:
        heads: one row per head: ``stack, layer, name, head`` and the values; nan where one does not apply.
        experiments: one row per value that the theory predicts: ``experiment, stack, layer, head, quantity, value,
            control, predicted``. The control is the same value of a random head of the same norm; ``head`` is missing
            where a value belongs to the layer. "C47 constructed" are heads built to pass the whitened test.
        notes: sentences of :class:`HeadWeights`, each with the layers it holds for if these are not all.
    """

    heads: pandas.DataFrame
    experiments: pandas.DataFrame
    notes: list[str]


def head_geometry(
    weights: Iterable[HeadWeights],
    input_covariances: Mapping[str, Tensor | None] | None = None,
    *,
    floor: float = 1e-3,
    seed: int = 0,
) -> HeadGeometry:
    """Spectra, symmetry, gradient cosine and whitened test of every head, each beside a random head of its norm.

    Args:
        weights: from :func:`head_weights`, or :func:`each_layer` to hold one layer at a time.
        input_covariances: by the name of the attention module, the covariance ``(dim, dim)`` of what its queries read
            (from ``LayerObserver.input_covariances``); without one there is no whitened test.
        floor: smallest eigenvalue of the covariances, as a share of their mean eigenvalue.
        seed: of the random heads.

    Source:
        Claims X1 and C47 on "A Probabilistic Interpretation of Transformers".

    Example:
        >>> from massieu.models.head_weights import head_weights
        >>> model = massieu.nn.MeasureAttention(8, num_heads=2, tying="tied")
        >>> found = head_geometry(head_weights(model, torch.randn(1, 3, 8)))
        >>> found.heads.gradient_cosine.round(6).tolist()
        [1.0, 1.0]
    """
    import pandas

    generator = torch.Generator().manual_seed(seed)
    rows: list[dict[str, Any]] = []
    experiments: list[dict[str, Any]] = []
    notes: dict[str, list[str]] = {}
    for layer in weights:
        if layer.note:
            notes.setdefault(layer.note, []).append(f"{layer.stack} {layer.layer}")
        covariance = (input_covariances or {}).get(layer.name)
        spectrum = None if covariance is None else _spectrum(layer, covariance, floor)
        found, control = _figures(layer, spectrum, None), _figures(layer, spectrum, generator)
        place = {"stack": layer.stack, "layer": layer.layer}
        for head in range(layer.heads):
            own = {name: figure[head].item() for name, figure in found.items()}
            rows.append({**place, "name": layer.name, "head": head, **own})
            drawn = {name: figure[head].item() for name, figure in control.items()}
            experiments += _compare(place | {"head": head}, own, drawn, _predicted(layer))
        if spectrum is not None:
            experiments += _layer_experiments(layer, spectrum, place, generator)
    calls = len({(row["stack"], row["layer"]) for row in rows})
    sentences = [note if len(at) == calls else f"{note} ({', '.join(at)})" for note, at in notes.items()]
    columns = ["experiment", "stack", "layer", "head", "quantity", "value", "control", "predicted"]
    table = pandas.DataFrame(experiments, columns=columns).astype({"head": "Int64"})
    return HeadGeometry(pandas.DataFrame(rows, columns=["stack", "layer", "name", "head", *FIGURES]), table, sentences)


FIGURES = {
    "qk_rank": "spectrum",
    "ov_rank": "spectrum",
    "qk_norm": "spectrum",
    "ov_norm": "spectrum",
    "symmetric_fraction": "C47",
    "gradient_cosine": "X1",
    "whitened_trace": "C47",
    "whitened_cosine": "C47",
    "idempotency": "C47",
    "logit_sd": "C47",
}
"""Values of a head and the experiment they belong to."""


def _figures(layer: HeadWeights, spectrum: Spectrum | None, generator: torch.Generator | None) -> dict[str, Tensor]:
    """All values, each ``(heads,)``; with a generator, those of random heads of the same norms."""
    found = {name: torch.full((layer.heads,), torch.nan) for name in FIGURES}
    score, output = layer.score_map, layer.output_map
    if generator is not None:
        score = None if score is None else geometry.random_maps(score, generator)
        output = None if output is None else geometry.random_maps(output, generator)
    for prefix, matrix in (("qk", score), ("ov", output)):
        if matrix is not None:
            singular = geometry.singular_values(matrix)
            found |= {f"{prefix}_rank": geometry.effective_rank(singular), f"{prefix}_norm": singular[..., 0]}
    if score is not None and output is not None:
        found["gradient_cosine"] = geometry.cosine(output, score)
    if score is not None and layer.same_input:
        found["symmetric_fraction"] = geometry.symmetric_fraction(score)
        if spectrum is not None:
            trace, cosine, idempotency, spread = geometry.whitened_head(score, spectrum)
            found |= {
                "whitened_trace": trace,
                "whitened_cosine": cosine,
                "idempotency": idempotency,
                "logit_sd": spread,
            }
    return found


def _predicted(layer: HeadWeights) -> dict[str, float]:
    """Predicted values of a head that climbs log Z and whose scores invert the covariance of its tokens."""
    if layer.query is None:
        return {}
    rank, dim = layer.query.shape[-2:]
    ideal = {"whitened_trace": float(rank), "whitened_cosine": min(1.0, rank / dim) ** 0.5}
    return {**ideal, "idempotency": 0.0, "logit_sd": rank**0.5, "symmetric_fraction": 1.0, "gradient_cosine": 1.0}


def _compare(
    place: Mapping[str, Any], own: Mapping[str, float], control: Mapping[str, float], predicted: Mapping[str, float]
) -> list[dict[str, Any]]:
    # A value that does not apply (nan is not equal to itself) is no experiment.
    return [
        {
            "experiment": FIGURES[name],
            **place,
            "quantity": name,
            "value": value,
            "control": control[name],
            "predicted": predicted.get(name, torch.nan),
        }
        for name, value in own.items()
        if value == value
    ]


def _layer_experiments(
    layer: HeadWeights, spectrum: Spectrum, place: Mapping[str, Any], generator: torch.Generator
) -> list[dict[str, Any]]:
    """The power of the covariance that the heads together resemble, and a constructed head that passes the test."""
    score = layer.score_map
    if score is None or not layer.same_input:
        return []
    drawn = geometry.random_maps(score, generator)
    ideal = geometry.whitened_head(geometry.projector_maps(spectrum, score.left.shape[-2], (), generator), spectrum)
    exponents = (-1.0, -0.5, 0.5, 1.0)
    found, control = (geometry.power_cosine(matrix, spectrum, exponents).tolist() for matrix in (score, drawn))
    rows: list[dict[str, Any]] = [
        {
            "experiment": "C47",
            "quantity": f"power_cosine {exponent:g}",
            "value": value,
            "control": random,
            "predicted": 1.0 if exponent == -1 else torch.nan,
        }
        for exponent, value, random in zip(exponents, found, control, strict=True)
    ]
    names = ("whitened_trace", "whitened_cosine", "idempotency", "logit_sd")
    rows += [
        {
            "experiment": "C47 constructed",
            "quantity": name,
            "value": figure.item(),
            "predicted": _predicted(layer)[name],
        }
        for name, figure in zip(names, ideal, strict=True)
    ]
    return [{**place, "head": None, "control": torch.nan, **row} for row in rows]


def _spectrum(layer: HeadWeights, covariance: Tensor, floor: float) -> Spectrum | None:
    if layer.query is None:
        return None
    if covariance.shape[0] != layer.query.shape[-1]:
        raise UserError(
            f"the covariance of {layer.name} must have shape ({layer.query.shape[-1]}, {layer.query.shape[-1]}), got"
            f" {tuple(covariance.shape)}; it is that of the tokens that its queries read"
        )
    return geometry.floored_spectrum(covariance.to(layer.query.device), floor)
