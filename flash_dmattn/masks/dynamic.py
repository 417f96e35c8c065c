"""create_mask: bool masks that a model derives from its biases."""

from __future__ import annotations

import math
import sys
from typing import Literal

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn.functional import pad

from ..arguments import (
    names,
    require_count,
    require_device,
    require_floating,
    require_integers,
    require_number,
    require_tensor,
    shape_of,
)
from ..biases import least
from ..broadcast import expand_shared, is_one_of, shares_batch
from .combined import divide
from .topk import topk_mask

FLOAT_MAX = sys.float_info.max


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
    """The dynamic mask of a bias: for every row, the candidate keys that the bias selects.

    Args:
        attention_bias: floating ({B|B/n|1}, {H|Hkv|1}, {Sq|1}, Sk).
        attention_mask: the keys to choose from: bool ({B|B/n|1}, {H|Hkv|1}, {Sq|1}, {Sk|1}), True = visible; or a
            padding mask (B, Sk), bool or integer, nonzero = a real token; or None: all keys.
        batch_size, query_len, key_len: B, Sq and Sk.
        window_size: the number of keys that "topk" selects per row, at least 0. A row with fewer candidates keeps all.
        min_dtype: a key whose bias is not above this is never selected; nor is one with a bias of -inf or
            torch.finfo(dtype).min, which always masks.
        block_size: None, or at least 1. After the selection each block of this many consecutive keys (the last one may
            be shorter) becomes visible if more than half of its keys were selected, and masked otherwise. So a row may
            see more or fewer than `window_size` keys. Keys that `attention_mask` or `min_dtype` excludes stay masked.
        type: "topk" selects the `window_size` largest biases of a row, ties to the later key; "relu" those above 0.

    Returns:
        bool ({B|B/n|1}, {H|Hkv|1}, Sq, Sk), True = visible, in the larger batch and head dimension of bias and mask.
        If their batch dimensions differ and neither is 1, the result has B.

    Raises:
        ValueError: an invalid shape, size or type, a min_dtype that is NaN.
        TypeError: a bias that is not floating, an attention_mask that is neither bool nor a 2-dimensional integer
            padding mask, a size that is not an int, a min_dtype that is not a number.
        RuntimeError: an attention_mask that is not on attention_bias's device.
    """
    if type not in ("topk", "relu"):
        raise ValueError(f"type must be 'topk' or 'relu', got {type!r}")
    batch_size, query_len = require_count("batch_size", batch_size), require_count("query_len", query_len)
    key_len, window_size = require_count("key_len", key_len), require_count("window_size", window_size)
    require_number("min_dtype", min_dtype)
    if not isinstance(min_dtype, int):  # a NumPy float would be compared in its dtype
        min_dtype = float(min_dtype)
    if not -FLOAT_MAX <= min_dtype <= FLOAT_MAX and min_dtype not in (-math.inf, math.inf):
        raise ValueError(f"min_dtype must fit in a float and not be NaN, got {min_dtype}")
    if block_size is not None:
        block_size = require_count("block_size", block_size)
        if block_size == 0:
            raise ValueError("block_size must be at least 1 or None, got 0")
    require_floating("attention_bias", attention_bias)
    layout = "({B|B/n|1}, {H|Hkv|1}, {Sq|1}, Sk)"
    _check_shape("attention_bias", attention_bias, layout, batch_size, query_len, (key_len,))
    if attention_mask is not None:
        require_tensor("attention_mask", attention_mask)
        require_device("attention_mask", attention_mask, attention_bias.device, "attention_bias")
    visible = _visible_keys(attention_mask, batch_size, query_len, key_len)

    bias = attention_bias.detach()
    if visible is not None:
        heads = max(bias.shape[1], visible.shape[1])
        if not divide(heads, bias.shape[1], visible.shape[1]):
            raise ValueError(
                "attention_bias and attention_mask must have head counts of which one divides the other, got "
                f"{bias.shape[1]} and {visible.shape[1]}"
            )
        batches = bias.shape[0] if bias.shape[0] == visible.shape[0] else batch_size
        bias, visible = (expand_shared(x, batches, heads) for x in (bias, visible))
    candidates = bias > max(min_dtype, least(bias.dtype))
    candidates = candidates if visible is None else candidates & visible
    selected = topk_mask(bias, candidates, window_size) if type == "topk" else candidates & (bias > 0)
    if block_size is not None:
        selected = smooth_blocks(selected, block_size) & candidates
    return selected.expand(-1, -1, query_len, -1)


def smooth_blocks(mask: Tensor, block_size: int) -> Tensor:
    """bool (.., Sk): each block of `block_size` keys becomes True if more than half of it is True, else False."""
    key_len = mask.shape[-1]
    runs = -(-key_len // block_size)
    padded = rearrange(pad(mask, (0, runs * block_size - key_len)), "... (runs size) -> ... runs size", size=block_size)
    sizes = torch.full((runs,), block_size, device=mask.device)
    sizes[-1:] = key_len - (runs - 1) * block_size
    keep = 2 * padded.sum(dim=-1) > sizes
    return repeat(keep, "... runs -> ... (runs size)", size=block_size)[..., :key_len]


def _check_shape(name: str, tensor: Tensor, layout: str, batch_size: int, query_len: int, key_lens: tuple) -> None:
    fits = (
        tensor.ndim == 4
        and shares_batch(tensor.shape[0], batch_size)
        and is_one_of(tensor.shape[2], query_len, 1)
        and is_one_of(tensor.shape[3], *key_lens)
    )
    if not fits:
        raise ValueError(
            f"{name} must be {layout} with B = {batch_size}, Sq = {query_len}, Sk = {key_lens[0]}, "
            f"got shape {shape_of(tensor)}"
        )


def _visible_keys(mask: Tensor | None, batch_size: int, query_len: int, key_len: int) -> Tensor | None:
    if mask is None:
        return None
    if mask.ndim == 2:
        if mask.shape != (batch_size, key_len):
            raise ValueError(f"attention_mask must be (B, Sk) = {(batch_size, key_len)}, got {shape_of(mask)}")
        require_integers("attention_mask (B, Sk)", mask, or_bool=True)
        return mask[:, None, None, :] != 0
    if mask.dtype != torch.bool:
        raise TypeError(f"attention_mask must be bool (True = visible), got {names([mask.dtype])}")
    layout = "({B|B/n|1}, {H|Hkv|1}, {Sq|1}, {Sk|1}) or a padding mask (B, Sk)"
    _check_shape("attention_mask", mask, layout, batch_size, query_len, (key_len, 1))
    return mask
