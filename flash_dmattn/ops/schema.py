"""The arguments of the attention operators, as csrc/torch/arguments.h lists them."""

from __future__ import annotations

from collections import namedtuple
from typing import NamedTuple, Optional

from torch import Tensor


class MaskTensors(NamedTuple):
    """The mask arguments of the operators.

    At most one of `mask` and `intervals` is given. With lists the kernels gather the listed keys; `intervals`, else
    `kv_row_bits`, shows which rows of a list see a key, else every row does. A packed mask may come with its lists
    (`pack_and_list_mask`): then the device uses the lists where these are short.
    """

    # bool ({B|B/n|1}, {H|Hkv|1}, {Sq|1}, {Sk|1}), (total_k, heads) or (total_q, heads, max_seqlen_k); on CUDA what
    # pack_mask made of it
    mask: Optional[Tensor] = None
    mask_summaries: Optional[Tensor] = None  # on CUDA, from pack_mask
    intervals: Optional[Tensor] = None  # int32 (2, {B|1}, {H|Hkv|1}, Sk), starts and ends, or (2, total_k, heads)
    kv_indices: Optional[Tensor] = None  # int32 (capacity), list after list, padded with -1
    kv_indptr: Optional[Tensor] = None  # int64 (2, {B|B/n|1}, {H|Hkv|1}, m_blocks): where each list begins and ends
    # int32 (capacity, 4), a bit for each of the 128 rows of a list. (0, 4) or (0, 2) where each of the 128 or 64 rows
    # of a list sees all its keys
    kv_row_bits: Optional[Tensor] = None


NO_MASK = MaskTensors()

# The arguments of attention_forward. cu_seqlens int32 (B + 1): all four of the sequences, or none. seqused_k int32 (B):
# cache_seqlens of the public functions. relative_bias: float32, or float64 with a float64 query; with a fourth
# dimension of a grid.
TENSORS = ("query", "key", "value", "bias", "relative_bias", *MaskTensors._fields)
SEQUENCES = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_k")
OPTIONS = {"softmax_scale": 1.0, "softcap": 0.0, "is_causal": False, "deterministic": False}
DEFAULTS = (*(None for _ in (*TENSORS[3:], *SEQUENCES)), *OPTIONS.values())  # query, key and value are required
Arguments = namedtuple("Arguments", (*TENSORS, *SEQUENCES, *OPTIONS), defaults=DEFAULTS)

# The arguments of attention_with_kvcache and compose_attention_with_kvcache, as csrc/torch/kvcache.h lists them.
KvCacheArguments = namedtuple(
    "KvCacheArguments",
    "query k_cache v_cache key value bias_cache bias cache_seqlens cache_batch_idx block_table cu_seqlens_q "
    "max_seqlen_q window_size softmax_scale is_causal softcap relative_bias sinks batch_invariant",
)

# The arguments of attention_backward.
NEEDS = ("needs_dbias", "needs_drelative_bias")
BackwardArguments = namedtuple("BackwardArguments", ("dout", "dlse", "out", "lse", *NEEDS, *Arguments._fields))
