"""FlexAttention (torch.nn.attention.flex_attention), for comparison.

Compiled on CUDA. On the CPU, where PyTorch has no compiled backward for it, it runs operation by operation. It builds
its block masks from N x N indices. Its gradients of biases use atomics, so they are not deterministic.
"""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

from ..biases import is_masked
from ..masks import KeyIntervalMask

NAME = "flex"
SPARSE_MASKS = False


def why_unavailable() -> str | None:
    try:
        from torch.nn.attention.flex_attention import AuxRequest  # noqa: F401
    except ImportError as error:
        return f"this PyTorch has no FlexAttention with auxiliary outputs ({error})"
    return None


def refuse_unsupported(arguments: tuple[Tensor | None, ...], deterministic: bool) -> None:
    """arguments: query, key, value and the biases."""
    query, key, *_ = tensors = [x for x in arguments if x is not None]
    if query.device.type == "cpu" and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise RuntimeError("the backend 'flex' has no gradients on the CPU; use it under torch.no_grad() or on CUDA")
    if deterministic:
        raise ValueError("the backend 'flex' has no deterministic gradient of the bias; pass deterministic=False")
    if query.dtype == torch.float64 and query.device.type == "cuda":
        raise TypeError("the backend 'flex' takes float16, bfloat16 and float32 on CUDA, got float64")
    for name, tensor in (("query", query), ("key", key)):
        if tensor.numel() == 0:
            raise ValueError(f"the backend 'flex' takes no empty tensors, got {name} of shape {tuple(tensor.shape)}")


def entry(scores: Tensor, batch: int, heads: int):
    """The function (b, h, i, j) -> scores[b, h, i, j], for broadcast and shared dimensions too."""
    batch_group, group = batch // scores.shape[0], heads // scores.shape[1]
    rows, cols = scores.shape[2], scores.shape[3]

    def at(b, h, i, j):
        zero = torch.zeros_like(b)
        element = zero if batch_group == batch else b if batch_group == 1 else b // batch_group
        head = h // group if group < heads else zero
        return scores[element, head, i if rows > 1 else zero, j if cols > 1 else zero]

    return at


@functools.cache
def functions(compiled: bool):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not compiled:
        return flex_attention, create_block_mask
    # In PyTorch 2.11 a Triton kernel sorts the blocks of a row; from 128 blocks on it compiles slowly (issue 182060).
    options = {"triton.persistent_reductions": False}
    return torch.compile(flex_attention), torch.compile(create_block_mask, options=options)


def relative_entry(relative_bias: Tensor, query: Tensor, key: Tensor):
    """The function (b, h, i, j) -> the entry of a relative bias that the score reads."""
    table_at = entry(relative_bias if relative_bias.ndim == 4 else relative_bias[:, :, None], *query.shape[::2][:2])
    if relative_bias.ndim == 4:
        height, width = ((size + 1) // 2 for size in relative_bias.shape[2:])
        return lambda b, h, i, j: table_at(
            b, h, i // width - j // width + height - 1, i % width - j % width + width - 1
        )
    radius, shift = relative_bias.shape[2] // 2, key.shape[1] - query.shape[1]
    return lambda b, h, i, j: table_at(b, h, i, (j - i - shift).clamp(-radius, radius) + radius)


def score_mod_of(bias: Tensor | None, relative_bias: Tensor | None, softcap: float, query: Tensor, key: Tensor):
    batch, _, heads, _ = query.shape
    added = [] if bias is None else [entry(bias, batch, heads)]
    if relative_bias is not None:
        added.append(relative_entry(relative_bias, query, key))

    def score_mod(score, b, h, i, j):
        if softcap > 0:
            score = softcap * torch.tanh(score / softcap)
        for bias_at in added:
            bias_ij = bias_at(b, h, i, j)
            score = torch.where(is_masked(bias_ij), -torch.inf, score + bias_ij)
        return score

    return score_mod if added or softcap > 0 else None


def visibility(mask: Tensor | KeyIntervalMask, batch: int, heads: int):
    """The function (b, h, i, j) -> bool: row i sees key j."""
    if not isinstance(mask, KeyIntervalMask):
        return entry(mask, batch, heads)
    start_at, end_at = (entry(bounds[:, :, None], batch, heads) for bounds in (mask.start, mask.end))
    return lambda b, h, i, j: (start_at(b, h, i, j) <= i) & (i < end_at(b, h, i, j))


def block_mask_of(query: Tensor, key: Tensor, mask: Tensor | KeyIntervalMask | None, is_causal: bool):
    """The BlockMask of a mask and causality; None where every score is visible."""
    if mask is None and not is_causal:
        return None
    (batch, seqlen_q, heads, _), seqlen_k = query.shape, key.shape[1]
    mask_at = None if mask is None else visibility(mask, batch, heads)

    def mask_mod(b, h, i, j):
        visible = j <= i + (seqlen_k - seqlen_q) if is_causal else None
        if mask_at is None:
            return visible
        return mask_at(b, h, i, j) if visible is None else mask_at(b, h, i, j) & visible

    per_batch = batch if mask is not None and mask.shape[0] > 1 else None
    per_head = heads if mask is not None and mask.shape[1] > 1 else None
    _, create_block_mask = functions(query.device.type == "cuda")
    return create_block_mask(mask_mod, per_batch, per_head, seqlen_q, seqlen_k, device=query.device)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    *,
    relative_bias: Tensor | None = None,
    block_mask=None,
    **options,
) -> tuple[Tensor, Tensor]:
    """out (B, Sq, H, D) and lse (B, H, Sq). `block_mask` replaces the one of `mask` and `is_causal`."""
    from torch.nn.attention.flex_attention import AuxRequest

    refuse_unsupported((query, key, value, bias, relative_bias), options["deterministic"])
    heads, kv_heads = query.shape[2], key.shape[2]
    flex_attention, _ = functions(query.device.type == "cuda")
    with warnings.catch_warnings():
        # The uncompiled form, used on the CPU on purpose, warns that it materializes the scores.
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        out, aux = flex_attention(
            *(x.transpose(1, 2) for x in (query, key, value)),
            score_mod=score_mod_of(bias, relative_bias, options["softcap"], query, key),
            block_mask=block_mask_of(query, key, mask, options["is_causal"]) if block_mask is None else block_mask,
            scale=options["softmax_scale"],
            enable_gqa=heads != kv_heads,
            return_aux=AuxRequest(lse=True),
        )
    return out.transpose(1, 2), aux.lse
