"""Numbers that the kernels and their callers agree on."""

from __future__ import annotations

import math

import torch

HEAD_DIM_MULTIPLE = 8  # the kernels read rows in pieces of 16 bytes


def padded_head_dim(*head_dims: int) -> int:
    """The head dimension in which the kernels compute: that of the widest tensor, rounded up."""
    # torch.compile of PyTorch 2.9 takes n + -n % 8 for n.
    return (max(head_dims) + HEAD_DIM_MULTIPLE - 1) // HEAD_DIM_MULTIPLE * HEAD_DIM_MULTIPLE


def default_scale(head_dim: int) -> float:
    """softmax_scale, if none is given."""
    return 1.0 / math.sqrt(head_dim)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over tensors of `dtype`, and of lse: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)
