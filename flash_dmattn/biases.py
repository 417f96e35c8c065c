"""When a bias hides a key. The compiled kernels have the same rule: csrc/cpu/scores.cpp."""

from __future__ import annotations

import torch
from torch import Tensor


def least(dtype: torch.dtype) -> float:
    """The largest bias of that dtype that hides: its least finite number, of which additive masks are made."""
    return torch.finfo(dtype).min


def hides(bias: Tensor) -> Tensor:
    """bool, where the bias is -inf or the least finite number of its own dtype. NaN hides nothing: it stays NaN."""
    return bias <= least(bias.dtype)
