from dataclasses import fields

import pytest

from massieu.inspection.layer_statistics import TARGETS, WIDEST
from massieu.inspection.massive import MASSIVE
from massieu.inspection.quantities import QUANTITIES, Quantity, describe
from massieu.inspection.sampled_passages import KEPT, LONGEST
from massieu.inspection.tokens import ORDERS

HEADS = {
    "rows", "broken_rows", "log_normalizer", "entropy", "normalized_entropy", "perplexity", "effective_atoms", "peak", "score_mean",
    "score_variance", "score_max", "score_range", "mass90", "mass90_share", "head_class", "class_length", "sink_mass", "self_mass",
    "previous_mass", "next_mass", "gradient_cosine", "symmetric_fraction", "qk_rank", "ov_rank", "qk_norm", "ov_norm",
    "whitened_trace", "whitened_cosine", "entropy_min", "peak_max",
}  # fmt: skip
LAYERS = {
    "tokens", "expansion", "expansion_control", "monotone_share", "monotone_control", "mlp_expansion",
    "mlp_expansion_control", "norm_contraction", "norm_contraction_control", "log_volume_attention", "log_volume_mlp",
    "log_volume_norm",
    "effective_rank", "token_cosine", "clusters", "kurtosis", "kurtosis_band", "fc_linear_r2",
    "fc_linear_r2_all_tokens", "fc_linear_control", "fc_identity_r2", "field_symmetry", "field_symmetry_control",
    "fc_identity_offset_r2", "massive_tokens", "massive_norm", "massive_first_share",
    "effective_rank_all_tokens", "token_cosine_all_tokens", "kurtosis_all_tokens", "fc_identity_r2_all_tokens",
    "fc_identity_offset_r2_all_tokens", "log_volume_attention_all_tokens", "log_volume_mlp_all_tokens",
    "log_volume_norm_all_tokens",
    "field_positive", "ascent_cosine", "ascent_control", "ascent_share", "entropy_fall_share", "corollary_r2",
    "corollary_control",
}  # fmt: skip


@pytest.mark.parametrize(("table", "columns"), [("heads", HEADS), ("layers", LAYERS)])
def test_every_column_of_an_inspection_has_its_quantity(table, columns):
    assert {name for name, quantity in QUANTITIES.items() if quantity.table == table} == columns


@pytest.mark.parametrize("quantity", QUANTITIES.values(), ids=QUANTITIES)
def test_a_quantity_explains_itself(quantity):
    assert quantity.title
    assert quantity.symbol
    assert quantity.formula.count("{") == quantity.formula.count("}")
    assert 1 <= quantity.explanation.count(". ") + 1 <= 3
    assert quantity.explanation.endswith(".")
    assert quantity.control is None or QUANTITIES[quantity.control].table == quantity.table
    assert quantity.scale != "diverging" or quantity.neutral is not None


def test_names_are_the_keys():
    assert all(name == quantity.name for name, quantity in QUANTITIES.items())


def test_the_description_holds_plain_values_only():
    described = describe()
    assert set(described["entropy"]) == {field.name for field in fields(Quantity)}
    assert all(
        isinstance(value, (str, float, int, type(None))) for facts in described.values() for value in facts.values()
    )


def test_explanations_name_the_limits_that_the_measurements_have():
    limits = {
        "expansion": {2: "two random orders"}[ORDERS],
        "fc_linear_r2": f"{TARGETS} fixed random directions",
        "whitened_trace": f"{WIDEST} dimensions",
        "whitened_cosine": f"{WIDEST} dimensions",
        "corollary_r2": f"{KEPT} passages of at most {LONGEST} tokens",
    }
    for name, words in limits.items():
        assert words in QUANTITIES[name].explanation, name
    assert f"> {MASSIVE:g} median" in QUANTITIES["massive_tokens"].formula
