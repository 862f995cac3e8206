"""An encoder layer around a Hopfield association, for the encoders of torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from massieu.checks import UserError
from massieu.nn.block import Activation, FeedForward
from massieu.nn.hopfield import Hopfield

__all__ = ["HopfieldEncoderLayer"]


class HopfieldEncoderLayer(nn.Module):
    """An encoder layer around a :class:`Hopfield` association, for ``nn.TransformerEncoder``.

    Args:
        hopfield_association: with output and input of one size.
        dim_feedforward: width of the feed-forward net; four times the input size by default.
        dropout: probability of dropping an entry of a sublayer's output.
        activation: of the feed-forward net.
        norm_first: whether norms stand before the sublayers, or after the residual sums.

    Example:
        >>> layer = HopfieldEncoderLayer(Hopfield(8, num_heads=2, update_steps_max=3))
        >>> encoder = torch.nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        >>> encoder(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        hopfield_association: Hopfield,
        dim_feedforward: int | None = None,
        dropout: float = 0.1,
        activation: Activation = "relu",
        *,
        norm_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(hopfield_association, Hopfield):
            got = type(hopfield_association).__name__
            raise UserError(f"hopfield_association must be a Hopfield, got {got}; build it first, as in Hopfield(dim)")
        size = hopfield_association.state_size
        if size is None or hopfield_association.output_size != size:
            raise UserError(
                f"hopfield_association must map a size to itself, got {size} to {hopfield_association.output_size};"
                " the output is added to the input"
            )
        # nn.TransformerEncoder reads batch_first from this attribute.
        self.self_attn = hopfield_association
        self.norm1 = nn.LayerNorm(size, device=device, dtype=dtype)
        self.norm2 = nn.LayerNorm(size, device=device, dtype=dtype)
        self.feed_forward = FeedForward(
            size, dim_feedforward, activation=activation, dropout=dropout, device=device, dtype=dtype
        )
        self.dropout = nn.Dropout(dropout)
        self.norm_first = norm_first

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Apply to ``src``; arguments as in ``nn.TransformerEncoderLayer``, of which ``is_causal`` has no effect."""

        def attention(x: Tensor) -> Tensor:
            attended: Tensor = self.dropout(self.self_attn(x, src_key_padding_mask, src_mask))
            return attended

        if self.norm_first:
            src = src + attention(self.norm1(src))
            output: Tensor = src + self.feed_forward(self.norm2(src))
            return output
        src = self.norm1(src + attention(src))
        output = self.norm2(src + self.feed_forward(src))
        return output
