"""The least time that attention can take on an NVIDIA H200."""

from __future__ import annotations

import torch
from problem import Inputs
from rows import BACKWARD, BOTH, FORWARD
from torch import Tensor

from flash_dmattn import KeyIntervalMask
from flash_dmattn.backends import reference

# Measured on an H200: 16-bit matrix products per second, and bytes copied per second.
PEAK_FLOPS = 790e12
PEAK_BYTES = 4.3e12


def limit_of(direction: str, inputs: Inputs, mask_is_given: bool = True) -> float | None:
    """`least_seconds` on CUDA in 16 bits, where it holds; else None."""
    query = inputs.query
    return least_seconds(direction, inputs, mask_is_given) if query.is_cuda and query.element_size() == 2 else None


def least_seconds(direction: str, inputs: Inputs, mask_is_given: bool = True) -> float:
    """No implementation takes less on an H200: it multiplies every visible score and moves every tensor once."""
    if direction == BOTH:
        return sum(least_seconds(one, inputs, mask_is_given) for one in (FORWARD, BACKWARD))
    problem = inputs.problem
    mask = size(inputs.mask) if mask_is_given else 0
    rows_of_key = rows_that_see(inputs)
    seen = (rows_of_key > 0).unflatten(1, (problem.kv_heads, -1)).any(dim=2)
    rows, keys = size(inputs.query), size(inputs.key) + size(inputs.value)
    lse = 4 * problem.batch * problem.heads * problem.seqlen_q
    keys_seen = keys * seen.sum().item() / seen.numel()
    if direction == FORWARD:
        products = 2  # scores, out
        moved = 2 * rows + keys_seen + mask + size(inputs.bias) + lse
    else:
        products = 5  # scores, dp, dq, dk, dv
        moved = 4 * rows + keys_seen + keys + mask + 2 * size(inputs.bias) + lse
    flops = products * 2 * problem.head_dim * rows_of_key.sum().item()
    return max(flops / PEAK_FLOPS, moved / PEAK_BYTES)


def rows_that_see(inputs: Inputs) -> Tensor:
    """The number of rows that see each key, (B, H, Sk)."""
    problem, mask = inputs.problem, inputs.mask
    if isinstance(mask, KeyIntervalMask):  # that of `window`, which masks biases of -inf too
        start, end = (rows.clamp(0, problem.seqlen_q) for rows in (mask.start, mask.end))
    elif mask is None and inputs.bias is None:
        start = torch.zeros(1, 1, problem.seqlen_k, dtype=torch.int32, device=inputs.query.device)
        end = start + problem.seqlen_q
    else:
        return reference.visible_scores(inputs.query, inputs.key, mask, inputs.bias, problem.is_causal).sum(dim=2)
    if problem.is_causal:
        own = torch.arange(problem.seqlen_k, device=start.device) - (problem.seqlen_k - problem.seqlen_q)
        start = torch.maximum(start, own)
    rows = (end - start).clamp(min=0)
    return rows.repeat_interleave(problem.heads // rows.shape[1], dim=1).expand(problem.batch, -1, -1)


def size(tensor: Tensor | KeyIntervalMask | None) -> int:
    """Bytes in memory: what is expanded counts once."""
    if isinstance(tensor, KeyIntervalMask):
        return size(tensor.start) + size(tensor.end)
    return 0 if tensor is None else tensor.untyped_storage().nbytes()
