"""Upstream's import path of `pad_input`, `unpad_input` and the other functions of their module."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import padding
from ..deprecation import deprecated

deprecated(__name__, "flash_dmattn.pad_input and unpad_input")


def index_first_axis(tensor: Tensor, indices: Tensor) -> Tensor:
    """Rows of (B, S, ...), counted over B * S."""
    return tensor.flatten(0, 1)[indices]


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """`flash_dmattn.unpad_input` of the tokens of either mask; also the number of attention_mask's in each sequence."""
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    every = attention_mask if unused_mask is None else attention_mask + unused_mask
    return *padding.unpad_input(hidden_states, every), used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """`flash_dmattn.pad_input`."""
    return padding.pad_input(hidden_states, indices, batch, seqlen)


def get_unpad_data(attention_mask: Tensor) -> tuple[Tensor, Tensor, int]:
    """indices, cu_seqlens and max_seqlen of `flash_dmattn.unpad_input`."""
    return padding.unpad_input(attention_mask, attention_mask)[1:]


def upad_input(
    query_layer: Tensor,
    key_layer: Tensor,
    value_layer: Tensor,
    attention_mask: Tensor,
    query_length: int,
    unpad_input_func: Callable[..., tuple],
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor], tuple[int, int]]:
    """query, key and value without padding, indices of the rows, (cu_seqlens_q, cu_seqlens_k) and (max_seqlen_q,
    max_seqlen_k). The rows are the last ones of attention_mask (B, Sk); keys beyond it are cut off."""
    indices, cu_seqlens_k, max_seqlen_k = get_unpad_data(attention_mask)
    key_layer, value_layer = (x[:, : attention_mask.shape[1]] for x in (key_layer, value_layer))
    rows = (indices, cu_seqlens_k, max_seqlen_k)
    if query_length == key_layer.shape[1]:
        query_layer = index_first_axis(query_layer, indices)
    elif query_length == 1:
        cu_seqlens_q = torch.arange(len(query_layer) + 1, dtype=torch.int32, device=query_layer.device)
        query_layer, rows = query_layer.squeeze(1), (cu_seqlens_q[:-1], cu_seqlens_q, 1)
    else:
        query_layer, *rows = unpad_input_func(query_layer, attention_mask[:, -query_length:])[:4]
    key_layer, value_layer = (index_first_axis(x, indices) for x in (key_layer, value_layer))
    return query_layer, key_layer, value_layer, rows[0], (rows[1], cu_seqlens_k), (rows[2], max_seqlen_k)
