"""Biases: which of them mask a key, by the rule of the compiled kernels (csrc/cpu/scores.cpp), and their layout."""

from __future__ import annotations

import torch
from torch import Tensor

from . import fallbacks


def least(dtype: torch.dtype) -> float:
    """The largest bias that masks: the dtype's most negative finite value, which additive masks consist of."""
    return torch.finfo(dtype).min


def cast_bias(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """A bias in another dtype: what masks in its own dtype is -inf there."""
    if bias.dtype == dtype:
        return bias
    cast = bias.to(dtype)
    # Where the dtype's range is smaller, the rounding gives -inf.
    return cast if least(bias.dtype) < least(dtype) else cast.masked_fill(is_masked(bias), -torch.inf)


def is_masked(bias: Tensor) -> Tensor:
    """bool: whether a bias is -inf or its dtype's most negative finite value. NaN does not mask; it propagates."""
    return bias <= least(bias.dtype)


def key_contiguous(bias: Tensor) -> Tensor:
    """The bias with contiguous keys: the kernels read it many times, then with vector loads."""
    if bias.stride(-1) == 1:
        return bias
    fallbacks.report_bias_copy()
    return bias.contiguous()
