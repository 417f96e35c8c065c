"""The biases that hide a key. The compiled kernels have the same rule: csrc/cpu/scores.cpp."""

from __future__ import annotations

import torch
from torch import Tensor


def least(dtype: torch.dtype) -> float:
    """The largest bias that hides: the least finite number of the dtype, which additive masks consist of."""
    return torch.finfo(dtype).min


def hides(bias: Tensor) -> Tensor:
    """bool: whether a bias is -inf or the least finite number of its dtype. NaN does not hide; it propagates."""
    return bias <= least(bias.dtype)
