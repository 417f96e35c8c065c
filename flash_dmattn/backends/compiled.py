"""What the compiled backends share: the custom ops, called for one device type."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .. import ops
from ..checks import Varlen
from ..interval_mask import KeyIntervalMask
from ..key_lists import KeyLists, interval_tensor


def mask_tensors(mask: Tensor | KeyIntervalMask | KeyLists | None) -> ops.MaskTensors:
    """A mask as the ops take it."""
    if isinstance(mask, KeyIntervalMask):
        return ops.MaskTensors(intervals=interval_tensor(mask))
    if isinstance(mask, KeyLists):
        return ops.MaskTensors(None, mask.intervals, mask.keys, mask.starts, mask.rows, mask.batches, mask.heads)
    return ops.MaskTensors(mask)


def attention_on(device_type: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """The `attention` function of the backend that runs on `device_type`."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | KeyIntervalMask | KeyLists | None,
        bias: Tensor | None,
        *,
        softmax_scale: float,
        is_causal: bool,
        softcap: float,
        deterministic: bool,
        varlen: Varlen | None = None,
    ) -> tuple[Tensor, Tensor]:
        if query.device.type != device_type:
            raise RuntimeError(f"the backend '{device_type}' takes {device_type} tensors, got query on {query.device}")
        lengths = varlen or (None, None, None, None)
        out, lse, *_ = ops.attention(
            *(query, key, value, *mask_tensors(mask), bias, *lengths),
            *(float(softmax_scale), float(softcap), is_causal, deterministic),
        )
        return out, lse

    return attention
