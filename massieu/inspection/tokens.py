"""Tokens of a batch that count, and random choices among them that do not depend on batching."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from massieu.accumulators.moments import GROUPS, document_hash, shuffled, token_hash
from massieu.checks import UserError

__all__ = ["Tokens"]

ORDERS = 2
"""Random orders of a sequence whose neighbors are the pairs that are looked at."""

COMPARED = 64
"""Tokens of a sequence that are compared with each other to count groups."""

CONTROL_SALT = 1 << 20


@dataclass(frozen=True)
class Tokens:
    """Tokens of a batch that count, with their documents; the same for any batching.

    Attributes:
        index: places of the tokens that are present in the flattened ``(batch, tokens)``: content tokens first, then
            massive ones, then special ones.
        num_content: how many of them are content.
        row: number of the row of each of them, ascending for content tokens.
        position: number of each content token and of each massive one among those of its row.
        keys: hash of the content of each row.
        documents: hash of the document that each row belongs to.
        num_places: rows times columns of the batch.
        num_massive: how many content tokens :meth:`part` has set apart.
    """

    index: Tensor
    num_content: int
    row: Tensor
    position: Tensor
    keys: Tensor
    documents: Tensor
    num_places: int
    num_massive: int = 0

    @classmethod
    def of(
        cls,
        content: Tensor,
        keys: Sequence[object],
        present: Tensor | None = None,
        documents: Sequence[object] | None = None,
    ) -> Tokens:
        """Tokens of a batch.

        Args:
            content: boolean, ``(batch, tokens)``: neither padding nor special.
            keys: what identifies the content of each row, such as a hash of its text.
            present: boolean, ``(batch, tokens)``: not padding. None if only content tokens are to be looked at.
            documents: what identifies the document that each row is a part of; None if each row is one.

        Example:
            >>> tokens = Tokens.of(torch.tensor([[False, True, True], [True, False, False]]), ["a", "b"])
            >>> tokens.index, tokens.sequence
            (tensor([1, 2, 3]), tensor([0, 0, 1]))
        """
        if content.dim() != 2 or content.dtype != torch.bool:
            raise UserError(
                f"the content mask must be boolean of shape (batch, tokens), got {content.dtype} of shape"
                f" {tuple(content.shape)}; compare an attention mask with zero first"
            )
        if len(keys) != len(content):
            raise UserError(
                f"expected one key for each of {len(content)} rows, got {len(keys)}; pass hashes of the texts"
            )
        if present is not None and present.shape != content.shape:
            raise UserError(
                f"present must have the shape {tuple(content.shape)} of content, got {tuple(present.shape)};"
                " pass the attention mask of the same batch"
            )
        content = content.cpu()
        others = torch.zeros_like(content) if present is None else present.bool().cpu() & ~content
        index = torch.cat([mask.flatten().nonzero()[:, 0] for mask in (content, others)])
        owners = keys if documents is None else documents
        hashes, origins = (
            torch.tensor([document_hash(x) for x in named], dtype=torch.int64) for named in (keys, owners)
        )
        row = index // max(content.shape[1], 1)
        position = (content.cumsum(1) - 1).flatten()[index]
        count = int(content.sum())
        return cls(index, count, row, position[:count], hashes, origins, content.numel())

    def part(self, massive: Tensor) -> tuple[Tokens, Tensor]:
        """Set massive content tokens apart; hashes and positions of all tokens stay the same.

        Args:
            massive: boolean, one for each present token: whether it is set apart, if it is a content token.

        Returns:
            The tokens, and the old number of each of them.

        Example:
            >>> tokens = Tokens.of(torch.ones(1, 4, dtype=torch.bool), ["a"])
            >>> parted, order = tokens.part(torch.arange(4) == 1)
            >>> parted.num_content, parted.num_massive, order, parted.position
            (3, 1, tensor([0, 2, 3, 1]), tensor([0, 2, 3, 1]))
        """
        content = torch.arange(len(self.index)) < self.num_content
        order = torch.sort(torch.where(content, massive.long(), 2), stable=True).indices
        apart = int((content & massive).sum())
        parted = replace(
            self,
            index=self.index[order],
            num_content=self.num_content - apart,
            row=self.row[order],
            position=self.position[order[: self.num_content]],
            num_massive=apart,
        )
        return parted, order

    @property
    def num_counted(self) -> int:
        """Number of tokens that are content or massive."""
        return self.num_content + self.num_massive

    @property
    def num_sequences(self) -> int:
        """Rows of the batch."""
        return len(self.keys)

    @property
    def sequence(self) -> Tensor:
        """Number of the row of each content token, ascending."""
        return self.row[: self.num_content]

    @property
    def group(self) -> Tensor:
        """Number of the group of documents that each row belongs to, for standard errors."""
        return self.documents % GROUPS

    @property
    def pair_group(self) -> Tensor:
        """The same for each of the ``pairs``."""
        return self.group[self.sequence[self.pairs[0]]]

    @functools.cached_property
    def hashes(self) -> Tensor:
        """A hash of every content token and of every massive one."""
        return token_hash(self.keys[self.row[: self.num_counted]], self.position)

    @functools.cached_property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """Random pairs of content tokens of one sequence."""
        first, second = [], []
        for order in (self.order(salt) for salt in range(1, ORDERS + 1)):
            together = self.sequence[order[:-1]] == self.sequence[order[1:]]
            first.append(order[:-1][together])
            second.append(order[1:][together])
        return torch.cat(first), torch.cat(second)

    @functools.cached_property
    def permutation(self) -> Tensor:
        """For each content token another one of its sequence: the control."""
        return self.order(CONTROL_SALT)

    @functools.cached_property
    def compared(self) -> tuple[Tensor, Tensor]:
        """Some tokens of each sequence, ``(sequences, COMPARED)``, and which of these places are filled."""
        order = self.order(0)
        count = torch.bincount(self.sequence, minlength=self.num_sequences)
        start = count.cumsum(0) - count
        places = torch.arange(COMPARED)
        filled = places < count[:, None]
        chosen = (start[:, None] + places).clamp_max(max(len(order) - 1, 0))
        return order[chosen], filled

    @functools.cached_property
    def halves(self) -> tuple[Tensor, Tensor]:
        """Present tokens in documents of the first and of the second half, split by the hash of the document."""
        odd = (self.documents[self.row] >> 32 & 1).bool()  # another bit than those of the groups
        return (~odd).nonzero()[:, 0], odd.nonzero()[:, 0]

    def only(self, kept: Tensor) -> Tokens:
        """Those of the tokens that are present for which a boolean ``(tokens,)`` is true."""
        kept = kept.cpu()
        return replace(
            self,
            index=self.index[kept],
            num_content=int(kept[: self.num_content].sum()),
            row=self.row[kept],
            position=self.position[kept[: self.num_counted]],
            num_massive=int(kept[self.num_content : self.num_counted].sum()),
        )

    def differences(self, x: Tensor, permuted: bool = False) -> Tensor:
        """Differences of the pairs, ``(pairs, dim)``; if permuted, those of the control."""
        first, second = self.pairs
        if permuted:
            first, second = self.permutation[first], self.permutation[second]
        return x[first.to(x.device)] - x[second.to(x.device)]

    def order(self, salt: int) -> Tensor:
        """A random order of the content tokens of each sequence that depends only on its document."""
        position = self.position[: self.num_content]
        return shuffled(self.sequence, token_hash(self.keys[self.sequence], position, salt))
