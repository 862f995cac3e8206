"""Glossary of the pages: labels link to its entries and show them as tooltips."""

from __future__ import annotations

__all__ = ["WORDS"]

WORDS = {
    "head": (
        "Layer and head",
        "A layer of a transformer holds several attention heads side by side. Both are counted from 0. A stack is the"
        " sequence of layers of an encoder or a decoder; cross-attention reads the encoder from the decoder.",
    ),
    "row": (
        "Attention row",
        "The attention weights of one token over all tokens that it can attend to. They sum to one."
        " Values of a head are means over its rows.",
    ),
    "nats": (
        "Nats",
        "The unit of entropy with natural logarithms; one nat is 1.44 bits. A uniform choice among N is log N.",
    ),
    "control": (
        "Control",
        "The same measurement on a case where the effect must be absent, such as outputs that are given to the wrong"
        " tokens. A value near its control says nothing about the model.",
    ),
    "theory": (
        "Theory",
        "The value that the theory of attention as a gradient flow predicts, or the value that means no change. A"
        " trained model need not reach it.",
    ),
    "error": (
        "Standard error (±)",
        "The uncertainty of a mean from the documents that were read. Two of them on each side cover about 95 %.",
    ),
    "sink": (
        "Sink",
        "A head that puts much of its attention on the first token. The mean of such a head can hide rows with other"
        " attention.",
    ),
    "usual": (
        "Usual values",
        "The same quantities of other models, inspected with the same command on the embedded text. Entropies and"
        " counts of tokens grow with the length of the rows, so compare them at similar lengths.",
    ),
}
"""Title and meaning by the key of a word."""
