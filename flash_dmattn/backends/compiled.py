"""The compiled backends: the operators, called for one device type."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .. import ops
from ..call import Varlen
from ..ops.schema import NO_MASK, Arguments, MaskTensors

FIXED = Varlen(None, None, None, None)


def attention_on(device_type: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """The `attention` function of the backend for `device_type`."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: MaskTensors | None,
        bias: Tensor | None,
        *,
        relative_bias: Tensor | None = None,
        varlen: Varlen | None = None,
        cache_seqlens: Tensor | None = None,
        **options,
    ) -> tuple[Tensor, Tensor]:
        if query.device.type != device_type:
            raise RuntimeError(f"the backend '{device_type}' takes {device_type} tensors, got query on {query.device}")
        tensors = (query, key, value, bias, relative_bias, *(mask or NO_MASK), *(varlen or FIXED), cache_seqlens)
        return ops.attention_forward(*Arguments(*tensors, **options))

    return attention
