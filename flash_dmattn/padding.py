"""Between padded batches and the packed rows that the variable-length functions take."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor


def unpad_input(hidden_states: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """The real tokens of a padded batch, one sequence after the other.

    Args:
        hidden_states: (B, S, ...).
        attention_mask: (B, S), bool or integer, not 0 = a real token.

    Returns:
        hidden_states: (total, ...), total being the number of real tokens.
        indices: int64 (total), where each token stood among the B * S; `pad_input` takes them back.
        cu_seqlens: int32 (B + 1), where each sequence begins.
        max_seqlen: the longest sequence.
    """
    if attention_mask.ndim != 2 or hidden_states.shape[:2] != attention_mask.shape:
        raise ValueError(
            "attention_mask must be (B, S) with the first two dimensions of hidden_states, "
            f"got {tuple(attention_mask.shape)} for hidden_states of shape {tuple(hidden_states.shape)}"
        )
    real = attention_mask != 0
    lengths = real.sum(dim=1, dtype=torch.int32)
    indices = torch.nonzero(real.flatten()).flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    max_seqlen = int(lengths.max()) if lengths.numel() else 0
    return rearrange(hidden_states, "b s ... -> (b s) ...")[indices], indices, cu_seqlens, max_seqlen


def pad_input(hidden_states: Tensor, indices: Tensor, batch_size: int, seqlen: int) -> Tensor:
    """The inverse of `unpad_input`: (total, ...) to (batch_size, seqlen, ...), zero where there was padding."""
    if indices.ndim != 1 or indices.shape[0] != hidden_states.shape[0]:
        raise ValueError(
            f"indices must have one entry for each of the {hidden_states.shape[0]} tokens, got {tuple(indices.shape)}"
        )
    padded = hidden_states.new_zeros(batch_size * seqlen, *hidden_states.shape[1:])
    return rearrange(padded.index_copy(0, indices, hidden_states), "(b s) ... -> b s ...", b=batch_size)
