"""The attention operator on clouds of tokens: steps, contractions, trajectories, laws, fixed points."""

from massieu.dynamics.balance import Balance, balance
from massieu.dynamics.contractions import (
    CONTRACTIONS,
    Affine,
    batch_norm,
    clip_to_ball,
    global_rms,
    halve,
    layer_norm,
    normal_ranks,
    normal_scores,
    renormalization,
    renormalize,
    rms_norm,
    squash,
    zca,
)
from massieu.dynamics.equilibria import FixedPoints, fixed_points
from massieu.dynamics.evolution import CloudTrajectory, evolve
from massieu.dynamics.laws import TokenLimit, cumulant_amplification, gaussian_moments, rms_norm_moments, token_limit
from massieu.dynamics.maps import ascend, hopfield_step, hopfield_time
from massieu.dynamics.observables import OBSERVABLES, Regime, cluster_labels, clusters
from massieu.dynamics.particles import resample, sphere_flow

__all__ = [
    "CONTRACTIONS",
    "OBSERVABLES",
    "Affine",
    "Balance",
    "FixedPoints",
    "Regime",
    "TokenLimit",
    "CloudTrajectory",
    "ascend",
    "balance",
    "batch_norm",
    "clip_to_ball",
    "cluster_labels",
    "clusters",
    "cumulant_amplification",
    "evolve",
    "fixed_points",
    "gaussian_moments",
    "global_rms",
    "halve",
    "hopfield_step",
    "hopfield_time",
    "layer_norm",
    "normal_ranks",
    "normal_scores",
    "renormalization",
    "renormalize",
    "resample",
    "rms_norm",
    "rms_norm_moments",
    "sphere_flow",
    "squash",
    "token_limit",
    "zca",
]
