"""The compiled backends: the operators, called for one device type."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .. import ops
from ..call import Varlen
from ..ops.schema import Arguments, MaskTensors

FIXED = Varlen(None, None, None, None)
NO_MASK = MaskTensors()


def attention_on(device_type: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """The `attention` function of the backend for `device_type`."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: MaskTensors | None,
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
        arguments = Arguments(
            *(query, key, value, bias, *(mask or NO_MASK), *(varlen or FIXED), cache_seqlens),
            *(float(softmax_scale), float(softcap), is_causal, deterministic),
        )
        return ops.attention_forward(*arguments)

    return attention
