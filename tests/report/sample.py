"""Made-up inspections for tests of pages, figures and findings."""

from __future__ import annotations

import math

import numpy as np

from massieu.inspection.quantities import ALL_TOKENS, QUANTITIES, describe

FOREVER_TOKENS = 8231
STACKS = {"encoder": ("encoder",), "decoder": ("decoder",), "both": ("encoder", "decoder", "cross")}


def inspection(
    layers: int = 6, heads: int = 12, *, kind: str = "encoder", name: str = "", seed: int = 0, sharp: float = 1.0
):
    """Return the document of an inspection; a larger ``sharp`` has larger weights and sharper heads."""
    generator = np.random.default_rng(seed)
    stacks = STACKS[kind]
    head_rows = [
        row
        for stack in stacks
        for layer in range(layers)
        for row in _heads(generator, stack, layer, layers, heads, sharp)
    ]
    layer_rows = [
        _layer(generator, stack, layer, layers, sharp)
        for stack in stacks
        if stack != "cross"
        for layer in range(layers)
    ]
    calls = layers * len(stacks)
    return {
        "schema": "massieu.inspection/2",
        "facts": {
            "model": {
                "name": name or f"sample/{kind}-{layers}x{heads}",
                "type": "bert",
                "class": "BertModel",
                "parameters": 22713216,
                "layers": layers,
                "heads": heads,
                "hidden": 32 * heads,
                "head_width": 32,
                "dtype": "float32",
                "attention": "sdpa",
                "revision": "8b3219a92973c328a8e22fadcfa821b5dc75636a",
            },
            "text": {
                "source": "moby-dick.txt",
                "sha256": "3f1c7b3d9a0c" * 5 + "abcd",
                "documents": 64,
                "passages": 64,
                "tokens": FOREVER_TOKENS + 128,
                "counted_tokens": FOREVER_TOKENS,
                "excluded": "128 special tokens ([CLS], [SEP])",
                "max_length": 256,
                "unit": "document",
            },
            "coverage": {
                "expected": calls,
                "observed": calls,
                "sentence": f"observed {calls} of {calls} attention modules",
                "missing": [],
            },
            "versions": {
                "massieu": "0.1.0",
                "torch": "2.13.0",
                "transformers": "5.22.2",
                "python": "3.11.7",
                "kernel": "avx2",
            },
            "options": {"batch_size": 16, "seed": 0},
            "seconds": 12.3,
            "peak_memory_mb": 512,
        },
        "notes": [
            "Special tokens are excluded from every mean: 128 of 8359.",
            "The last three heads of layer 1 have rows of fewer than 32 tokens, so no class is given for them.",
        ],
        "findings": [],
        "quantities": describe(),
        "heads": head_rows,
        "layers": layer_rows,
        "experiments": [
            {
                "experiment": "X1",
                "stack": stacks[0],
                "layer": layer,
                "head": None,
                "quantity": "field_symmetry",
                "value": row["field_symmetry"],
                "control": row["field_symmetry_control"],
                "predicted": 1.0,
            }
            for layer, row in enumerate(layer_rows[:layers])
        ],
    }


def _heads(generator, stack, layer, layers, heads, sharp):
    depth = layer / max(layers - 1, 1)
    for head in range(heads):
        size = 180.0
        sink = float(generator.beta(0.35, 2.2) * (0.4 + 0.6 * depth))
        share = float(
            np.clip(generator.beta(3.0, 1.4) ** (0.6 * sharp) - 0.25 * depth * generator.random(), 0.03, 0.99)
        )
        entropy = share * math.log(size)
        variance = float(sharp * generator.gamma(2.0, 0.9) * (1.2 - share) + 0.05)
        mean = float(generator.normal(0.8, 1.2) + 1.5 * (1 - share))
        peak = float(np.clip(math.exp(-entropy) * (1.5 + 2 * generator.random()), 0.006, 0.985))
        mass90 = max(1.0, round(0.8 * math.exp(entropy)))
        portion = min(mass90 / size, 0.9)
        short = layer == 1 and head >= heads - 3
        row = {
            "stack": stack,
            "layer": layer,
            "name": f"{stack}.layer.{layer}.attention.self",
            "head": head,
            "rows": FOREVER_TOKENS,
            "broken_rows": 0,
            "log_normalizer": mean + entropy,
            "entropy": entropy,
            "entropy_min": entropy * 0.3,
            "normalized_entropy": share,
            "perplexity": math.exp(entropy) * 1.08,
            "effective_atoms": math.exp(entropy) * 0.72,
            "peak": peak,
            "peak_max": min(1.0, 1.8 * peak),
            "score_mean": mean,
            "score_variance": variance,
            "score_max": mean + 6 * math.sqrt(variance),
            "score_range": 3.1 * math.sqrt(variance),
            "mass90": mass90,
            "mass90_share": portion,
            "head_class": None
            if short
            else "I"
            if portion > 1 / 2
            else "II"
            if portion > 1 / 8
            else "III"
            if portion > 1 / 32
            else "IV",
            "class_length": None if short else size,
            "sink_mass": sink,
            "self_mass": float(generator.beta(0.6, 9)),
            "previous_mass": 0.71 if head == 5 % heads and layer == 2 % layers else float(generator.beta(0.5, 12)),
            "next_mass": 0.6 * (head + 1) / heads if stack == "encoder" else None,
            "gradient_cosine": float(generator.normal(0.03, 0.05)),
            "symmetric_fraction": float(np.clip(generator.normal(0.56, 0.06), 0, 1)),
            "qk_rank": float(generator.uniform(14, 30)),
            "ov_rank": float(generator.uniform(22, 31)),
            "qk_norm": float(sharp * generator.gamma(4.0, 1.1)),
            "ov_norm": float(sharp * generator.gamma(4.0, 0.4)),
            "whitened_trace": None if stack == "cross" else float(generator.normal(11, 9)),
            "whitened_cosine": None if stack == "cross" else float(generator.normal(0.06, 0.05)),
        }
        for column in ("log_normalizer", "entropy", "normalized_entropy", "perplexity", "effective_atoms", "peak", "score_mean",
                       "score_variance", "score_range", "sink_mass", "self_mass", "previous_mass"):  # fmt: skip
            row[f"{column}_se"] = abs(row[column]) * float(generator.uniform(0.004, 0.03))
        yield row


