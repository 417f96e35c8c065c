"""Upstream's attention function of Hugging Face transformers, for models that call it themselves."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..checks import AnyMask
from ..deprecation import deprecated
from ..interface import flash_dmattn_func
from ..masks import KeyIntervalMask, create_mask
from .transformers import require_supported

deprecated(__name__, "flash_dmattn.integrations.transformers")

PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def flash_dynamic_mask_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: AnyMask,
    attention_bias: Tensor | None,
    scaling: float | None = None,
    window_size: int | None = None,
    softcap: float | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """`flash_dmattn_func` of tensors (B, heads, S, D).

    Args:
        module: the attention layer. Its `is_causal` applies if the argument is None.
        query, key, value: (B, H, Sq, D), (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv).
        attention_mask: a mask of `flash_dmattn_func`, or a padding mask (B, Sk), bool or integers.
        attention_bias: a bias of `flash_dmattn_func`. With a window_size below Sk each row sees the window_size keys of
            largest bias among those that attention_mask shows: `create_mask`.
        scaling: softmax_scale; also under the names `scale` and `softmax_scale`.
        kwargs: is_causal and deterministic. Others are ignored, unless they ask for something that is not computed.

    Returns:
        (out (B, Sq, H, Dv), None).
    """
    require_supported(kwargs.pop("dropout", None) or 0.0, kwargs)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    batch, rows, keys = *query.shape[:2], key.shape[1]
    refuse_packed(batch, kwargs)
    for name in ("softmax_scale", "scale"):
        scaling = kwargs.get(name) if scaling is None else scaling
    is_causal = kwargs.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    query, key, value = in_module_dtype(module, query, key, value)

    if attention_bias is not None and window_size is not None and keys > window_size:
        min_dtype = torch.finfo(attention_bias.dtype).min
        attention_mask = create_mask(attention_bias, attention_mask, batch, rows, keys, window_size, min_dtype)
    elif isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
        attention_mask = KeyIntervalMask.padding(attention_mask)
    out = flash_dmattn_func(
        *(query, key, value, attention_mask, attention_bias),
        *(scaling, is_causal, softcap, kwargs.get("deterministic")),
    )
    return out, None


def refuse_packed(batch: int, options: dict) -> None:
    """Raises ValueError for several sequences in one row of the batch."""
    got = [name for name in PACKED if options.get(name) is not None]
    positions = options.get("position_ids")
    if positions is not None and batch == 1 and (positions.diff(dim=-1) != 1).any():
        got.append("position_ids that restart")
    if got:
        raise ValueError(f'packed sequences need attn_implementation="flash_dmattn", got {", ".join(got)}')


def in_module_dtype(module: nn.Module, *rows: Tensor) -> tuple[Tensor, ...]:
    """Rows in the dtype of the module's weights where they are float32, as layer norms in float32 make them."""
    weight = next((layer.weight for layer in module.modules() if isinstance(layer, nn.Linear)), None)
    if weight is None or rows[0].dtype != torch.float32 or not weight.is_floating_point():
        return rows
    return tuple(x.to(weight.dtype) for x in rows)
