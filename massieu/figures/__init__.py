"""Drawing only: tables in, figures out. Matplotlib is loaded when one is drawn; its global state is left alone."""

from massieu.figures.inspections import Described, head_map, layer_profile, save_figures, trajectory
from massieu.figures.training import training_panels
from massieu.margin.figures import approach, selection_plane, starts_map
from massieu.memory.figures import capacity_curve, energy_landscape, overlap_transition, retrieved_images
from massieu.patterns.figures import connection_growth, pattern_reach
from massieu.universal.figures import grid_error_curve, separation_curve

__all__ = [
    "Described",
    "approach",
    "capacity_curve",
    "connection_growth",
    "energy_landscape",
    "grid_error_curve",
    "head_map",
    "layer_profile",
    "overlap_transition",
    "pattern_reach",
    "retrieved_images",
    "save_figures",
    "selection_plane",
    "separation_curve",
    "starts_map",
    "training_panels",
    "trajectory",
]
