"""Universal approximation by construction: networks with explicit weights, with certificates and costs."""

from massieu.universal.boltzmann import boltz, boltz_bound, boltz_gap, theorem_spacing
from massieu.universal.construction import construct
from massieu.universal.identifiers import BelowResolution, ContextualMap, contextual_map, hardmax_identifiers
from massieu.universal.lookup import table
from massieu.universal.measurements import GridAccuracy, SeparationGap, grid_errors, separation_gaps
from massieu.universal.memorization import memorize
from massieu.universal.multisets import Cost, cost, multisets
from massieu.universal.narrow_construction import construct_narrow
from massieu.universal.realization import NetworkCertificate, Realization
from massieu.universal.selective_shifts import ShiftStack, selective_shift, shift_stack
from massieu.universal.sparse_construction import construct_sparse
from massieu.universal.stacks import Stack
from massieu.universal.staircases import interpolant, staircase

__all__ = [
    "BelowResolution",
    "NetworkCertificate",
    "ContextualMap",
    "Cost",
    "GridAccuracy",
    "Realization",
    "SeparationGap",
    "ShiftStack",
    "Stack",
    "boltz",
    "boltz_bound",
    "boltz_gap",
    "construct",
    "construct_narrow",
    "construct_sparse",
    "contextual_map",
    "cost",
    "grid_errors",
    "hardmax_identifiers",
    "interpolant",
    "memorize",
    "multisets",
    "selective_shift",
    "separation_gaps",
    "shift_stack",
    "staircase",
    "table",
    "theorem_spacing",
]
