"""Converts between padded batches and the packed rows of the variable-length functions."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from .arguments import is_host_readable, require_count, require_device, require_integers, require_tensor, shape_of


def unpad_input(hidden_states: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Removes the padding of a batch: its real tokens, packed sequence after sequence.

    Args:
        hidden_states: (B, S, ...).
        attention_mask: (B, S), bool or integer, nonzero = a real token.

    Returns:
        hidden_states: (total, ...), where total is the number of real tokens.
        indices: int64 (total), the position of each token among the B * S, for `pad_input`.
        cu_seqlens: int32 (B + 1), the offsets of the sequences.
        max_seqlen: the longest sequence.

    Raises:
        ValueError: shapes that do not match.
        TypeError: an argument that is not a tensor, or an attention_mask that is neither bool nor integer.
        RuntimeError: tensors on different devices.
    """
    require_tensor("hidden_states", hidden_states)
    require_integers("attention_mask", attention_mask, or_bool=True)
    require_device("attention_mask", attention_mask, hidden_states.device, "hidden_states")
    if attention_mask.ndim != 2 or hidden_states.shape[:2] != attention_mask.shape:
        raise ValueError(
            "attention_mask must be (B, S) with the first two dimensions of hidden_states, "
            f"got {shape_of(attention_mask)} for hidden_states of shape {shape_of(hidden_states)}"
        )
    real = attention_mask != 0
    lengths = real.sum(dim=1, dtype=torch.int32)
    (indices,) = torch.nonzero(rearrange(real, "b s -> (b s)"), as_tuple=True)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    max_seqlen = int(lengths.max()) if lengths.numel() else 0
    return rearrange(hidden_states, "b s ... -> (b s) ...")[indices], indices, cu_seqlens, max_seqlen


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of `unpad_input`: (total, ...) to (batch, seqlen, ...), with zeros as padding.

    Args:
        hidden_states: (total, ...).
        indices: integers (total), the position of each token among the batch * seqlen.
        batch, seqlen: B and S.

    Returns:
        (batch, seqlen, ...) in hidden_states' dtype.

    Raises:
        ValueError: an invalid shape; on the CPU also indices out of range.
        TypeError: an argument that is not a tensor, indices that are not integers, a size that is not an int.
        RuntimeError: tensors on different devices.
    """
    require_tensor("hidden_states", hidden_states)
    require_integers("indices", indices)
    require_device("indices", indices, hidden_states.device, "hidden_states")
    batch, seqlen = require_count("batch", batch), require_count("seqlen", seqlen)
    if hidden_states.ndim == 0:
        raise ValueError("hidden_states must be (total, ...), got shape ()")
    if indices.ndim != 1 or indices.shape[0] != hidden_states.shape[0]:
        raise ValueError(
            f"indices must have one entry for each of the {hidden_states.shape[0]} tokens, got {shape_of(indices)}"
        )
    if is_host_readable(indices) and indices.numel():
        first, last = (int(bound) for bound in indices.aminmax())
        if first < 0 or last >= batch * seqlen:
            raise ValueError(
                f"indices must be from 0 to batch * seqlen - 1 = {batch * seqlen - 1}, "
                f"got {first if first < 0 else last}"
            )
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    padded = padded.index_copy(0, indices.long(), hidden_states)
    return rearrange(padded, "(b s) ... -> b s ...", b=batch, s=seqlen)
