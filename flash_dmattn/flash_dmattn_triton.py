"""Upstream's function of the Triton backend, with its order of arguments."""

from __future__ import annotations

from torch import Tensor

from .checks import AnyMask
from .deprecation import deprecated
from .interface import flash_dmattn_func_auto

deprecated(f"{__name__}.triton_dmattn_func", 'flash_dmattn.flash_dmattn_func_auto("triton")')


def triton_dmattn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: AnyMask = None,
    attn_bias: Tensor | None = None,
    is_causal: bool | None = False,
    softmax_scale: float | Tensor | None = None,
    *,
    scale: float | Tensor | None = None,
) -> Tensor:
    """`flash_dmattn_func_auto("triton")`: is_causal comes before softmax_scale."""
    return flash_dmattn_func_auto("triton")(
        *(query, key, value, attn_mask, attn_bias, softmax_scale, is_causal), scale=scale
    )
