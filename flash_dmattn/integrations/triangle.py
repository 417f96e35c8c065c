"""Attention with a pair bias, as protein models call it: rows of pairs that share one bias, which is never expanded.

    from flash_dmattn.integrations.triangle import triangle_attention           # cuEquivariance's shapes
    from flash_dmattn.integrations.triangle import DS4Sci_EvoformerAttention    # DeepSpeed4Science's

Needs neither of these libraries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..arguments import is_host_readable, names, require_device, require_floating, require_tensor, shape_of
from ..attend import autocast_is_on
from ..checks import check_finite
from ..interface import flash_dmattn_func

# From here down an entry of a mask bias hides its key: beside scores that lie closer together its exp is 0 in float32.
HIDES = -1e4


def triangle_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """cuequivariance_torch.triangle_attention by flash_dmattn: N rows of pairs attend under one bias for all of them.

    For row n of a batch element, query i and key j of a head:

        o_ni = sum_j softmax_j(scale * <q_ni, k_nj> + bias_ij) v_nj    over the keys j with mask_nj

    Differentiable in q, k, v and the bias, whose gradient is summed over the N rows in float32 and comes in the bias's
    shape. Nothing of N x Q x K is made: the bias is read as it is. One whose keys do not lie next to each other in
    memory, as of a projection (B, Q, K, H), is copied first, once for the N rows.

    A row whose mask hides every key gives 0 and zero gradients; cuEquivariance, which puts -1e9 in place of the scores
    that the mask hides, gives the mean of v.

    Args:
        q: (B, N, H, Q, D), in the dtypes of `flash_dmattn_func`; D from 1 to 256.
        k: (B, N, H, K, D) in q's dtype.
        v: (B, N, H, K, D) in q's dtype.
        bias: (B, 1, H, Q, K) in q's dtype; float32 beside other dtypes is refused, not rounded.
        mask: bool (B, {N|1}, 1, 1, K), True = visible; None: all are.
        scale: 1 / sqrt(D) by default.

    All may be given without B, for one batch element: q (N, H, Q, D), bias (1, H, Q, K), mask ({N|1}, 1, 1, K).

    Returns:
        (B, N, H, Q, D), or (N, H, Q, D), in q's dtype: a view of (B, N, Q, H, D) in memory.

    Raises:
        ValueError: a shape or value that does not fit.
        TypeError: a dtype or type that does not fit.
        RuntimeError: tensors on different devices, or kernels that were not built.
    """
    require_tensor("q", q)
    require_tensor("k", k)
    require_tensor("v", v)
    require_tensor("bias", bias)
    if mask is not None:
        require_tensor("mask", mask)
    if q.ndim == 4:
        for name, tensor in (("k", k), ("v", v), ("bias", bias), ("mask", mask)):
            if tensor is not None and tensor.ndim != 4:
                raise ValueError(f"{name} must have 4 dimensions as q has, got shape {shape_of(tensor)}")
    elif q.ndim != 5:
        raise ValueError(f"q must be (B, N, H, Q, D) or (N, H, Q, D), got shape {shape_of(q)}")
    *batch, n, heads, rows, head_dim = q.shape
    keys = k.shape[-2] if k.ndim == q.ndim else 0
    require_shape("k", k, "(B, N, H, K, D)", (*batch, n, heads, keys, head_dim))
    require_shape("v", v, "(B, N, H, K, D)", (*batch, n, heads, keys, head_dim))
    require_shape("bias", bias, "(B, 1, H, Q, K)", (*batch, 1, heads, rows, keys))
    require_like("q", q, {"k": k, "v": v, "bias": bias})
    if mask is not None:
        check_mask(mask, batch, n, keys, q.device)
    if scale is not None:
        check_finite("scale", scale)
    # In the order in which the kernels take them: (N, Q, H, D) or (B, N, Q, H, D).
    q, k, v = q.transpose(-3, -2), k.transpose(-3, -2), v.transpose(-3, -2)
    if not batch:
        return flash_dmattn_func(q, k, v, mask, with_close_keys(bias), scale).transpose(1, 2)
    mask = None if mask is None else rows_of(mask)
    out = flash_dmattn_func(rows_of(q), rows_of(k), rows_of(v), mask, pair_bias(bias), scale)
    return out.view_as(q).transpose(2, 3)


def DS4Sci_EvoformerAttention(Q: Tensor, K: Tensor, V: Tensor, biases: Sequence[Tensor | None]) -> Tensor:
    """DeepSpeed4Science's DS4Sci_EvoformerAttention by flash_dmattn: a mask bias, a pair bias, both or none.

        O_ni = sum_j softmax_j(<Q_ni, K_nj> / sqrt(D) + biases[0]_nj + biases[1]_ij) V_nj

    Differentiable in Q, K, V and the pair bias, and, where there is no pair bias, in the mask bias.

    An entry of the mask bias of -1e4 or less hides its key, as -inf does. Beside a pair bias the mask bias must hold
    nothing but 0 and what hides, for then it is a mask, and must not require a gradient: a sum of the two would have
    to be made for each of the N rows. Where it stands alone it may hold anything. A row whose keys are all hidden gives
    0 and zero gradients, where DeepSpeed gives the mean of V.

    Args:
        Q: (B, N, S, H, D), in the dtypes of `flash_dmattn_func`; D from 1 to 256.
        K: (B, N, Sk, H, D) in Q's dtype; DeepSpeed's Sk is S.
        V: (B, N, Sk, H, D) in Q's dtype.
        biases: up to two. The mask bias (B, N, 1, 1, Sk), in Q's dtype or float32, or None; and the pair bias
            (B, 1, H, S, Sk) in Q's dtype, or None.

    Returns:
        (B, N, S, H, D) in Q's dtype.

    Raises:
        ValueError: a shape or value that does not fit. On CUDA the values of a mask bias beside a pair bias are checked
            by the GPU, without making the host wait: a device-side assertion fails where they do not fit.
        TypeError: a dtype or type that does not fit.
        RuntimeError: tensors on different devices, or kernels that were not built.
    """
    for name, tensor in (("Q", Q), ("K", K), ("V", V)):
        require_tensor(name, tensor)
    if not isinstance(biases, (list, tuple)):
        raise TypeError(f"biases must be a list or tuple of up to two biases, got {type(biases).__name__}")
    if len(biases) > 2:
        raise ValueError(f"biases must be up to two, the mask bias and the pair bias, got {len(biases)}")
    mask_bias, pairs = (*biases, None, None)[:2]
    if Q.ndim != 5:
        raise ValueError(f"Q must be (B, N, S, H, D), got shape {shape_of(Q)}")
    batch, n, rows, heads, head_dim = Q.shape
    keys = K.shape[2] if K.ndim == 5 else 0
    require_shape("K", K, "(B, N, Sk, H, D)", (batch, n, keys, heads, head_dim))
    require_shape("V", V, "(B, N, Sk, H, D)", (batch, n, keys, heads, head_dim))
    require_like("Q", Q, {"K": K, "V": V})
    mask = bias = None
    if pairs is not None:
        require_tensor("biases[1]", pairs)
        require_shape("biases[1]", pairs, "(B, 1, H, S, Sk)", (batch, 1, heads, rows, keys))
        require_like("Q", Q, {"biases[1]": pairs})
        bias = pair_bias(pairs)
    if mask_bias is not None:
        require_floating("biases[0]", mask_bias)
        require_shape("biases[0]", mask_bias, "(B, N, 1, 1, Sk)", (batch, n, 1, 1, keys))
        require_device("biases[0]", mask_bias, Q.device, "Q")
        if pairs is not None:
            mask = rows_of(mask_of(mask_bias))
        else:
            if mask_bias.dtype != torch.float32:
                require_like("Q", Q, {"biases[0]": mask_bias})
            bias = rows_of(mask_bias.masked_fill(mask_bias <= HIDES, -torch.inf))
    return flash_dmattn_func(rows_of(Q), rows_of(K), rows_of(V), mask, bias).view_as(Q)


def mask_of(mask_bias: Tensor) -> Tensor:
    """bool, True = visible, of a mask bias that holds 0 and what hides."""
    if mask_bias.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "biases[0] must not require a gradient beside a pair bias, where it is a mask: give its detach()"
        )
    visible = mask_bias == 0
    fits = visible | (mask_bias <= HIDES)
    message = f"biases[0] must hold 0 and numbers from {HIDES:g} down alone beside a pair bias, where it is a mask"
    if is_host_readable(mask_bias):
        if not fits.all():
            raise ValueError(f"{message}, got {mask_bias[~fits][0].item():g}")
    elif torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():  # which know no assertions
        torch._assert_async(fits.all(), message)
    return visible


def rows_of(x: Tensor) -> Tensor:
    """(B, N, ..) to (B N, ..), as flash_dmattn_func takes batches."""
    return x.flatten(0, 1)


def pair_bias(bias: Tensor) -> Tensor:
    """(B, 1, H, Q, K) to (B, H, Q, K), one for the N rows of a batch element."""
    return with_close_keys(bias.squeeze(1))


def with_close_keys(bias: Tensor) -> Tensor:
    """A bias whose keys lie next to each other: the kernels read it N times, and keys that lie apart one by one."""
    return bias if bias.stride(-1) == 1 else bias.contiguous()


def check_mask(mask: Tensor, batch: list[int], n: int, keys: int, device: torch.device) -> None:
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool (True = visible), got {names([mask.dtype])}")
    require_device("mask", mask, device, "q")
    if mask.shape != (*batch, 1, 1, 1, keys):
        require_shape("mask", mask, "(B, {N|1}, 1, 1, K)", (*batch, n, 1, 1, keys))


def require_shape(name: str, tensor: Tensor, layout: str, shape: tuple[int, ...]) -> None:
    """layout: with a batch dimension B, which tensors of four dimensions are given without."""
    if tensor.shape != shape:
        layout = layout if len(shape) == 5 else layout.replace("(B, ", "(")
        raise ValueError(f"{name} must be {layout} = {shape}, got shape {shape_of(tensor)}")


def require_like(first: str, query: Tensor, others: dict[str, Tensor]) -> None:
    """The device and, unless autocast sees to it, the dtype of the queries."""
    device, dtype = query.device, query.dtype
    for name, tensor in others.items():
        require_device(name, tensor, device, first)
        if tensor.dtype != dtype and not autocast_is_on(device):
            raise TypeError(f"{name} must have {first}'s dtype {names([dtype])}, got {names([tensor.dtype])}")
