"""Transformer, encoder or decoder, over words of a vocabulary or over vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from massieu.checks import UserError, check_choice, check_count
from massieu.nn.attention import MeasureAttention
from massieu.nn.block import Activation, Block, FeedForward
from massieu.nn.cache import KeyValueCache, LinearCache
from massieu.nn.initialization import initialize
from massieu.nn.inputs import check_dtype, check_tokens, check_words
from massieu.nn.linear_attention import LinearAttention
from massieu.nn.multihead import Heads
from massieu.nn.norms import Norm, build_norm, normalize
from massieu.nn.sampling import check_sampling, draw
from massieu.patterns import Pattern, Schedule
from massieu.patterns.pattern import as_schedule
from massieu.statistics import RowStatistics

__all__ = ["Cache", "Transformer"]

Attention = Literal["free", "tied", "source", "linear"]
Positions = Literal["rotary", "learned"]
Cache = list[KeyValueCache | LinearCache]


class Transformer(nn.Module):
    """A stack of blocks between an embedding and a head.

    Inputs are word numbers when there is a ``vocabulary``, else vectors. As built by default it is a causal language
    model or sequence model with pre-norm; with ``causal=False`` it is an encoder. Dropout acts on the embedding and
    on the output of each sublayer.

    Args:
        dim: size of the hidden states.
        num_layers: number of blocks.
        num_heads: number of query heads in each attention.
        vocabulary: number of words; None for vectors.
        input_dim: size of input vectors, which a linear map takes to ``dim``; None where they have it already.
        output_dim: size of outputs. By default the vocabulary, and hidden states for vectors.
        max_length: length of the longest sequence; required by learned positions.
        num_key_heads: number of key heads, a divisor of ``num_heads``.
        head_dim: size of a head; its share in ``dim`` by default.
        hidden_dim: width of the feed-forward nets, four times ``dim`` by default; 0 leaves them out.
        activation: ``"gelu"``, ``"gelu_tanh"``, ``"relu"`` or ``"swiglu"``.
        attention: ``"free"``, ``"tied"`` or ``"source"`` (see :class:`MeasureAttention`) or ``"linear"``, for all
            layers or one per layer; or modules with the same methods, whose weights are not initialized again.
        causal: whether tokens see only earlier ones.
        window: each token sees only tokens less than this many positions away.
        pattern: visible tokens, one of :mod:`massieu.patterns`; of a schedule, layers take the patterns in turn. Layers
            given as modules keep their own.
        positions: ``"rotary"``, ``"learned"`` or None.
        rotary_base: base of the rotary positions.
        norm: ``"layer"``, ``"rms"``, ``"zca"`` (encoders only) or None.
        norm_eps: floor inside the norms.
        pre_norm: norms before the sublayers and one before the head, or after each residual sum.
        bias: whether attention and feed-forward maps have biases.
        dropout: probability of dropping an entry in training.
        tie_embedding: whether the head uses the weights of the word embedding.
        shared_layers: whether one block is applied ``num_layers`` times.
        generator: draws the weights.

    Source:
        Vaswani et al. 2017; weights start as in Radford et al. 2019. Shared layers: Lan et al. 2019, and section 4 of
        "A Probabilistic Interpretation of Transformers", where they are one operator applied repeatedly.

    Example:
        >>> model = Transformer(32, num_layers=2, num_heads=4, vocabulary=100)
        >>> logits, statistics = model(torch.randint(100, (3, 7)), return_statistics=True)
        >>> logits.shape, len(statistics), statistics[0].entropy.shape
        (torch.Size([3, 7, 100]), 2, torch.Size([3, 4, 7]))
        >>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4).shape
        torch.Size([1, 7])
    """

    def __init__(
        self,
        dim: int,
        num_layers: int,
        num_heads: int,
        *,
        vocabulary: int | None = None,
        input_dim: int | None = None,
        output_dim: int | None = None,
        max_length: int | None = None,
        num_key_heads: int | None = None,
        head_dim: int | None = None,
        hidden_dim: int | None = None,
        activation: Activation = "gelu",
        attention: Attention | Sequence[Attention | nn.Module] = "free",
        causal: bool = True,
        window: int | None = None,
        pattern: Pattern | Schedule | None = None,
        positions: Positions | None = "rotary",
        rotary_base: float = 10000.0,
        norm: Norm | None = "layer",
        norm_eps: float = 1e-5,
        pre_norm: bool = True,
        bias: bool = True,
        dropout: float = 0.0,
        tie_embedding: bool = True,
        shared_layers: bool = False,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"vocabulary": vocabulary, "input_dim": input_dim, "output_dim": output_dim, "max_length": max_length}
        for name, size in {"num_layers": num_layers, "dim": dim}.items():
            check_count(size, name)
        for name, optional in sizes.items():
            if optional is not None:
                check_count(optional, name, remedy="pass None for the default")
        if vocabulary is not None and input_dim is not None:
            raise UserError(
                f"inputs are words or vectors, got vocabulary={vocabulary} and input_dim={input_dim}; pass only one"
            )
        check_choice(positions, "positions", (*get_args(Positions), None))
        if positions == "learned" and max_length is None:
            raise UserError("learned positions need max_length, got None; pass the length of the longest sequence")
        if norm == "zca" and causal:
            raise UserError(
                'norm="zca" depends on all tokens, got causal=True; pass causal=False, or norm="layer" or "rms"'
            )
        self.dim, self.num_layers, self.vocabulary, self.max_length = dim, num_layers, vocabulary, max_length
        self.input_dim = dim if input_dim is None else input_dim
        self.causal = causal
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embedding: nn.Module | None = None
        if vocabulary is not None:
            self.embedding = nn.Embedding(vocabulary, dim, **factory)
        elif input_dim is not None:
            self.embedding = nn.Linear(input_dim, dim, **factory)
        self.positions: nn.Embedding | None = None
        if positions == "learned":
            assert max_length is not None
            self.positions = nn.Embedding(max_length, dim, **factory)
        self.dropout = nn.Dropout(dropout)

        patterns = None if pattern is None else as_schedule(pattern)
        if patterns is not None and shared_layers and len(patterns) > 1:
            raise UserError(
                f"shared layers have one pattern, got a schedule of {len(patterns)}; pass one of them, such as"
                " schedule.union(), or shared_layers=False"
            )

        options = {"bias": bias, "dropout": dropout, **factory}
        rotary = rotary_base if positions == "rotary" else None
        attention_options = options | {"causal": causal, "window": window, "rotary": rotary}
        kinds = _one_per_block(attention, 1 if shared_layers else num_layers)
        self.blocks = nn.ModuleList()
        for layer, kind in enumerate(kinds):
            own = None if patterns is None else patterns[layer]
            built = _build_attention(kind, (dim, num_heads, num_key_heads, head_dim), own, attention_options)
            net = None if hidden_dim == 0 else FeedForward(dim, hidden_dim, activation=activation, **options)
            self.blocks.append(Block(dim, built, net, norm=norm, pre_norm=pre_norm, norm_eps=norm_eps, **factory))
        self.norm = build_norm(norm if pre_norm else None, dim, norm_eps, device, dtype)
        self.head: nn.Linear | None = None
        outputs = vocabulary if output_dim is None else output_dim
        self.tie_embedding = tie_embedding and vocabulary is not None and output_dim is None
        if outputs is not None and not self.tie_embedding:
            self.head = nn.Linear(dim, outputs, bias=vocabulary is None, **factory)
        given = [kind for kind in kinds if isinstance(kind, nn.Module)]
        initialize(self, num_layers * (1 if hidden_dim == 0 else 2), given, generator)

    def forward(
        self,
        inputs: Tensor,
        log_weight: Tensor | None = None,
        *,
        lengths: Tensor | int | None = None,
        cache: Cache | None = None,
        return_statistics: bool = False,
    ) -> Tensor | tuple[Tensor, list[RowStatistics | None]]:
        """Outputs for every token: logits of the next word, vectors, or hidden states without a head.

        Args:
            inputs: words, ``(batch, tokens)``, or vectors, ``(batch, tokens, input_dim)``.
            log_weight: added to the scores of every layer; broadcasts to ``(batch, heads, tokens, atoms)``. A boolean
                mask is True where the atom is present: ``mask[:, None, None, :]`` for padding.
            lengths: number of tokens present in each sequence, ``(batch,)`` or one for all; later ones are no keys.
            cache: from :meth:`new_cache`, extended by this call; ``inputs`` are then only the new tokens.
            return_statistics: whether to return the statistics of every layer too.

        Returns:
            Outputs, ``(batch, tokens, output_dim)``, or with statistics ``(outputs, statistics)`` with one
            :class:`RowStatistics` per layer, whose fields have shape ``(batch, heads, tokens)``; None for linear
            attention.
        """
        hidden, found = self._hidden(inputs, log_weight, lengths, cache, return_statistics)
        outputs = self._head(hidden)
        return (outputs, found) if return_statistics else outputs

    def new_cache(self, capacity: int = 0) -> Cache:
        """Return one empty cache per layer, with memory for ``capacity`` tokens at first."""
        return [self._block(layer).attention.new_cache(capacity) for layer in range(self.num_layers)]  # type: ignore[operator]

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue sequences of words, one word at a time, with a cache.

        Dropout stays on in a model in training: call ``model.eval()`` first.

        Args:
            tokens: prompts of one length, ``(batch, tokens)``.
            max_new_tokens: number of words to add.
            temperature: divides the logits; 0 takes the most likely word each time.
            top_k: number of most likely words to draw from; None for all.
            generator: draws the words.

        Returns:
            Prompts and continuations, ``(batch, tokens + max_new_tokens)``.
        """
        if self.vocabulary is None or not self.causal:
            got = "vectors as inputs" if self.vocabulary is None else "causal=False"
            raise UserError(f"generate needs a causal model with a vocabulary, got {got}; build one with both")
        check_sampling(max_new_tokens, temperature, top_k)
        self._check_inputs(tokens, 0)
        if tokens.shape[1] == 0:
            raise UserError("generate needs a prompt, got no tokens; pass at least one")
        if self.max_length is not None and tokens.shape[1] + max_new_tokens > self.max_length:
            raise UserError(
                f"prompt and continuation must fit max_length {self.max_length}, got {tokens.shape[1]} and"
                f" {max_new_tokens} words; generate fewer, or shorten the prompt"
            )
        cache, step = self.new_cache(tokens.shape[1] + max_new_tokens), tokens
        for _ in range(max_new_tokens):
            hidden, _ = self._hidden(step, None, None, cache, False)
            step = draw(self._head(hidden[:, -1]), temperature, top_k, generator)[:, None]
            tokens = torch.cat([tokens, step], dim=1)
        return tokens

    def _hidden(
        self,
        inputs: Tensor,
        log_weight: Tensor | None,
        lengths: Tensor | int | None,
        cache: Cache | None,
        return_statistics: bool,
    ) -> tuple[Tensor, list[RowStatistics | None]]:
        past = 0 if cache is None else self._check_cache(cache)
        self._check_inputs(inputs, past)
        x: Tensor = inputs if self.embedding is None else self.embedding(inputs)
        if self.positions is not None:
            x = x + self.positions(torch.arange(past, past + x.shape[1], device=x.device))
        x = self.dropout(x)
        found = []
        for layer in range(self.num_layers):
            own = None if cache is None else cache[layer]
            result = self._block(layer)(x, log_weight, lengths=lengths, cache=own, return_statistics=return_statistics)
            x = result.output if return_statistics else result
            if return_statistics:
                found.append(result.statistics)
        return normalize(self.norm, x, lengths), found

    def _head(self, hidden: Tensor) -> Tensor:
        if self.tie_embedding:
            assert isinstance(self.embedding, nn.Embedding)
            return functional.linear(hidden, self.embedding.weight)
        return hidden if self.head is None else self.head(hidden)

    def _block(self, layer: int) -> Block:
        block = self.blocks[layer % len(self.blocks)]
        assert isinstance(block, Block)
        return block

    def _check_inputs(self, inputs: Tensor, past: int) -> None:
        if self.vocabulary is not None:
            check_words(inputs, self.vocabulary)
        else:
            check_tokens(inputs, "inputs", self.input_dim)
            check_dtype(inputs, "inputs", self)
        if self.max_length is not None and past + inputs.shape[1] > self.max_length:
            raise UserError(
                f"sequences must not exceed max_length {self.max_length}, got {past + inputs.shape[1]} tokens;"
                " cut them, or build the model with a larger max_length"
            )

    def _check_cache(self, cache: Cache) -> int:
        """Return the number of cached tokens; raise unless all layers have the same."""
        if not isinstance(cache, (list, tuple)) or len(cache) != self.num_layers:
            got = f"{len(cache)} entries" if isinstance(cache, (list, tuple)) else type(cache).__name__
            raise UserError(
                f"cache must be a list of one cache for each of the {self.num_layers} layers, got {got};"
                " make one with new_cache()"
            )
        for layer, own in enumerate(cache):
            attention = self._block(layer).attention
            if isinstance(attention, Heads):
                attention.check_cache_type(own)
        lengths = [own.length for own in cache]
        if len(set(lengths)) > 1:
            raise UserError(
                f"every layer must have seen the same tokens, got lengths {lengths}; make a new cache with new_cache()"
            )
        return lengths[0]


