"""Upstream's function of the FlexAttention backend, with its order of arguments."""

from __future__ import annotations

from torch import Tensor

from .checks import AnyMask
from .deprecation import deprecated
from .interface import flash_dmattn_func_auto

deprecated(f"{__name__}.flex_dmattn_func", 'flash_dmattn.flash_dmattn_func_auto("flex")')


def flex_dmattn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: AnyMask = None,
    attn_bias: Tensor | None = None,
    is_causal: bool | None = None,
    softmax_scale: float | Tensor | None = None,
    *,
    scale: float | Tensor | None = None,
) -> Tensor:
    """`flash_dmattn_func_auto("flex")`: is_causal comes before softmax_scale, and is True by default, as upstream."""
    is_causal = True if is_causal is None else is_causal
    return flash_dmattn_func_auto("flex")(
        *(query, key, value, attn_mask, attn_bias, softmax_scale, is_causal), scale=scale
    )
