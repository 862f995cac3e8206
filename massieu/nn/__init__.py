"""Torch modules: attention with the statistics of its rows, memories and transformers."""

from massieu.nn.attention import MeasureAttention
from massieu.nn.block import Block, FeedForward
from massieu.nn.cache import KeyValueCache, LinearCache
from massieu.nn.encoder import HopfieldEncoderLayer
from massieu.nn.energy import EnergyTransformer
from massieu.nn.hopfield import Hopfield
from massieu.nn.linear_attention import LinearAttention
from massieu.nn.norms import Renormalization
from massieu.nn.positions import rotate
from massieu.nn.prototypes import HopfieldLayer, HopfieldPooling
from massieu.nn.transformer import Transformer

__all__ = [
    "MeasureAttention",
    "LinearAttention",
    "Hopfield",
    "HopfieldPooling",
    "HopfieldLayer",
    "HopfieldEncoderLayer",
    "EnergyTransformer",
    "Transformer",
    "Block",
    "FeedForward",
    "Renormalization",
    "KeyValueCache",
    "LinearCache",
    "rotate",
]
