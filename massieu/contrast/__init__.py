"""Contrastive losses as likelihoods of exponential families, all over the same log normalizer."""

from massieu.contrast.boosting import BoostingStep, adaboost_step
from massieu.contrast.candidates import info_nce, mutual_information_bound, n_pair, nt_xent
from massieu.contrast.neighbors import nca, neighbor_probabilities
from massieu.contrast.noise import nce_loss, negative_sampling
from massieu.contrast.scaling import Embedding, classical_mds, pca
from massieu.contrast.words import skip_gram

__all__ = [
    "info_nce",
    "n_pair",
    "nt_xent",
    "mutual_information_bound",
    "nce_loss",
    "skip_gram",
    "negative_sampling",
    "nca",
    "neighbor_probabilities",
    "BoostingStep",
    "adaboost_step",
    "Embedding",
    "classical_mds",
    "pca",
]