def _one_per_block(attention: Attention | Sequence[Attention | nn.Module], blocks: int) -> list[Attention | nn.Module]:
    if isinstance(attention, str):
        return [attention] * blocks
    if not isinstance(attention, (list, tuple, nn.ModuleList)):
        raise UserError(
            f"attention must be a name or a list with one entry per block, got {type(attention).__name__};"
            " put a module into a list"
        )
    if len(attention) != blocks:
        raise UserError(
            f"attention must be one name or one entry for each of the {blocks} blocks, got {len(attention)} entries;"
            " shared layers are one block"
        )
    return list(attention)


def _build_attention(
    kind: Attention | nn.Module,
    sizes: tuple[int, int, int | None, int | None],
    pattern: Pattern | None,
    options: dict[str, Any],
) -> nn.Module:
    if isinstance(kind, nn.Module):
        if options["causal"] and not getattr(kind, "causal", True):
            raise UserError(
                f"a causal model needs causal attention, got a {type(kind).__name__} with causal=False;"
                " build it with causal=True, or the model with causal=False"
            )
        return kind
    check_choice(kind, "attention", get_args(Attention))
    if kind != "linear":
        return MeasureAttention(*sizes, tying=kind, pattern=pattern, **options)
    if pattern is not None:
        raise UserError(
            "linear attention has no pattern, since it computes no pairs, got one; choose another attention"
        )
    return LinearAttention(*sizes, **options)
