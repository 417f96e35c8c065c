"""Upstream's import path and order of arguments: `flash_dmattn_varlen_func` has no mask and bias there."""

from __future__ import annotations

from torch import Tensor

from . import interface
from .deprecation import deprecated
from .interface import (
    flash_dmattn_func,
    flash_dmattn_kvpacked_func,
    flash_dmattn_qkvpacked_func,
    flash_dmattn_varlen_kvpacked_func,
    flash_dmattn_varlen_qkvpacked_func,
)

__all__ = [
    "flash_dmattn_func",
    "flash_dmattn_kvpacked_func",
    "flash_dmattn_qkvpacked_func",
    "flash_dmattn_varlen_func",
    "flash_dmattn_varlen_kvpacked_func",
    "flash_dmattn_varlen_qkvpacked_func",
]

deprecated(__name__, "flash_dmattn")


def flash_dmattn_varlen_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | Tensor | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    return_attn_probs: bool | None = None,
    block_table: Tensor | None = None,
    **kwargs,
) -> Tensor | tuple[Tensor, ...]:
    """`flash_dmattn.flash_dmattn_varlen_func` in upstream's order; the keywords of that function work, too."""
    if block_table is not None:
        raise ValueError("block_table is not supported, got one: pass contiguous keys and values")
    return interface.flash_dmattn_varlen_func(
        *(query, key, value, kwargs.pop("attn_mask", None), kwargs.pop("attn_bias", None)),
        *(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        *(softmax_scale, is_causal, softcap, deterministic, return_attn_probs),
        **kwargs,
    )
