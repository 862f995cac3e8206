"""The layers table: hooks that follow the residual stream through every block of a model while it reads text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from massieu.accumulators.moments import Moments
from massieu.checks import UserError
from massieu.inspection.layer_statistics import NARROW, WIDEST, LayerStatistics, LayerSums, States
from massieu.inspection.massive import MASSIVE, TokenFilter
from massieu.inspection.quantities import ALL_TOKENS
from massieu.inspection.tokens import Tokens
from massieu.models.module_calls import block_input, hidden_tensors
from massieu.models.residual_stream import BlockCall, ResidualStream, find_residual_stream
from massieu.models.sublayers import ModuleOutput
from massieu.taps.passes import in_this_thread

if TYPE_CHECKING:
    import pandas

    from massieu.models.head_weights import HeadWeights

__all__ = ["COLUMNS", "LayerObserver", "LayerStatistics"]


def with_errors(*names: str) -> list[str]:
    """Columns, each with that of its standard error behind it."""
    return [column for name in names for column in (name, f"{name}_se")]


COLUMNS = (
    *("stack", "layer", "name", "tokens"),
    *with_errors("expansion", "expansion_control", "monotone_share", "monotone_control", "mlp_expansion"),
    *with_errors("mlp_expansion_control", "norm_contraction", "norm_contraction_control"),
    *("log_volume_attention", "log_volume_mlp", "log_volume_norm", "effective_rank"),
    *with_errors("token_cosine", "clusters"),
    *("kurtosis", "kurtosis_band", "fc_linear_r2", "fc_linear_r2_all_tokens", "fc_linear_control", "fc_identity_r2"),
    *("fc_identity_offset_r2", "massive_tokens", "massive_norm", "massive_first_share"),
    *(f"{name}_all_tokens" for name in ALL_TOKENS),
    *with_errors("field_symmetry", "field_symmetry_control", "field_positive", "ascent_cosine", "ascent_control"),
    *with_errors("ascent_share", "entropy_fall_share", "corollary_r2", "corollary_control"),
)
"""The layers table, from left to right; standard errors by document stand beside the means and medians."""

Row = tuple[str, int]
"""Stack and layer."""


@dataclass
class _Passage:
    """One call of a block: what was seen of its stream."""

    block: BlockCall
    tokens: Tokens
    tokens_first: bool
    before: Tensor
    seen: dict[ModuleOutput, Tensor] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)


class LayerObserver:
    """Statistics of every block of a model, batch by batch.

    Args:
        model: any module with blocks that :func:`find_residual_stream` can read.
        inputs: keyword arguments of a forward pass over a few tokens, for the anatomy.

    Attributes:
        anatomy: where the stream of the model is.
        sums: what was seen; another may be put in its place.
        by_passage: the same with every passage as a document of its own, if a place for it was made.
        broken: rows of the last batch with tokens that are not finite somewhere in the model.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = massieu.nn.Transformer(8, 2, 2, vocabulary=9)
        >>> tokens = torch.randint(9, (4, 12))
        >>> observer = LayerObserver(model, {"inputs": tokens})
        >>> with observer.batch(torch.ones(4, 12, dtype=torch.bool), keys=["a", "b", "c", "d"]):
        ...     _ = model(tokens)
        >>> observer.table()["tokens"].tolist()
        [48, 48]
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any], stream: ResidualStream | None = None) -> None:
        self.model = model
        self.stream = find_residual_stream(model, inputs) if stream is None else stream
        self.sums = LayerSums()
        self.by_passage: LayerSums | None = None
        self.broken: set[int] = set()
        self._open: list[_Passage] = []
        self._numbers: dict[str, int] = {}
        self._tokens: dict[str, Tokens] = {}
        self._filters: dict[str, TokenFilter] = {}
        self._content: Mapping[str, Tensor] = {}
        self._present: Mapping[str, Tensor | None] = {}
        self._keys: Sequence[object] = ()
        self._documents: Sequence[object] | None = None

    @property
    def statistics(self) -> dict[Row, LayerStatistics]:
        """Statistics of each block."""
        return self.sums.statistics

    @property
    def notes(self) -> list[str]:
        """Sentences about what could not be measured, and how."""
        notes = [*self.stream.notes, *sorted(self.sums.notes)]
        found = self.statistics.values()
        wide = {statistics.dim for statistics in found if statistics.dim > WIDEST}
        for dim in sorted(wide):
            notes += [
                f"tokens have {dim} dimensions: volumes, rank and kurtosis are those of {NARROW} fixed random"
                " directions, and the linear fit of the MLP is left out",
                "whitened_trace and whitened_cosine are empty: they need the whole covariance of the tokens, which is"
                f" kept up to {WIDEST} dimensions, and these tokens have {dim}",
            ]
        notes += self._massive()
        seen = max((statistics.tokens for statistics in found), default=0)
        width = max((statistics.width for statistics in found), default=0)
        if seen <= 2 * width:
            notes.append(
                f"{seen} content tokens are few beside {width} dimensions: log volumes, effective rank, kurtosis and"
                " linear fits of the layers say little"
            )
        broken = max((statistics.broken for statistics in found), default=0)
        if broken:
            stack, layer = next(row for row, statistics in self.statistics.items() if statistics.broken)
            notes.append(
                f"up to {broken} tokens of a layer, from {stack} layer {layer} on, are not finite: they are left out of"
                " the layers table, and passages with such tokens out of the experiments with derivatives"
            )
        if any(block.parallel for block in self.stream.blocks):
            notes.append("attention and MLP are parallel in this model: both are measured from the block's input")
        return notes

    def _massive(self) -> Iterator[str]:
        """A sentence about tokens that the layer values leave out, if there are any."""
        found = [own.massive.count for own in self.statistics.values() if own.massive.count]
        if found:
            most = f"up to {max(found)} token{'s' if max(found) > 1 else ''} in {len(found)} of {len(self.statistics)}"
            yield (
                f"layer values leave out tokens with massive activations ({most} layers), from the block on where"
                f" their norm exceeds {MASSIVE:g} times the median of their passage; columns that end in _all_tokens"
                " include them"
            )

    @contextmanager
    def batch(
        self,
        content: Tensor | Mapping[str, Tensor],
        keys: Sequence[object],
        present: Tensor | Mapping[str, Tensor] | None = None,
        documents: Sequence[object] | None = None,
    ) -> Iterator[None]:
        """Observe one forward pass.

        Args:
            content: boolean, ``(batch, tokens)``: tokens that count, neither padding nor special. For an
                encoder-decoder model a mapping from "encoder" and "decoder"; a stack without a mask counts whole.
            keys: one for each row, something that depends on its content alone (a hash of the text): it decides about
                random choices.
            present: like ``content``: tokens that are not padding. Without it, nothing is said about all tokens.
            documents: what identifies the document of each row: it decides about the halves for fitting and testing
                and about standard errors. None if each row is one.
        """
        stacks = {block.stack for block in self.stream.blocks}
        self._content = content if isinstance(content, Mapping) else dict.fromkeys(stacks, content)
        self._present = present if isinstance(present, Mapping) else dict.fromkeys(stacks, present)
        self._keys, self._documents = keys, documents
        self._open, self._numbers, self._tokens, self._filters, self.broken = [], {}, {}, {}, set()
        modules = dict(self.model.named_modules())
        watched: dict[tuple[str, str], None] = {
            (block.name, place.path): None for block in self.stream.blocks for place in block.places
        }
        with ExitStack() as stack:
            for name, path in watched:
                hook = modules[f"{name}.{path}"].register_forward_hook(in_this_thread(self._see(name, path)))
                stack.callback(hook.remove)
            for name in dict.fromkeys(block.name for block in self.stream.blocks if block.sublayers):
                enter = modules[name].register_forward_pre_hook(in_this_thread(self._enter(name)), with_kwargs=True)
                leave = modules[name].register_forward_hook(in_this_thread(self._leave(name)))
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            yield

    def input_covariances(self, weights: Iterable[HeadWeights]) -> dict[str, Tensor | None]:
        """Covariances of what attention reads, by the name of its module; None where only a projection was kept."""
        found: dict[str, Moments] = {}
        for head in weights:
            mine = found.setdefault(head.name, Moments(0))
            statistics = self.statistics.get((head.stack, head.layer))
            if statistics is not None and statistics.width == statistics.dim:
                # A module that serves several layers reads what all of them give it.
                mine.merge(statistics.cloud("attention_input"))
        return {name: moments.covariance if moments.count else None for name, moments in found.items()}

    def merge(self, other: LayerObserver) -> None:
        """Add what another observer has seen of the same model."""
        self.sums.merge(other.sums)

    def table(self, fields: pandas.DataFrame | None = None) -> pandas.DataFrame:
        """The layers table, one row for each block, and one more for each cross-attention.

        Args:
            fields: table of :func:`massieu.inspection.fields.probe_fields`; without it its columns are empty.
        """
        import pandas

        rows = []
        for block in self.stream.blocks:
            stacks = [block.stack] + (["cross"] if block.find("cross") else [])
            for stack in stacks:
                statistics = self.statistics.get((stack, block.layer))
                found = {"tokens": 0} if statistics is None else statistics.finish()
                rows.append({"stack": stack, "layer": block.layer, "name": _label(block), **found})
        table = pandas.DataFrame(rows, columns=list(COLUMNS))
        if fields is not None:
            found = table.merge(fields, on=["stack", "layer"], how="left", suffixes=("_empty", ""))
            table = found[list(COLUMNS)]
        numbers = [column for column in COLUMNS if column not in ("stack", "layer", "name", "tokens")]
        return table.astype(dict.fromkeys(numbers, "float64"))

    def _tokens_of(self, stack: str, stream: Tensor, tokens_first: bool) -> Tokens:
        """The tokens of a stack that are looked at: those of its mask, or all if it has none."""
        if stack not in self._tokens:
            rows = len(self._keys)
            whole = torch.ones(rows, stream.shape[0 if tokens_first else 1], dtype=torch.bool)
            content = self._content.get(stack, whole)
            if content.shape != whole.shape:
                self.sums.notes.add(
                    f"the {stack} has {whole.shape[1]} tokens where its mask has {content.shape[-1]}: all are counted"
                )
                content = whole
            present = self._present.get(stack)
            fits = present is not None and present.shape == content.shape
            masks = (content, self._keys, present if fits else None)
            alone = None if self.by_passage is None else Tokens.of(*masks)
            self._tokens[stack] = Tokens.of(*masks, self._documents)
            self._filters[stack] = TokenFilter(self._tokens[stack], alone)
        return self._tokens[stack]

    def _enter(self, name: str) -> Any:
        blocks = [block for block in self.stream.blocks if block.name == name]

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            number = self._numbers.get(name, 0)
            self._numbers[name] = number + 1
            stream = block_input(args, kwargs)
            if number >= len(blocks) or stream is None:
                raise RuntimeError(
                    f"block {name} was called {number + 1} times in one pass, {len(blocks)} were expected;"
                    " observe every forward pass in a batch of its own"
                )
            first = any(getattr(part, "batch_first", True) is False for part in module.modules())
            tokens = self._tokens_of(blocks[number].stack, stream[1], first)
            passage = _Passage(blocks[number], tokens, first, _rows(stream[1], tokens, first, name))
            self._open.append(passage)

        return hook

    def _see(self, name: str, path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not self._open or self._open[-1].block.name != name:
                return
            passage = self._open[-1]
            place = ModuleOutput(path, passage.calls.get(path, 0))
            passage.calls[path] = place.call + 1
            if place in passage.block.places:
                found = next(hidden_tensors(output))
                passage.seen[place] = _rows(found, passage.tokens, passage.tokens_first, f"{name}.{path}")

        return hook

    def _leave(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            passage = self._open.pop()
            found = _rows(next(hidden_tensors(output)), passage.tokens, passage.tokens_first, name)
            with torch.no_grad():
                self._add(passage.block, _states(passage, found))

        return hook

    def _add(self, block: BlockCall, found: Mapping[str, States]) -> None:
        """Add what was seen of a block, by stack: its own and that of cross-attention."""
        counted = self._filters[block.stack]
        counted.look(x for states in found.values() for x in states.streams)
        for stack, states in found.items():
            row, dim = (stack, block.layer), states.output.shape[-1]
            chosen = states if counted.order is None else states.select(counted.order)
            self.broken |= set(counted.tokens.row[~chosen.finite.cpu()].tolist())
            self.sums.of(row, dim).update(counted.tokens, chosen, counted.largest)
            if self.by_passage is not None and counted.alone is not None:
                self.by_passage.of(row, dim).update(counted.alone, chosen, counted.largest)


def _states(passage: _Passage, output: Tensor) -> dict[str, States]:
    """The stream of one call of a block, rebuilt from its updates; cross-attention has states of its own."""
    block, seen = passage.block, passage.seen
    stream: dict[str, tuple[Tensor, Tensor, Tensor, Tensor]] = {}  # state, summand, sum, sum after a norm on the stream
    state = passage.before
    for sublayer in block.sublayers:
        update = seen[sublayer.update] * sublayer.factor if sublayer.factor != 1.0 else seen[sublayer.update]
        before = passage.before if block.parallel else state
        total = before + update
        state = total if sublayer.stream_norm is None else seen[sublayer.stream_norm]
        stream[sublayer.kind] = (before, update, total, state)
    found = {}
    for kind, stack in (("attention", block.stack), ("cross", "cross")):
        if kind in stream:
            before, update, after, ended = stream[kind]
            mlp = block.find("mlp") if kind == "attention" else None
            mlp_before, mlp_update, mlp_after = stream["mlp"][:3] if mlp is not None else (None, None, None)
            mlp_input = mlp_before if mlp is None or mlp.entry is None else seen[mlp.entry]
            if mlp is not None and mlp == block.sublayers[-1] and mlp.stream_norm is None and not block.parallel:
                mlp_after = output
            own = block.find(kind)
            assert own is not None
            read = before if own.entry is None else seen[own.entry]
            norm, source = _norm(block, kind)
            normed = None if norm is None else (after if source == "sum" else before, seen[norm])
            last = output if kind == "attention" else ended
            found[stack] = States(
                before, read, update, after, normed, mlp_before, mlp_input, mlp_update, mlp_after, last
            )
    return found


def _norm(block: BlockCall, kind: str) -> tuple[ModuleOutput | None, Literal["sum", "input"]]:
    """The norm that reads the sum after attention; in a parallel block, the one that reads its input."""
    index = [sublayer.kind for sublayer in block.sublayers].index(kind)  # type: ignore[arg-type]
    own, following = block.sublayers[index], block.sublayers[index + 1 :]
    if block.parallel:
        return own.entry, "input"
    return own.stream_norm or (following[0].entry if following else None), "sum"


def _rows(x: Tensor, tokens: Tokens, tokens_first: bool, name: str) -> Tensor:
    """The tokens that are present, as float32 or float64 rows of their own memory."""
    if tokens_first and x.dim() == 3:
        x = x.transpose(0, 1)
    flat = x.detach().reshape(-1, x.shape[-1])
    if len(flat) != tokens.num_places:
        raise UserError(
            f"the content mask covers {tokens.num_places} tokens, but {name} gave {len(flat)};"
            " pass a mask of shape (batch, tokens) for every stack of the model"
        )
    rows = flat[tokens.index.to(flat.device)]
    return rows if rows.dtype in (torch.float32, torch.float64) else rows.float()


def _label(block: BlockCall) -> str:
    return block.name if not block.number else f"{block.name}#{block.number}"
