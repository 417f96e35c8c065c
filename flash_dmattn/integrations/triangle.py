"""Attention with a pair bias, for protein models. The bias is shared by N rows of pairs and never expanded.

    from flash_dmattn.integrations.triangle import triangle_attention           # cuEquivariance's signature
    from flash_dmattn.integrations.triangle import DS4Sci_EvoformerAttention    # DeepSpeed4Science's signature

Neither library is required.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..arguments import (
    assert_later,
    is_host_readable,
    names,
    require_device,
    require_floating,
    require_tensor,
    shape_of,
)
from ..attend import autocast_is_on
from ..biases import key_contiguous
from ..checks import check_finite, compiled_check
from ..interface import flash_dmattn_func

# A mask bias of at most this value masks its key: in float32 its exp is 0 relative to ordinary scores.
MASK_THRESHOLD = -1e4
BAD_MASK_BIAS = f"biases[0] must be 0 or at most {MASK_THRESHOLD:g} with a pair bias"


def triangle_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Triangle attention with the signature of cuequivariance_torch.triangle_attention.

    N rows of pairs share one bias. For row n of a batch element, query i and key j of a head:

        o_ni = sum_j softmax_j(scale * <q_ni, k_nj> + bias_ij) v_nj    over the keys j with mask_nj

    This is the attention of AlphaFold (Jumper et al., 2021, supplement, algorithms 13 and 14). Differentiable in q, k,
    v and bias. The gradient of the bias is summed over the N rows, in float32 as in `flash_dmattn_func`, and has the
    bias's shape. No tensor of N x Q x K elements is created. A bias whose keys are not contiguous, such as a projection
    (B, Q, K, H), is copied once.

    A row whose keys are all masked returns 0 and has zero gradients. cuEquivariance returns the mean of v there,
    because it replaces masked scores by -1e9.

    Args:
        q: (B, N, H, Q, D), in the dtypes of `flash_dmattn_func`; D from 1 to 256.
        k: (B, N, H, K, D) in q's dtype.
        v: (B, N, H, K, D) in q's dtype.
        bias: (B, 1, H, Q, K) in q's dtype or float32. A float32 bias with a 16-bit q is read without rounding, and
            its gradient is float32; on CUDA it is slower than one in q's dtype, much slower where the pair bias kernels
            of compute capability 9.0 do not serve the call (docs/kernels.md).
        mask: bool (B, {N|1}, 1, 1, K), True = visible; None: all keys are visible.
        scale: scale of the scores, default 1 / sqrt(D).

    All tensors may omit B for one batch element: q (N, H, Q, D), bias (1, H, Q, K), mask ({N|1}, 1, 1, K).

    Returns:
        (B, N, H, Q, D) or (N, H, Q, D), in q's dtype; a view of memory laid out as (B, N, Q, H, D).

    Raises:
        ValueError: a shape or value that does not fit.
        TypeError: a dtype or type that does not fit.
        RuntimeError: tensors on different devices, or kernels that were not built.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v), ("bias", bias)):
        require_tensor(name, tensor)
    if mask is not None:
        require_tensor("mask", mask)
    if q.ndim == 4:
        for name, tensor in (("k", k), ("v", v), ("bias", bias), ("mask", mask)):
            if tensor is not None and tensor.ndim != 4:
                raise ValueError(f"{name} must have 4 dimensions as q has, got shape {shape_of(tensor)}")
    elif q.ndim != 5:
        raise ValueError(f"q must be (B, N, H, Q, D) or (N, H, Q, D), got shape {shape_of(q)}")
    compiled_check("check_rows", "q", q, "(B, N, H, Q, D)" if q.ndim == 5 else "(N, H, Q, D)")
    *batch, n, heads, rows, head_dim = q.shape
    keys = k.shape[-2] if k.ndim == q.ndim else 0
    require_shape("k", k, "(B, N, H, K, D)", (*batch, n, heads, keys, head_dim))
    require_shape("v", v, "(B, N, H, K, D)", (*batch, n, heads, keys, head_dim))
    require_shape("bias", bias, "(B, 1, H, Q, K)", (*batch, 1, heads, rows, keys))
    require_same("q", q, {"k": k, "v": v})
    require_same("q", q, {"bias": bias}, or_float32=True)
    if mask is not None:
        if mask.dtype != torch.bool:
            raise TypeError(f"mask must be bool (True = visible), got {names([mask.dtype])}")
        require_device("mask", mask, q.device, "q")
        if mask.shape != (*batch, 1, 1, 1, keys):
            require_shape("mask", mask, "(B, {N|1}, 1, 1, K)", (*batch, n, 1, 1, keys))
    if scale is not None:
        check_finite("scale", scale)
    # (N, Q, H, D) or (B, N, Q, H, D)
    q, k, v = q.transpose(-3, -2), k.transpose(-3, -2), v.transpose(-3, -2)
    if not batch:
        return flash_dmattn_func(q, k, v, mask, key_contiguous(bias), scale).transpose(1, 2)
    mask = None if mask is None else mask.flatten(0, 1)
    q_rows, k_rows, v_rows = (x.flatten(0, 1) for x in (q, k, v))
    out = flash_dmattn_func(q_rows, k_rows, v_rows, mask, key_contiguous(bias.squeeze(1)), scale)
    return out.view_as(q).transpose(2, 3)


def DS4Sci_EvoformerAttention(Q: Tensor, K: Tensor, V: Tensor, biases: Sequence[Tensor | None]) -> Tensor:
    """Evoformer attention with the signature of DeepSpeed4Science's DS4Sci_EvoformerAttention.

        O_ni = sum_j softmax_j(<Q_ni, K_nj> / sqrt(D) + biases[0]_nj + biases[1]_ij) V_nj

    Differentiable in Q, K, V and the pair bias biases[1]; without a pair bias also in the mask bias biases[0].

    A mask bias of -1e4 or less masks its key, as -inf does. With a pair bias the mask bias is applied as a bool mask,
    because the sum of both would have N x S x Sk elements per head: it must hold only 0 and values of -1e4 or less, and
    must not require a gradient. Without a pair bias it may hold any values.

    A row whose keys are all masked returns 0 and has zero gradients; DeepSpeed returns the mean of V.

    Args:
        Q: (B, N, S, H, D), in the dtypes of `flash_dmattn_func`; D from 1 to 256.
        K: (B, N, Sk, H, D) in Q's dtype. DeepSpeed requires Sk = S.
        V: (B, N, Sk, H, D) in Q's dtype.
        biases: up to two: the mask bias (B, N, 1, 1, Sk) in Q's dtype or float32, or None; the pair bias
            (B, 1, H, S, Sk) in Q's dtype or float32, or None.

    Returns:
        (B, N, S, H, D) in Q's dtype.

    Raises:
        ValueError: a shape or value that does not fit. On CUDA the values of a mask bias with a pair bias are checked
            on the device without synchronization: a device-side assertion fails.
        TypeError: a dtype or type that does not fit.
        RuntimeError: tensors on different devices, or kernels that were not built.
    """
    for name, tensor in (("Q", Q), ("K", K), ("V", V)):
        require_tensor(name, tensor)
    if not isinstance(biases, (list, tuple)):
        raise TypeError(f"biases must be a list or tuple of up to two biases, got {type(biases).__name__}")
    if len(biases) > 2:
        raise ValueError(f"biases must be up to two, the mask bias and the pair bias, got {len(biases)}")
    mask_bias, pair_bias = (*biases, None, None)[:2]
    if Q.ndim != 5:
        raise ValueError(f"Q must be (B, N, S, H, D), got shape {shape_of(Q)}")
    compiled_check("check_rows", "Q", Q, "(B, N, S, H, D)")
    batch, n, rows, heads, head_dim = Q.shape
    keys = K.shape[2] if K.ndim == 5 else 0
    require_shape("K", K, "(B, N, Sk, H, D)", (batch, n, keys, heads, head_dim))
    require_shape("V", V, "(B, N, Sk, H, D)", (batch, n, keys, heads, head_dim))
    require_same("Q", Q, {"K": K, "V": V})
    mask = bias = None
    if pair_bias is not None:
        require_tensor("biases[1]", pair_bias)
        require_shape("biases[1]", pair_bias, "(B, 1, H, S, Sk)", (batch, 1, heads, rows, keys))
        require_same("Q", Q, {"biases[1]": pair_bias}, or_float32=True)
        bias = key_contiguous(pair_bias.squeeze(1))
    if mask_bias is not None:
        require_floating("biases[0]", mask_bias)
        require_shape("biases[0]", mask_bias, "(B, N, 1, 1, Sk)", (batch, n, 1, 1, keys))
        require_device("biases[0]", mask_bias, Q.device, "Q")
        if pair_bias is not None:
            mask = bool_mask(mask_bias).flatten(0, 1)
        else:
            if mask_bias.dtype != torch.float32:
                require_same("Q", Q, {"biases[0]": mask_bias})
            bias = mask_bias.masked_fill(mask_bias <= MASK_THRESHOLD, -torch.inf).flatten(0, 1)
    return flash_dmattn_func(*(x.flatten(0, 1) for x in (Q, K, V)), mask, bias).view_as(Q)


def bool_mask(mask_bias: Tensor) -> Tensor:
    """bool, True = visible. Raises ValueError for values other than 0 and those up to MASK_THRESHOLD."""
    if mask_bias.requires_grad and torch.is_grad_enabled():
        raise ValueError("biases[0] must not require a gradient with a pair bias: pass its detach()")
    visible = mask_bias == 0
    is_valid = visible | (mask_bias <= MASK_THRESHOLD)
    if is_host_readable(mask_bias):
        if not is_valid.all():
            raise ValueError(f"{BAD_MASK_BIAS}, got {mask_bias[~is_valid][0].item():g}")
    else:
        assert_later(is_valid, BAD_MASK_BIAS)
    return visible


def require_shape(name: str, tensor: Tensor, layout: str, shape: tuple[int, ...]) -> None:
    """`layout` names five dimensions; tensors of four dimensions omit B."""
    if tensor.shape != shape:
        layout = layout if len(shape) == 5 else layout.replace("(B, ", "(")
        raise ValueError(f"{name} must be {layout} = {shape}, got shape {shape_of(tensor)}")


def require_same(query_name: str, query: Tensor, others: dict[str, Tensor], or_float32: bool = False) -> None:
    """Requires the device of the queries and, without autocast, their dtype, or with `or_float32` float32."""
    device, dtype = query.device, query.dtype
    accepted = (dtype, torch.float32) if or_float32 else (dtype,)
    for name, tensor in others.items():
        require_device(name, tensor, device, query_name)
        if tensor.dtype not in accepted and not autocast_is_on(device):
            text = " or float32" if len(set(accepted)) > 1 else ""
            raise TypeError(
                f"{name} must have {query_name}'s dtype {names([dtype])}{text}, got {names([tensor.dtype])}"
            )
