"""Associative memories, from Hopfield's to softmax and entmax: certificates, capacities, retrieval at scale."""

from massieu.memory.capacities import CapacityRow, capacity, measure_capacity, wilson_interval
from massieu.memory.certificates import (
    Bound,
    Certificate,
    Storage,
    certificate,
    contraction_bound,
    error_bound,
    fixed_point_bound,
    guaranteed_storage,
    one_step_bound,
)
from massieu.memory.classical import Classical
from massieu.memory.continuous import Continuous
from massieu.memory.dense import Dense, Exponential
from massieu.memory.density import denoise, log_density
from massieu.memory.memory import Memory, Retrieval
from massieu.memory.pictures import drawings
from massieu.memory.scale import Retrieved, retrieve_at_scale
from massieu.memory.similarity import Kernel
from massieu.memory.sparse import Sparse
from massieu.memory.tsallis import entmax, tsallis_entropy

__all__ = [
    "Bound",
    "CapacityRow",
    "Certificate",
    "Classical",
    "Continuous",
    "Dense",
    "Exponential",
    "Kernel",
    "Memory",
    "Retrieval",
    "Retrieved",
    "Sparse",
    "Storage",
    "capacity",
    "certificate",
    "contraction_bound",
    "denoise",
    "drawings",
    "entmax",
    "error_bound",
    "fixed_point_bound",
    "guaranteed_storage",
    "log_density",
    "measure_capacity",
    "one_step_bound",
    "retrieve_at_scale",
    "tsallis_entropy",
    "wilson_interval",
]
