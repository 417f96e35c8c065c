"""What the compiled backends share: the operators, called for one device type."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .. import ops, transforms  # noqa: F401, which only needs to be there
from ..checks import Varlen
from ..interval_mask import KeyIntervalMask
from ..key_lists import KeyLists

FIXED = (None, None, None, None)
EVERY_PAIR = ops.MaskTensors()


def mask_tensors(mask, query: Tensor, key: Tensor, is_causal: bool, varlen: Varlen | None) -> ops.MaskTensors:
    """A mask as the operators take it."""
    if mask is None:
        return EVERY_PAIR
    if isinstance(mask, ops.MaskTensors):
        return mask
    if isinstance(mask, KeyIntervalMask):
        return ops.MaskTensors(intervals=mask.intervals)
    if isinstance(mask, KeyLists):
        return ops.MaskTensors(None, None, mask.intervals, mask.keys, mask.spans, mask.rows)
    if query.device.type == "cpu":
        return ops.MaskTensors(mask)
    cu_seqlens_q, cu_seqlens_k, *lengths = varlen or (None, None, query.shape[1], key.shape[1])
    return ops.MaskTensors(*ops.pack_mask(mask, *lengths, is_causal, cu_seqlens_q, cu_seqlens_k))


def attention_on(device_type: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """The `attention` function of the backend that runs on `device_type`."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | KeyIntervalMask | KeyLists | ops.MaskTensors | None,
        bias: Tensor | None,
        *,
        softmax_scale: float,
        is_causal: bool,
        softcap: float,
        deterministic: bool,
        varlen: Varlen | None = None,
        cache_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        if query.device.type != device_type:
            raise RuntimeError(f"the backend '{device_type}' takes {device_type} tensors, got query on {query.device}")
        masks = mask_tensors(mask, query, key, is_causal, varlen)
        return ops.attention_forward(
            *(query, key, value, bias, *masks, *(varlen or FIXED), cache_seqlens),
            *(float(softmax_scale), float(softcap), is_causal, deterministic),
        )

    return attention
