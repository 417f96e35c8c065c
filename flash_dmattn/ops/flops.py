"""Floating-point operations of the attention operators, for torch.utils.flop_counter.FlopCounterMode.

A score counts where the mask, causality and the lengths show its key; keys that a bias masks count. Reading the values
of a mask waits for its device. Meta and fake tensors have no values: all scores that causality shows count.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ..broadcast import scores_of_sequence
from ..loading import NAMESPACE
from .conventions import padded_head_dim
from .list_sizes import LIST_ROWS, count_causal_scores
from .schema import SEQUENCES, Arguments, BackwardArguments, KvCacheArguments, MaskTensors

FORWARD_GEMMS = 2  # scores, out
BACKWARD_GEMMS = 5  # scores, dprobs, dvalue, dquery, dkey


class Sequence(NamedTuple):
    """One batch element, or one sequence of variable length."""

    number: int
    rows: slice
    keys: slice
    is_causal: bool

    @property
    def lengths(self) -> tuple[int, int]:
        return self.rows.stop - self.rows.start, self.keys.stop - self.keys.start

    def first_rows(self, keys: Tensor) -> Tensor:
        """The first row that causality shows each key."""
        seqlen_q, seqlen_k = self.lengths
        return (keys - (seqlen_k - seqlen_q)).clamp_(min=0) if self.is_causal else torch.zeros_like(keys)


def forward(*args, out_val=None, **kwargs) -> int:
    return FORWARD_GEMMS * gemm_flops(Arguments(*args, **kwargs))


def backward(*args, out_val=None, **kwargs) -> int:
    given = BackwardArguments(*args, **kwargs)
    return BACKWARD_GEMMS * gemm_flops(Arguments(*given[-len(Arguments._fields) :]))


def gemm_flops(given: Arguments) -> int:
    """Flops of one GEMM: a multiplication and an addition per visible score and element of the head dimension."""
    return 2 * given.query.shape[-1] * visible_scores(given)


def with_kvcache(*args, out_val=None, **kwargs) -> int:
    """The FLOPs of attention_with_kvcache: each row sees the keys up to its own, or window_size of them."""
    given = KvCacheArguments(*args, **kwargs)
    heads, head_dim = given.query.shape[-2], padded_head_dim(given.query.shape[-1], given.v_cache.shape[-1])
    packed = given.cu_seqlens_q is not None
    seqlen_q = given.max_seqlen_q if packed else given.query.shape[1]
    if has_values(given.cache_seqlens):
        rows = given.cu_seqlens_q.diff().tolist() if packed else [seqlen_q] * given.query.shape[0]
        before = given.cache_seqlens.tolist()
    else:
        capacity = given.k_cache.shape[1] * (1 if given.block_table is None else given.block_table.shape[1])
        rows = [seqlen_q] * given.cache_seqlens.shape[0]
        before = [capacity if given.key is None else capacity - seqlen_q] * len(rows)
    scores = 0
    for own, keys in zip(rows, before):
        keys += own if given.key is not None else 0
        if given.window_size is None:
            scores += count_causal_scores(own, keys, given.is_causal)
        else:
            scores += sum(min(max(seen, 0), given.window_size) for seen in range(keys - own + 1, keys + 1))
    return FORWARD_GEMMS * 2 * head_dim * heads * scores


def visible_scores(given: Arguments) -> int:
    """The visible scores of all batch elements and query heads."""
    heads = given.query.shape[-2]
    if not all(map(has_values, (getattr(given, name) for name in (*MaskTensors._fields, *SEQUENCES)))):
        if given.cu_seqlens_q is None:
            batches, seqlen_q, seqlen_k = given.query.shape[0], given.query.shape[1], given.key.shape[1]
        else:
            batches, seqlen_q, seqlen_k = given.cu_seqlens_q.shape[0] - 1, given.max_seqlen_q, given.max_seqlen_k
        return batches * heads * count_causal_scores(seqlen_q, seqlen_k, given.is_causal)
    return sum(visible_scores_of(given, sequence, heads) for sequence in sequences_of(given))


def has_values(argument: object) -> bool:
    return not isinstance(argument, Tensor) or (type(argument) is Tensor and argument.device.type != "meta")


def sequences_of(given: Arguments) -> Iterator[Sequence]:
    if given.cu_seqlens_q is not None:
        offsets = zip(given.cu_seqlens_q.tolist(), given.cu_seqlens_k.tolist())
        first_row, first_key = next(offsets)
        for number, (row, key) in enumerate(offsets):
            yield Sequence(number, slice(first_row, row), slice(first_key, key), given.is_causal)
            first_row, first_key = row, key
        return
    batch, seqlen_q, *_ = given.query.shape
    seqused_k = [given.key.shape[1]] * batch if given.seqused_k is None else given.seqused_k.tolist()
    for number, keys in enumerate(seqused_k):
        yield Sequence(number, slice(0, seqlen_q), slice(0, keys), given.is_causal)


def visible_scores_of(given: Arguments, sequence: Sequence, heads: int) -> int:
    """The visible scores of one sequence."""
    if given.mask is not None:
        seen = mask_of(given, sequence)
        return heads // seen.shape[0] * count_in_mask(seen, sequence)
    if given.kv_indices is not None:
        return heads // given.kv_indptr.shape[2] * count_in_lists(given, sequence)
    if given.intervals is not None:
        intervals = intervals_of(given, sequence)
        keys = torch.arange(intervals.shape[-1], device=intervals.device)
        return heads // intervals.shape[1] * count_rows(sequence.first_rows(keys), intervals, sequence.lengths[0])
    return heads * count_causal_scores(*sequence.lengths, sequence.is_causal)


def part(tensor: Tensor, batch: int, number: int, dim: int = 0) -> Tensor:
    """A batch element of a tensor whose entries several of them may share."""
    return tensor.select(dim, number * tensor.shape[dim] // batch)


def batch_of(given: Arguments) -> int:
    return given.query.shape[0] if given.cu_seqlens_q is None else given.cu_seqlens_q.shape[0] - 1


def mask_of(given: Arguments, sequence: Sequence) -> Tensor:
    """bool ({H|Hkv|1}, {rows|1}, {keys|1})"""
    mask = given.mask
    is_packed = mask.dtype != torch.bool
    if mask.ndim == 4:  # of variable length, too, if it is packed
        mask = part(mask, batch_of(given), sequence.number)
    if is_packed:
        bits = torch.arange(8, dtype=torch.uint8, device=mask.device)
        mask = (mask.view(torch.uint8)[..., None] >> bits & 1).bool().flatten(-2)
    if given.mask.ndim < 4:
        return scores_of_sequence(mask, sequence.rows, sequence.keys)[0]
    return mask[..., : sequence.lengths[1]]


def intervals_of(given: Arguments, sequence: Sequence) -> Tensor:
    """int32 (2, {H|Hkv|1}, keys)"""
    intervals = given.intervals
    if intervals.ndim == 3:
        return intervals[:, sequence.keys].transpose(1, 2)
    return part(intervals, batch_of(given), sequence.number, dim=1)[..., sequence.keys]


def count_rows(first: Tensor, intervals: Tensor, seqlen_q: int) -> int:
    """Rows from `first` on that intervals (2, ..) show, summed over all keys."""
    start, end = intervals
    return int((end.clamp(max=seqlen_q) - torch.maximum(start, first)).clamp_(min=0).sum())


def count_in_mask(seen: Tensor, sequence: Sequence) -> int:
    seqlen_q, seqlen_k = sequence.lengths
    heads, rows, keys = seen.shape
    if rows == 1:
        first = sequence.first_rows(torch.arange(seqlen_k, device=seen.device))
        return int(((seqlen_q - first).clamp_(min=0) * seen[:, 0]).sum())
    if sequence.is_causal:
        return int(seen.expand(heads, seqlen_q, seqlen_k).tril(seqlen_k - seqlen_q).sum())
    return int(seen.sum()) * (seqlen_k if keys == 1 else 1)


def count_in_lists(given: Arguments, sequence: Sequence) -> int:
    seqlen_q, seqlen_k = sequence.lengths
    spans = part(given.kv_indptr, batch_of(given), sequence.number, dim=1)
    heads, m_blocks = spans.shape[1:]
    begin, end = spans.flatten(1)
    lengths = end - begin
    owner = torch.repeat_interleave(lengths)  # the number of each listed key's list
    at = begin[owner] + torch.arange(len(owner), device=owner.device) - (lengths.cumsum(0) - lengths)[owner]
    keys = given.kv_indices[at]
    is_key = (keys >= 0) & (keys < seqlen_k)
    owner, at, keys = owner[is_key], at[is_key], keys[is_key]

    bits = given.kv_row_bits
    rows = LIST_ROWS if bits is None else 32 * bits.shape[1]
    first_of_list = owner % m_blocks * rows
    last_of_list = (first_of_list + rows).clamp_(max=seqlen_q) if m_blocks > 1 else torch.full_like(keys, seqlen_q)
    first = torch.maximum(sequence.first_rows(keys), first_of_list)
    if given.intervals is not None:
        intervals = intervals_of(given, sequence)
        start, end = intervals[:, owner // m_blocks * intervals.shape[1] // heads, keys.long()]
        first, last_of_list = torch.maximum(first, start), torch.minimum(last_of_list, end)
    if bits is None or bits.shape[0] == 0:
        return int((last_of_list - first).clamp_(min=0).sum())
    first, last, words = first - first_of_list, last_of_list - first_of_list, bits[at]
    visible = 0
    for row in range(rows):
        sees = (words[:, row // 32] >> (row % 32) & 1).bool()
        visible += int((sees & (first <= row) & (row < last)).sum())
    return visible


# Registration


FLOP_COUNTER = "torch.utils.flop_counter"


def register() -> None:
    """Registers the formulas once torch.utils.flop_counter is imported. Importing it here would import Triton, too."""
    if FLOP_COUNTER in sys.modules:
        register_formulas(sys.modules[FLOP_COUNTER])
    else:
        sys.meta_path.insert(0, AfterImport())


def register_formulas(flop_counter: ModuleType) -> None:
    operators = getattr(torch.ops, NAMESPACE)
    flop_counter.register_flop_formula(operators.attention_forward, get_raw=True)(forward)
    flop_counter.register_flop_formula(operators.attention_backward, get_raw=True)(backward)
    flop_counter.register_flop_formula(operators.attention_with_kvcache, get_raw=True)(with_kvcache)


class AfterImport(importlib.abc.MetaPathFinder):
    """Lets the other finders import torch.utils.flop_counter, then registers the formulas."""

    def find_spec(self, name, path, target=None):
        if name != FLOP_COUNTER:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, others), None)
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # Not before: a caller of find_spec may not import the module.
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            execute(module)
            register_formulas(module)

        spec.loader.exec_module = exec_module
        return spec
