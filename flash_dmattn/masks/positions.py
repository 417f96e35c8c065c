"""Positions of rows and keys in their sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import require_count

NEVER = 1 << 30  # beyond any position; the sum of two positions still fits in int32


def own_rows(seqlen_q: int, seqlen_k: int, device: torch.device | str | None) -> Tensor:
    """int32 (1, 1, Sk): the row aligned with each key, j - (Sk - Sq). Negative before the first row."""
    require_count("seqlen_q", seqlen_q)
    require_count("seqlen_k", seqlen_k)
    return torch.arange(seqlen_q - seqlen_k, seqlen_q, dtype=torch.int32, device=device)[None, None]


def sequence_of_keys(cu_seqlens: Tensor, keys: int) -> Tensor:
    """int64 (keys): the number of each key's sequence; B for keys after the last sequence."""
    positions = torch.arange(keys, dtype=torch.int32, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens.contiguous(), positions, right=True) - 1
