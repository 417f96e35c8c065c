"""Tiles or lists: how the compiled kernels read a mask under `sparse`, and the measurements behind the choice.

"tiles" visits tiles of keys and skips those that are fully masked; "lists" gathers the keys of `KeyLists`.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from .. import ops
from ..arguments import is_host_readable, statically_true
from ..ops.list_sizes import LIST_ROWS, is_per_key, longest_list, num_m_blocks, walked_keys
from ..ops.schema import MaskTensors
from .base import Mask, PackedMask, Problem
from .lists import KeyLists, build_lists

Sparse = Literal["auto", "tiles", "lists"]
SPARSE = get_args(Sparse)

# Lists serve where they hold less than this share of the keys that tiles visit. Measured on the CPU (AVX2, float32, S
# from 2048 to 8192, D = 64, causal top-k and random masks; forward + backward, lists relative to tiles): 0.28 to 0.36
# of the time at a share of 0.27 to 0.33, 0.5 at 0.5, 0.75 to 0.9 at 0.8, 0.95 to 1.1 at 1 and above. Building them
# takes 1 % of the time, for a bool mask with a head per query head 3 %; `looks_dense` avoids most builds of
# lists that are not used.
CPU_CROSSOVER = 0.9
# With fewer keys lists gain nothing.
CPU_MIN_KEYS = 512
# Measured on an H200 (bf16, S from 64 to 32768, w from S / 8 to 3 S / 4; H32/8, H32/32 D128, H16/16, H8/2 D64; causal
# top-k selected in the call, as CUDA graphs), speed of lists relative to tiles: the forward is 0.7 to 1.0 with fewer
# keys than this, 1.0 to 1.2 with 256, 1.0 to 1.5 with 512, 1.1 to 3.2 and more from 1024 on; forward and backward are
# 1.0 to 5.3 from 64 keys on, for every window. For sliding windows, whose tiles are empty or full, lists are up to a
# third slower: on CUDA lists serve unstructured masks only.
CUDA_MIN_KEYS = 256
# For a bool mask on CUDA the device uses lists where they hold at most half of all keys and at most this percentage of
# the keys in tiles that are not empty, by head dimension. Measured on an H200 (bf16, S8192, causal top-k and random
# masks), forward and backward, with building the lists: equal to tiles at 67 % (D32), 80 % (D64), 73 to 90 % (D128),
# 88 % (D256; 50 to 60 % where query heads do not share lists and biases: these use the sm80 kernels); the forward alone
# above 90 %.
CUDA_PERCENT = {32: 60, 64: 75, 128: 80, 256: 70}
CUDA_PERCENT_PER_HEAD = {**CUDA_PERCENT, 256: 45}
CUDA_PERCENT_FORWARD = 90
# Device-side dispatch costs 0.02 ms in a forward and in a backward, a small part of attention over so many rows and
# keys.
CUDA_MIN_LENGTHS = (256, 2048)
# The fast path (csrc/torch/fast_path.cpp) serves calls below these: they use no lists but those of unstructured
# intervals.
LIMITS = (CPU_MIN_KEYS, CUDA_MIN_KEYS, *CUDA_MIN_LENGTHS)


def choose(mask: Mask, sparse: Sparse, needs_grad: bool, problem: Problem) -> Mask:
    """The mask, or its lists, as the compiled kernels shall read it.

    | condition, with sparse="auto"                        | form                                                      |
    | ---------------------------------------------------- | --------------------------------------------------------- |
    | KeyLists                                             | lists                                                     |
    | CPU, values readable                                 | lists where they are short, counted by building them      |
    | CPU, traced                                          | lists where keys_per_row shows that they are short        |
    | CUDA, unstructured KeyIntervalMask with keys_per_row | lists; tiles for an inference call with few keys          |
    | CUDA, large bool mask                                | tiles; then see `dispatch_on_device`                      |
    | else                                                 | tiles                                                     |
    """
    if sparse == "tiles":
        return mask.without_lists()
    if mask.has_lists:
        return mask
    if sparse == "lists":
        return build_lists(mask, problem)
    if mask.device.type != "cpu":
        few_keys = statically_true(problem.seqlen_k < CUDA_MIN_KEYS)
        should_use_lists = mask.unstructured and mask.keys_per_row is not None and (needs_grad or not few_keys)
        return build_lists(mask, problem) if should_use_lists else mask
    if statically_true(problem.seqlen_k < CPU_MIN_KEYS):
        return mask
    operands = mask.operands()
    if is_host_readable(operands.intervals if operands.mask is None else operands.mask):
        return lists_if_short(mask, problem)
    return build_lists(mask, problem) if estimate_short(mask, problem) else mask


def can_dispatch_on_device(mask: Mask, bias: Tensor | None, problem: Problem) -> bool:
    """Whether `dispatch_on_device` serves: a large bool mask on CUDA with a row per query row, without a dense bias."""
    tensor = None if mask.has_lists else mask.operands().mask
    # The lists of a DTensor's shards would need query's placements.
    if type(tensor) is not Tensor or tensor.device.type != "cuda" or tensor.ndim != 4:
        return False
    seqlen_q, seqlen_k, *_ = problem
    min_rows, min_keys = CUDA_MIN_LENGTHS
    whole = statically_true(tensor.shape[2] == seqlen_q) and statically_true(tensor.shape[3] == seqlen_k)
    large = statically_true(seqlen_q >= min_rows) and statically_true(seqlen_k >= min_keys)
    some = statically_true(tensor.shape[0] > 0) and statically_true(tensor.shape[1] > 0)
    return whole and large and some and (bias is None or statically_true(bias.shape[2] == 1))


def why_tiles(mask: Mask, deterministic: bool, problem: Problem) -> str | None:
    """For the log: why sparse="auto" reads a mask on CUDA by tiles that may show few keys, and what to change."""
    if mask.has_lists or mask.device.type == "cpu":
        return None
    if mask.operands().mask is None:
        if mask.unstructured and mask.keys_per_row is None:
            return "the mask's keys_per_row is not known without reading it: pass keys_per_row to KeyIntervalMask"
        return None
    if not can_dispatch_on_device(mask, None, problem):
        return None
    cause = "deterministic=True" if deterministic else "a dense bias"
    return f"with {cause} the device does not count the keys of a bool mask: pass sparse='lists' if rows see few keys"


def dispatch_on_device(
    mask: Mask, query: Tensor, key: Tensor, bias: Tensor | None, needs_grad: bool, is_causal: bool
) -> PackedMask:
    """A bool mask as tiles and, where these are short, as lists. The kernels for both are launched, and those that the
    device does not select return at once."""
    tensor = mask.operands().mask
    heads_share = all(scores is None or scores.shape[1] <= key.shape[2] for scores in (tensor, bias))
    percent = CUDA_PERCENT_FORWARD
    if needs_grad:
        by_head_dim = CUDA_PERCENT if heads_share else CUDA_PERCENT_PER_HEAD
        percent = next((part for head_dim, part in by_head_dim.items() if query.shape[-1] <= head_dim), 0)
    bits, summaries, *lists = ops.pack_and_list_mask(tensor, tensor.shape[2], tensor.shape[3], is_causal, percent)
    return PackedMask(MaskTensors(bits, summaries, None, *lists))


def estimate_short(mask: Mask, problem: Problem) -> bool:
    """Whether keys_per_row shows that the lists are short; for an unstructured mask, whether it does not show that they
    are long."""
    if mask.keys_per_row is None:
        return False
    rows, keys, is_causal, *_ = problem
    listed = longest_list(mask.keys_per_row, rows, keys) * num_m_blocks(rows)
    walked = CPU_CROSSOVER * walked_keys(rows, keys, is_causal)
    return not statically_true(listed >= walked) if mask.unstructured else statically_true(listed < walked)


def looks_dense(mask: Mask, problem: Problem) -> bool:
    """Whether the rows in the middle of a bool mask see so many keys that counting all would be a waste."""
    tensor = mask.operands().mask
    if tensor is None or tensor.ndim != 4 or tensor.shape[2] <= LIST_ROWS:
        return False
    seqlen_q, seqlen_k, is_causal, *_ = problem
    first = (seqlen_q - LIST_ROWS) // 2
    keys = min(max(first + LIST_ROWS + seqlen_k - seqlen_q, 1), seqlen_k) if is_causal else seqlen_k
    sample = tensor[:, :, first : first + LIST_ROWS, :keys]
    seen = sample.view(torch.uint8).amax(dim=2)  # any(dim=2) takes twenty times as long
    return seen.numel() > 0 and bool((seen != 0).float().mean() > CPU_CROSSOVER)


def lists_if_short(mask: Mask, problem: Problem) -> Mask | KeyLists:
    """The lists of a mask on the CPU, or the mask where they are too long."""
    if looks_dense(mask, problem):
        return mask
    seqlen_q, seqlen_k, is_causal, cu_seqlens_q, cu_seqlens_k = problem
    one_list = mask.operands().mask is not None and is_per_key(mask.shape)
    if cu_seqlens_q is None:
        lengths = [(seqlen_q, seqlen_k)] * mask.shape[0]
    else:
        lengths = list(zip(cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()))
    walked = sum(keys if one_list else walked_keys(rows, keys, is_causal) for rows, keys in lengths)
    lists = build_lists(mask, problem, limit=int(CPU_CROSSOVER * mask.shape[1] * walked))
    return lists if lists.kv_indices.shape[0] else mask
