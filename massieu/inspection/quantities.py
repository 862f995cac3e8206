"""What every column of an inspection means: its title, formula, unit and explanation, in one place.

Formulas are plain text: ``_`` and ``^`` lower and raise what follows them (a letter, or a group in braces). They read
well in a terminal, and the report sets them as mathematics.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Literal

__all__ = ["GEOMETRY", "QUANTITIES", "Quantity", "describe"]

GEOMETRY = "Geometry of the weights"

Scale = Literal["sequential", "logarithmic", "diverging", "class"]


@dataclass(frozen=True)
class Quantity:
    """One column of the heads or the layers table.

    Attributes:
        name: the column; a mean has its standard error in the column ``<name>_se``.
        table: "heads" or "layers".
        group: the heading under which a report shows it.
        title: a few words.
        symbol: as short as an axis label must be.
        formula: how it is computed, as plain text.
        unit: "nats", "tokens" and so on; empty for a pure number.
        explanation: what a reader should think of.
        scale: how colors follow the values.
        control: the column with the same measurement on a case where the effect must be absent.
        predicted: the value that the theory asks for.
        neutral: the value that means nothing happened; the middle of a diverging scale.
        digits: decimals worth printing.
        least: smallest possible value, where the colors of a map begin; None if there is none.
        most: largest possible value, where they end; "length" is the number of tokens that a row sees.
    """

    name: str
    table: Literal["heads", "layers"]
    group: str
    title: str
    symbol: str
    formula: str
    unit: str
    explanation: str
    scale: Scale = "sequential"
    control: str | None = None
    predicted: float | None = None
    neutral: float | None = None
    digits: int = 2
    least: float | None = None
    most: float | Literal["length", "log length"] | None = None


def describe() -> dict[str, dict[str, object]]:
    """Every quantity as plain values, as ``inspection.json`` carries them.

    Example:
        >>> describe()["entropy"]["unit"]
        'nats'
    """
    return {name: asdict(quantity) for name, quantity in QUANTITIES.items()}


def _thermodynamics() -> Iterator[Quantity]:
    group = "Thermodynamics of attention"
    yield Quantity(
        "entropy",
        "heads",
        group,
        "Entropy",
        "H",
        "H = −Σ_j p_j log p_j = log Z − E[s]",
        "nats",
        "How undecided a head is. Zero means that all attention is on one token; log N means that it is spread"
        " evenly over the N tokens that the row can see.",
        least=0.0,
        most="log length",
    )
    yield Quantity(
        "normalized_entropy",
        "heads",
        group,
        "Normalized entropy",
        "H / log N",
        "H / log N",
        "",
        "The entropy as a share of the largest one that is possible for the row, so that early and late positions"
        " of a causal model can be compared. One is uniform attention, zero a single token.",
        least=0.0,
        most=1.0,
    )
    yield Quantity(
        "perplexity",
        "heads",
        group,
        "Perplexity",
        "e^H",
        "e^H",
        "tokens",
        "The number of equally likely tokens that would give the same entropy: how many tokens the head reads at once.",
        scale="logarithmic",
        digits=1,
        least=1.0,
        most="length",
    )
    yield Quantity(
        "effective_atoms",
        "heads",
        group,
        "Effective tokens",
        "N_2",
        "1 / Σ_j p_j^2",
        "tokens",
        "Another count of the tokens that matter: one over the chance that two draws from the attention row"
        " coincide. It weighs the large weights more than the perplexity does.",
        scale="logarithmic",
        digits=1,
        least=1.0,
        most="length",
    )
    yield Quantity(
        "log_normalizer",
        "heads",
        group,
        "Log normalizer",
        "log Z",
        "log Z = log Σ_j e^{s_j}",
        "nats",
        "Massieu's potential of the row. Its gradient with respect to the query is the mean key, and minus the mean"
        " score it gives the entropy.",
        scale="diverging",
        neutral=0.0,
    )
    yield Quantity(
        "score_variance",
        "heads",
        group,
        "Heat capacity",
        "Var[s]",
        "Var[s] = Σ_j p_j (s_j − E[s])^2",
        "nats²",
        "The variance of the scores under the attention weights: how fast the entropy falls when the head gets"
        " colder. Small when attention is uniform and when it is frozen on one token.",
        scale="logarithmic",
    )
    yield Quantity(
        "entropy_min",
        "heads",
        group,
        "Lowest entropy",
        "min H",
        "min over rows of H",
        "nats",
        "The entropy of the sharpest row that was seen, among those with two tokens or more to choose from. A"
        " collapsed head shows here before the mean moves.",
        least=0.0,
        most="log length",
    )


def _scores() -> Iterator[Quantity]:
    group = "Scores"
    yield Quantity(
        "score_mean",
        "heads",
        group,
        "Mean score",
        "E[s]",
        "E[s] = Σ_j p_j s_j",
        "nats",
        "The mean of the scores (query times key, scaled, masks included) under the attention weights.",
        scale="diverging",
        neutral=0.0,
    )
    yield Quantity(
        "score_max",
        "heads",
        group,
        "Largest score",
        "max s",
        "max over rows and tokens of s_j",
        "nats",
        "The largest score that was seen. Scores that grow without bound in training go together with attention"
        " that collapses and with loss spikes.",
        scale="diverging",
        neutral=0.0,
    )
    yield Quantity(
        "score_range",
        "heads",
        group,
        "Score range",
        "max s − min s",
        "mean over sampled rows of max_j s_j − min_j s_j",
        "nats",
        "How far the best token stands above the worst one. A difference of one means e times the attention. A sampled"
        " row weighs as much as the rows that it stands for.",
        least=0.0,
    )


def _places() -> Iterator[Quantity]:
    group = "Where attention goes"
    yield Quantity(
        "peak",
        "heads",
        group,
        "Largest weight",
        "max p",
        "mean over rows of max_j p_j",
        "",
        "The share of attention that the most attended token gets.",
        least=0.0,
        most=1.0,
    )
    yield Quantity(
        "peak_max",
        "heads",
        group,
        "Largest weight of all rows",
        "sup p",
        "max over rows of max_j p_j",
        "",
        "The largest single attention weight that was seen. One means that some row looks at one token only.",
        least=0.0,
        most=1.0,
    )
    yield Quantity(
        "sink_mass",
        "heads",
        group,
        "Mass on the first token",
        "p_0",
        "mean over rows behind the first of p_0",
        "",
        "The share of attention on the first token. Mass that a row does not need elsewhere rests there: an attention"
        " sink. A head with a sink can still select: some induction heads give nine tenths of their attention to it.",
        least=0.0,
        most=1.0,
    )
    yield Quantity(
        "self_mass",
        "heads",
        group,
        "Mass on the token itself",
        "p_i",
        "mean over rows i of p_{ii}",
        "",
        "The share of attention that a token gives to itself.",
        least=0.0,
        most=1.0,
    )
    yield Quantity(
        "previous_mass",
        "heads",
        group,
        "Mass on the previous token",
        "p_{i−1}",
        "mean over rows i of p_{i,i−1}",
        "",
        "The share of attention on the token just before. Heads with much of it are the first half of induction.",
        least=0.0,
        most=1.0,
    )
    yield Quantity(
        "next_mass",
        "heads",
        group,
        "Mass on the next token",
        "p_{i+1}",
        "mean over rows i before the last of p_{i,i+1}",
        "",
        "The share of attention on the token just after, in encoders. Rows of a decoder do not see it, so there it is"
        " empty.",
        least=0.0,
        most=1.0,
    )
    yield Quantity(
        "mass90",
        "heads",
        group,
        "Tokens for 90 % of the mass",
        "k_{90}",
        "mean over sampled rows of the smallest k whose k largest p_j sum to 0.9",
        "tokens",
        "How many of its tokens a row needs to collect nine tenths of its attention. A sampled row weighs as much as"
        " the rows that it stands for, so that long passages count by their length, as in all other means.",
        scale="logarithmic",
        digits=1,
        least=1.0,
        most="length",
    )
    yield Quantity(
        "mass90_share",
        "heads",
        group,
        "Share of tokens for 90 % of the mass",
        "k_{90} / N",
        "median over sampled rows of k_{90} / N",
        "",
        "The same count as a share of the N tokens that the row can see, over rows that see at least 32. The median is"
        " taken from a histogram, which rounds it up by at most 1.1 %; the class does not depend on the rounding.",
        least=0.0,
        most=1.0,
    )
    yield Quantity(
        "head_class",
        "heads",
        group,
        "Class of the head",
        "class",
        "I: k_{90}/N > 1/2;  II: > 1/8;  III: > 1/32;  IV: at most 1/32",
        "",
        "Ramsauer's classes: I averages over nearly everything, II over large, III over small groups of tokens, IV"
        " picks single ones. A head that reads about as many tokens at every length moves toward class IV as texts get"
        " longer, so compare classes only at a similar length (class_length). No class is given where the rows are too"
        " short to tell the classes apart.",
        scale="class",
    )
    yield Quantity(
        "class_length",
        "heads",
        group,
        "Length behind the class",
        "N",
        "mean over sampled rows with N ≥ 32 of N",
        "tokens",
        "The mean number of keys that the rows behind the class of the head see. Classes follow length: those of two"
        " texts can be compared where this number is similar.",
        digits=0,
    )
    yield Quantity(
        "rows",
        "heads",
        group,
        "Rows",
        "n",
        "number of query rows counted",
        "rows",
        "How many attention rows the means of this head are taken over. Padding and excluded tokens do not count.",
        digits=0,
    )
    yield Quantity(
        "broken_rows",
        "heads",
        group,
        "Broken rows",
        "n_{broken}",
        "number of query rows with a score that is nan or infinite",
        "rows",
        "Rows whose attention is not defined, because the numbers of the model overflow or its weights are damaged."
        " They are left out of every other value of this head; zero is healthy.",
        digits=0,
    )


def _weights() -> Iterator[Quantity]:
    group = GEOMETRY
    yield Quantity(
        "gradient_cosine",
        "heads",
        group,
        "Gradient alignment",
        "cos(B, A)",
        "⟨B, A⟩ / (|B| |A|),  A = W_Q^⊤ W_K / √d_k,  B = W_O W_V",
        "",
        "Attention climbs its own log normalizer only if what a head writes (B) follows what it reads (A). One is"
        " exact ascent, minus one exact descent, random weights give zero.",
        scale="diverging",
        predicted=1.0,
        neutral=0.0,
        least=-1.0,
        most=1.0,
    )
    yield Quantity(
        "symmetric_fraction",
        "heads",
        group,
        "Symmetry of query-key weights",
        "sym A",
        "|(A + A^⊤)/2|^2 / |A|^2",
        "",
        "How much of the query-key form is symmetric. One means that tokens attract each other mutually, one half"
        " is what random weights give, zero is pure antisymmetry.",
        scale="diverging",
        neutral=0.5,
        least=0.0,
        most=1.0,
    )
    yield Quantity(
        "qk_rank",
        "heads",
        group,
        "Effective rank, query-key",
        "rank A",
        "exp of the entropy of σ_i / Σ σ_i,  σ = singular values of A",
        "",
        "How many directions the head really uses to compare tokens; at most the width of the head.",
        digits=1,
        least=1.0,
    )
    yield Quantity(
        "ov_rank",
        "heads",
        group,
        "Effective rank, output-value",
        "rank B",
        "exp of the entropy of σ_i / Σ σ_i,  σ = singular values of B",
        "",
        "How many directions the head really writes to.",
        digits=1,
        least=1.0,
    )
    yield Quantity(
        "qk_norm",
        "heads",
        group,
        "Largest gain, query-key",
        "|A|",
        "largest singular value of A",
        "",
        "The largest score that two tokens of unit length could produce. It bounds how sharp the head can be and"
        " grows in training.",
        scale="logarithmic",
    )
    yield Quantity(
        "ov_norm",
        "heads",
        group,
        "Largest gain, output-value",
        "|B|",
        "largest singular value of B",
        "",
        "The most by which the head can stretch what it copies.",
        scale="logarithmic",
    )
    yield Quantity(
        "whitened_trace",
        "heads",
        group,
        "Whitened trace",
        "tr M",
        "tr M,  M = Λ^{1/2} A Λ^{1/2},  Λ = covariance of the inputs",
        "",
        "If the query-key form were an inverse covariance on its own subspace, as for a Gaussian memory, the"
        " whitened trace would be the width of the head. Empty for models of more than 768 dimensions, whose whole"
        " covariance is not kept.",
        scale="diverging",
        neutral=0.0,
    )
    yield Quantity(
        "whitened_cosine",
        "heads",
        group,
        "Whitened cosine",
        "cos(M, I)",
        "tr M / (|M| √d)",
        "",
        "How near the whitened query-key form is to the identity. The theory asks for √(head width / model width);"
        " random weights give zero. Empty for models of more than 768 dimensions.",
        scale="diverging",
        neutral=0.0,
        digits=3,
        least=-1.0,
        most=1.0,
    )


def _distances() -> Iterator[Quantity]:
    group = "Expansion and contraction"
    yield Quantity(
        "expansion",
        "layers",
        group,
        "Expansion by attention",
        "|Δ(x+a)| / |Δx|",
        "median over pairs of |x_i + a_i − x_j − a_j| / |x_i − x_j|",
        "",
        "Whether attention and its residual push tokens apart (above one) or pull them together. The control adds"
        " the same outputs to the wrong tokens: only what lies above or below it is due to attention. About two pairs"
        " for each token are sampled: the neighbors in two random orders of its passage.",
        scale="diverging",
        control="expansion_control",
        neutral=1.0,
        digits=3,
    )
    yield Quantity(
        "monotone_share",
        "layers",
        group,
        "Pairs that attention pushes apart",
        "P(Δx·Δa > 0)",
        "share of pairs with (x_i − x_j)·(a_i − a_j) > 0",
        "",
        "The share of token pairs whose attention outputs differ in the direction in which the tokens differ. One"
        " for the gradient of a convex potential; one half by chance. The pairs are those of the expansion.",
        control="monotone_control",
        predicted=1.0,
    )
    yield Quantity(
        "mlp_expansion",
        "layers",
        group,
        "Expansion by the MLP",
        "|Δ(x+m)| / |Δx|",
        "median over pairs of |x_i + m_i − x_j − m_j| / |x_i − x_j|",
        "",
        "The same ratio, for the same sampled pairs, of the feed-forward sublayer.",
        scale="diverging",
        control="mlp_expansion_control",
        neutral=1.0,
        digits=3,
    )
    yield Quantity(
        "norm_contraction",
        "layers",
        group,
        "Contraction by the normalization",
        "|Δ norm(x)| / |Δx|",
        "median over pairs of |norm(x_i) − norm(x_j)| / |x_i − x_j|",
        "",
        "What the layer normalization does to distances. The theory pairs an expanding attention with a contracting"
        " norm (below one). The control gives each token the change that the norm makes to another one.",
        scale="diverging",
        control="norm_contraction_control",
        neutral=1.0,
        digits=3,
    )
    for part, words in (
        ("attention", "the attention sublayer"),
        ("mlp", "the feed-forward sublayer"),
        ("norm", "the normalization"),
    ):
        yield Quantity(
            f"log_volume_{part}",
            "layers",
            group,
            f"Volume change by {'MLP' if part == 'mlp' else part}",
            "Δ log V",
            "½ log det Cov(after) − ½ log det Cov(before)",
            "nats",
            f"How much {words} changes the volume of the cloud of tokens, taken as a Gaussian. Positive expands.",
            scale="diverging",
            neutral=0.0,
            digits=1,
        )


def _cloud() -> Iterator[Quantity]:
    group = "Shape of the token cloud"
    yield Quantity(
        "effective_rank",
        "layers",
        group,
        "Effective rank of the tokens",
        "rank Λ",
        "exp of the entropy of λ_i / Σ λ_i,  λ = eigenvalues of the covariance",
        "directions",
        "In how many directions the tokens really differ. A fall over the layers is a loss of diversity.",
        digits=1,
    )
    yield Quantity(
        "token_cosine",
        "layers",
        group,
        "Similarity of the tokens",
        "cos(x_i, x_j)",
        "mean over pairs of one passage of cos(x_i, x_j)",
        "",
        "How much all tokens point the same way. One means that they have become the same direction: collapse.",
    )
    yield Quantity(
        "clusters",
        "layers",
        group,
        "Clusters",
        "n_c",
        "Σ_i 1 / Σ_j s_{ij},  s = similarity, rising from 0 to 1 between cosines 0.8 and 0.9",
        "",
        "Into how many groups up to 64 tokens of a passage have gathered: tokens that agree count once.",
        digits=1,
    )
    yield Quantity(
        "kurtosis",
        "layers",
        group,
        "Gaussianity",
        "κ",
        "mean kurtosis of whitened random projections, minus 3",
        "",
        "Zero for a Gaussian cloud; the band is what a true Gaussian sample of the same size would show. Positive"
        " means heavy tails.",
        scale="diverging",
        control="kurtosis_band",
        predicted=0.0,
        neutral=0.0,
        digits=3,
    )
    yield Quantity(
        "tokens",
        "layers",
        group,
        "Tokens",
        "n",
        "number of tokens counted",
        "tokens",
        "How many tokens the values of this layer are taken over; massive tokens are not among them.",
        digits=0,
    )


def _linearity() -> Iterator[Quantity]:
    group = "How linear the MLP is"
    yield Quantity(
        "fc_linear_r2",
        "layers",
        group,
        "Linear fit, content tokens",
        "R²",
        "held-out R² of a ridge map from MLP input to output",
        "",
        "How much of the feed-forward sublayer a single matrix explains on tokens it was not fitted to. In models of"
        " more than 384 dimensions the targets are the outputs along 384 fixed random directions; above 768 there is no"
        " fit. The control takes from inputs and targets the means of their passage, which a permutation over documents"
        " would scatter, and permutes the rest of the targets.",
        control="fc_linear_control",
        digits=3,
    )
    yield Quantity(
        "fc_linear_r2_all_tokens",
        "layers",
        group,
        "Linear fit, all tokens",
        "R²",
        "the same, special and massive tokens included",
        "",
        "A few tokens with huge values can make a layer look linear; compare with the fit on content tokens.",
        control="fc_linear_control",
        digits=3,
    )
    yield Quantity(
        "fc_identity_r2",
        "layers",
        group,
        "Identity with residual",
        "R²",
        "1 − E|m|^2 / E|x + m − E[x + m]|^2",
        "",
        "How much of the sublayer's result is simply its input, carried by the residual. A constant that the MLP adds"
        " to every token counts as an error, so the value may be negative.",
        digits=3,
    )
    yield Quantity(
        "fc_identity_offset_r2",
        "layers",
        group,
        "Identity with residual and a constant",
        "R²",
        "1 − E|m − E[m]|^2 / E|x + m − E[x + m]|^2",
        "",
        "How much of the sublayer's result is its input plus one constant vector.",
        digits=3,
    )


def _massive() -> Iterator[Quantity]:
    group = "Massive activations"
    yield Quantity(
        "massive_tokens",
        "layers",
        group,
        "Massive tokens",
        "n_m",
        "number of tokens with |x_i| > 20 median_j |x_j| in this block or an earlier one, j in the passage of i",
        "tokens",
        "Tokens with a huge norm, in most decoders the first token of a passage. They would dominate covariances and"
        " fits, so the values of a layer leave them out; columns that end in _all_tokens include them.",
        digits=0,
    )
    yield Quantity(
        "massive_norm",
        "layers",
        group,
        "Largest norm",
        "|x| / median",
        "max_i |x_i| / median_j |x_j|,  j in the passage of i",
        "",
        "The largest norm of a token in the residual stream of the block, as a multiple of the median norm in its"
        " passage. Of two medians it is the lower one.",
        scale="logarithmic",
        digits=1,
    )
    yield Quantity(
        "massive_first_share",
        "layers",
        group,
        "Massive tokens that are the first",
        "P(i = 1)",
        "share of the massive tokens that are the first counted token of their passage",
        "",
        "One if only first tokens are massive, as in most decoders: see the mass on the first token of the heads.",
    )


ALL_TOKENS = (
    *("effective_rank", "token_cosine", "kurtosis", "fc_identity_r2", "fc_identity_offset_r2"),
    *("log_volume_attention", "log_volume_mlp", "log_volume_norm"),
)
"""Quantities of layers that are given with the massive tokens too, in columns ``<name>_all_tokens``."""


def _with_massive(measured: list[Quantity]) -> Iterator[Quantity]:
    for quantity in measured:
        if quantity.name in ALL_TOKENS:
            yield replace(
                quantity,
                name=f"{quantity.name}_all_tokens",
                group="Massive activations",
                title=f"{quantity.title}, massive tokens included",
                explanation=f"The same measurement as in “{quantity.title}” with the massive tokens.",
            )


def _theory() -> Iterator[Quantity]:
    group = "Tests of the theory"
    yield Quantity(
        "field_symmetry",
        "layers",
        group,
        "Is attention a gradient field?",
        "sym J",
        "|(J + J^⊤)/2|^2 / |J|^2,  J = Jacobian of the attention map at real tokens",
        "",
        "The Jacobian of a gradient is symmetric, so the theory asks for one; random weights give one half.",
        control="field_symmetry_control",
        predicted=1.0,
    )
    yield Quantity(
        "field_positive",
        "layers",
        group,
        "Positive part of the field",
        "J₊",
        "positive share of the eigenvalue mass of (J + J^⊤)/2",
        "",
        "The potential is convex, so all eigenvalues should be positive (one); one half means as many directions"
        " push as pull.",
        predicted=1.0,
        neutral=0.5,
    )
    yield Quantity(
        "ascent_cosine",
        "layers",
        group,
        "Does attention climb log Z?",
        "cos(a, ∇G)",
        "mean of cos(a_i, ∇ Σ_h log Z_h(x_i))",
        "",
        "The angle between what attention adds and the direction in which the log normalizers rise fastest. One"
        " would be gradient ascent; the control gives tokens each other's updates.",
        control="ascent_control",
        predicted=1.0,
        neutral=0.0,
        scale="diverging",
    )
    yield Quantity(
        "ascent_share",
        "layers",
        group,
        "Tokens whose log Z rises",
        "P(ΔG > 0)",
        "share of tokens with Σ_h log Z_h higher after the sublayer",
        "",
        "If attention climbs its potential, nearly all tokens should stand higher after it.",
        predicted=1.0,
        neutral=0.5,
    )
    yield Quantity(
        "entropy_fall_share",
        "layers",
        group,
        "Rows whose entropy falls",
        "P(ΔH < 0)",
        "share of (head, token) with lower entropy after the sublayer",
        "",
        "Climbing the potential should make attention sharper: most entropies fall.",
        predicted=1.0,
        neutral=0.5,
    )
    yield Quantity(
        "corollary_r2",
        "layers",
        group,
        "Linear response predictor",
        "R²",
        "median over heads of 1 − Σ_i |o_i − ô_i|^2 / Σ_i |o_i − ō|^2,  ô_i = v̄ + Cov(v, k) q_i / √d_k",
        "",
        "For diffuse attention the output should be the mean value plus a covariance times the query, without any"
        " fit. The sums run over the tokens of up to 32 passages of at most 128 tokens, and ō is the mean output over"
        " all of them: a prediction that is worse than ō gives a negative value. The standard error leaves out one"
        " document at a time, and the control has shuffled keys.",
        control="corollary_control",
        predicted=1.0,
        neutral=0.0,
        digits=3,
    )


def _controls(measured: list[Quantity]) -> Iterator[Quantity]:
    yield Quantity(
        "kurtosis_band",
        "layers",
        "Controls",
        "Sampling band of the Gaussianity",
        "± κ",
        "half width of the band of a Gaussian sample of the same size",
        "",
        "A kurtosis inside plus or minus this band cannot be told from that of a Gaussian cloud.",
        digits=3,
    )
    for quantity in measured:
        if quantity.control and quantity.control not in ("kurtosis_band", "fc_linear_control"):
            yield _control_of(quantity)
    yield _control_of(next(quantity for quantity in measured if quantity.name == "fc_linear_r2"))


def _control_of(quantity: Quantity) -> Quantity:
    assert quantity.control is not None
    title = f"Control: {quantity.title}"
    explanation = f"The same measurement as in “{quantity.title}” on a case where the effect must be absent."
    return replace(
        quantity,
        name=quantity.control,
        group="Controls",
        title=title,
        explanation=explanation,
        control=None,
        predicted=None,
    )


_FAMILIES = (_thermodynamics, _scores, _places, _weights, _distances, _cloud, _linearity, _theory, _massive)
_MEASURED = [quantity for family in _FAMILIES for quantity in family()]
_MEASURED += _with_massive(_MEASURED)

QUANTITIES: dict[str, Quantity] = {quantity.name: quantity for quantity in (*_MEASURED, *_controls(_MEASURED))}
