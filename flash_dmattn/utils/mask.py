"""Upstream's import path of `create_mask` and of the other functions of its module."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import masks
from ..deprecation import deprecated

deprecated(__name__, "flash_dmattn.create_mask")


def create_mask(
    attention_bias: Tensor,
    attention_mask: Tensor | None,
    batch_size: int,
    query_len: int,
    key_len: int,
    window_size: int,
    min_dtype: float,
    block_size: int | None = None,
    type: Literal["topk", "relu"] = "topk",
) -> Tensor:
    """`flash_dmattn.create_mask`. A padding mask may also be (B, Sq): the keys before these are visible."""
    if attention_mask is not None and attention_mask.ndim == 2 and attention_mask.shape[1] == query_len < key_len:
        attention_mask = pad(attention_mask, (key_len - query_len, 0), value=1)
    lengths = (batch_size, query_len, key_len)
    return masks.create_mask(attention_bias, attention_mask, *lengths, window_size, min_dtype, block_size, type)


def topk_mask(
    attention_bias: Tensor,
    attention_mask: Tensor | None,
    window_size: int,
    min_dtype: float,
    block_size: int | None = None,
    **kwargs,
) -> Tensor:
    """`flash_dmattn.create_mask` with type="topk", with the rows of bias and mask."""
    sizes = broadcast_sizes(attention_bias, attention_mask)
    return masks.create_mask(attention_bias, attention_mask, *sizes, window_size, min_dtype, block_size)


def relu_mask(
    attention_bias: Tensor,
    attention_mask: Tensor | None,
    min_dtype: float,
    block_size: int | None = None,
    **kwargs,
) -> Tensor:
    """`flash_dmattn.create_mask` with type="relu", with the rows of bias and mask."""
    sizes = broadcast_sizes(attention_bias, attention_mask)
    return masks.create_mask(attention_bias, attention_mask, *sizes, 0, min_dtype, block_size, type="relu")


def broadcast_sizes(bias: Tensor, mask: Tensor | None) -> tuple[int, int, int]:
    """B, Sq and Sk of a bias and a mask."""
    batch, _, rows, keys = torch.broadcast_shapes(*(x[:, :1].shape for x in (bias, mask) if x is not None))
    return batch, rows, keys


def block_smooth(attention_mask: Tensor, key_len: int, block_size: int) -> Tensor:
    """Each block of `block_size` keys becomes visible if more than half of it is, else masked, in place."""
    if block_size <= 0:
        raise ValueError(f"block_size must be positive, got {block_size}")
    return attention_mask.copy_(masks.dynamic.smooth_blocks(attention_mask, block_size))


def topk_indices(attention_bias: Tensor, window_size: int, **kwargs) -> Tensor:
    """int64 (B, Hkv, window_size): the keys of largest bias (B, Hkv, Sk), ascending."""
    return attention_bias.detach().topk(window_size, dim=-1, sorted=False).indices.sort(dim=-1).values
