"""Layers as plain torch modules: attention with the statistics of its rows, memories, and transformers."""

from massieu.nn.attention import MeasureAttention
from massieu.nn.block import Block, FeedForward
from massieu.nn.cache import KeyValueCache, LinearCache
from massieu.nn.energy import EnergyTransformer
from massieu.nn.hopfield import Hopfield, HopfieldEncoderLayer, HopfieldLayer, HopfieldPooling
from massieu.nn.linear import LinearAttention
from massieu.nn.norms import Renormalization
from massieu.nn.positions import rotate
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