def _layer(generator, stack, layer, layers, sharp=1.0):
    depth = sharp**0.2 * layer / max(layers - 1, 1)
    noise = lambda size: float(generator.normal(0, size))  # noqa: E731
    linear = 0.62 + 0.2 * depth + noise(0.03)
    row = {
        "stack": stack,
        "layer": layer,
        "name": f"{stack}.layer.{layer}",
        "tokens": FOREVER_TOKENS,
        "expansion": 1.03 + 0.12 * math.sin(2.5 * depth) + noise(0.01),
        "expansion_control": 1.05 + 0.05 * depth + noise(0.005),
        "monotone_share": 0.72 + 0.1 * depth + noise(0.02),
        "monotone_control": 0.5 + noise(0.01),
        "mlp_expansion": 1.2 + 0.2 * depth + noise(0.03) + 12 * (layer == 0),  # far from the rest, as in real models
        "mlp_expansion_control": 1.25 + 0.1 * depth + noise(0.02),
        "norm_contraction": 0.82 - 0.1 * depth + noise(0.02),
        "norm_contraction_control": 0.95 + noise(0.02),
        "log_volume_attention": 21 + noise(6),
        "log_volume_mlp": 34 + noise(8),
        "log_volume_norm": -48 + noise(7),
        "effective_rank": 210 - 95 * depth + noise(5),
        "token_cosine": 0.12 + 0.4 * depth + noise(0.02),
        "clusters": 120 - 60 * depth + noise(3),
        "kurtosis": 0.25 + 0.4 * depth + noise(0.05),
        "kurtosis_band": 0.09,
        "fc_linear_r2": linear,
        "fc_linear_r2_all_tokens": 0.5 + 0.5 * linear,
        "fc_linear_control": -0.02 + noise(0.01),
        "fc_identity_r2": 0.55 + 0.2 * depth + noise(0.03),
        "field_symmetry": 0.58 + noise(0.03),
        "field_symmetry_control": 0.5 + noise(0.004),
        "field_positive": 0.6 + noise(0.04),
        "ascent_cosine": 0.21 + 0.1 * depth + noise(0.03),
        "ascent_control": noise(0.01),
        "ascent_share": 0.86 + noise(0.03),
        "entropy_fall_share": 0.61 + noise(0.04),
        "corollary_r2": 0.55 + 0.2 * depth + noise(0.05),
        "corollary_control": -0.3 + noise(0.05),
    }
    for name in (
        "expansion",
        "expansion_control",
        "norm_contraction",
        "token_cosine",
        "field_symmetry",
        "ascent_cosine",
    ):
        row[f"{name}_se"] = 0.004 + abs(noise(0.004))
    row |= {"fc_identity_offset_r2": row["fc_identity_r2"] + 0.05, "massive_tokens": 0, "massive_norm": 3.0 + depth}
    row["massive_first_share"] = None
    if stack == "decoder" and layer == 0:
        row["fc_identity_r2"] = None
    return row | {f"{name}_all_tokens": row[name] for name in ALL_TOKENS}


assert {name for name, quantity in QUANTITIES.items() if quantity.table == "layers"} <= set(
    _layer(np.random.default_rng(0), "", 0, 1)
)
