"""Sparse attention patterns, their reach, and the theorems on universal approximation that apply to them."""

from massieu.patterns.custom_patterns import from_edges, from_mask
from massieu.patterns.edges import Edges
from massieu.patterns.families import (
    bigbird,
    causal,
    causal_strided,
    dilated,
    fixed,
    full,
    global_window,
    powers_of_two,
    random_regular,
    ring,
    star,
    star_ring,
    strided,
    window,
)
from massieu.patterns.hamiltonian import HamiltonianPath, hamiltonian_path, is_hamiltonian
from massieu.patterns.pattern import Pattern, Schedule
from massieu.patterns.probability_maps import MapCondition, probability_condition
from massieu.patterns.reachability import Reach, boolean_product, reach, reach_by_layer
from massieu.patterns.sparse_attention import SparsePlan, sparse_attend, sparse_plan
from massieu.patterns.universality import Universality, check_universality

__all__ = [
    "Edges",
    "HamiltonianPath",
    "MapCondition",
    "Pattern",
    "Reach",
    "Schedule",
    "SparsePlan",
    "Universality",
    "bigbird",
    "boolean_product",
    "causal",
    "causal_strided",
    "check_universality",
    "dilated",
    "fixed",
    "from_edges",
    "from_mask",
    "full",
    "global_window",
    "hamiltonian_path",
    "is_hamiltonian",
    "powers_of_two",
    "probability_condition",
    "random_regular",
    "reach",
    "reach_by_layer",
    "ring",
    "sparse_attend",
    "sparse_plan",
    "star",
    "star_ring",
    "strided",
    "window",
]
