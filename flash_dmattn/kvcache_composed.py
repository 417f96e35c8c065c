"""Attention over a cache of keys, composed of other operators: the operator compose_attention_with_kvcache.

It serves the CPU, and the calls of attention_with_kvcache (csrc/torch/kvcache.h) that no CUDA kernels serve. It writes
the new tokens into the cache, gathers the keys that the rows may see, and calls attention over those.

With window_size few keys are gathered. A key before the new rows that is not among the w largest biases of these keys
is not among the w largest of any row. So a sequence needs the w best keys before its new rows, and the new rows' keys.
On CUDA chunks with window_size attend to the selected keys in place. For most other calls kernels write and gather the
keys; csrc/torch/kvcache.cpp then calls attention_forward, or for calls with sinks or few rows the operator
attend_to_gathered_keys.
On CUDA the host does not synchronize: the device reads lengths, pages and offsets, and clamps them to valid values.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import fallbacks, ops
from .arguments import is_host_readable
from .attend import attend, kernels_for
from .call import Call, Varlen
from .masks.choice import LIMITS
from .masks.topk import refuse_nan, sequence_of_keys, topk_keys
from .ops.conventions import accumulation_dtype
from .ops.list_sizes import LIST_ROWS, MAX_TOPK_LIST_ROWS
from .ops.schema import KvCacheArguments

CHECKS_DEVICES = os.environ.get("FLASH_DMATTN_CHECK") == "1"  # as in csrc/torch/checks.cpp
# With batch_invariant on CUDA sequences are packed, and max_seqlen_q and max_seqlen_k do not decide which kernel serves
# them, as in csrc/torch/kvcache.cpp. max_seqlen_q is rounded up to whole m_blocks, with window_size to the LIST_ROWS of
# key lists. That is more than the kernels for few rows serve, whose split-KV depends on the batch. max_seqlen_k is
# above every threshold between kernels, and without window_size above the keys of all sequences: the sm90 forward then
# does not choose its tile by their number. The blocks of the other kernels start at a sequence's first row, so that its
# bits depend on the sequence alone.
INVARIANT_ROWS = 384
INVARIANT_MIN_KEYS = 4096

# On the CPU sequences of at most so many keys are gathered together, each padded to the longest.
MAX_KEYS_TOGETHER = 1024


def read(lengths: Tensor) -> list[int] | None:
    """The values, where reading them is free, or asked for by FLASH_DMATTN_CHECK=1."""
    return lengths.tolist() if CHECKS_DEVICES or is_host_readable(lengths) else None


class Keys(NamedTuple):
    """The keys of a call of attention, (B, max_keys, ..), or packed without gaps."""

    tensors: list[Tensor]  # keys, values and, where there is a bias_cache, biases
    counts: Tensor  # int64 (B): the keys of each sequence, which come first
    max_keys: int  # of a sequence


class Slots:
    """Where the keys of the sequences are in the cache."""

    def __init__(self, given: KvCacheArguments):
        self.table, self.elements = given.block_table, given.cache_batch_idx
        self.batches, self.width = given.k_cache.shape[:2]  # pages of the cache and their size, or batch elements
        self.capacity = self.width if self.table is None else self.table.shape[1] * self.width

    def are_whole(self, given: KvCacheArguments) -> bool:
        """Whether `whole` is a view and serves the call: its sequences are those of a contiguous cache."""
        return self.table is None and self.elements is None and given.cu_seqlens_q is None

    def find(self, sequence: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(page or batch element, key in it, whether it exists), each int64 and inside the cache.

        sequence, position: int64, broadcast to each other; any values.
        """
        exists = (position >= 0) & (position < self.capacity)
        position = position.clamp(0, self.capacity - 1)
        if self.table is None:
            element = sequence if self.elements is None else self.elements[sequence].long()
        else:
            element, position = self.table[sequence, position // self.width].long(), position % self.width
        exists = exists & (element >= 0) & (element < self.batches)
        return element.clamp(0, self.batches - 1), position, exists

    def whole(self, cache: Tensor, keys: int) -> Tensor:
        """The first `keys` keys of each sequence, (B, keys, ..): a view of a contiguous cache, else gathered."""
        if self.table is None:
            cache = cache[:, :keys]
            return cache if self.elements is None else cache[self.elements.long().clamp(0, self.batches - 1)]
        pages = self.table[:, : -(-keys // self.width)].long().clamp(0, self.batches - 1)
        return cache[pages].flatten(1, 2)[:, :keys]

    def whole_biases(self, cache: Tensor, keys: int) -> Tensor:
        """`whole` of bias_cache, -inf where a key has no page: a bias to select by may not be NaN."""
        biases = self.whole(cache, keys)
        if self.table is None:
            return biases
        pages = self.table[:, : -(-keys // self.width)]
        exists = ((pages >= 0) & (pages < self.batches)).repeat_interleave(self.width, dim=1)[:, :keys]
        return biases.masked_fill(~exists[..., None], -torch.inf)


class Sequences:
    """The new rows and the keys of each sequence, when the new tokens are in the cache."""

    def __init__(self, given: KvCacheArguments, capacity: int):
        self.batch, device = given.cache_seqlens.shape[0], given.query.device
        self.cu_seqlens = given.cu_seqlens_q
        self.before = before = given.cache_seqlens.long().clamp(0, capacity)
        if self.cu_seqlens is None:
            self.max_rows = given.query.shape[1]
            self.rows = torch.full((self.batch,), self.max_rows, device=device)
        else:
            self.max_rows = given.max_seqlen_q
            self.rows = self.cu_seqlens.diff().long()
        self.keys = before if given.key is None else (before + self.rows).clamp_(max=capacity)
        # The length of the longest sequence; where only the device knows the lengths, a bound on it.
        values = read(self.keys)
        self.longest = capacity if values is None else max(values, default=0)

    def of_rows(self, rows: int) -> tuple[Tensor, Tensor]:
        """int64 (rows): the sequence of each packed row, and the row's number in it."""
        device = self.rows.device
        if self.cu_seqlens is None:
            sequence = torch.arange(self.batch, device=device).repeat_interleave(self.max_rows, output_size=rows)
            return sequence, torch.arange(self.max_rows, device=device).repeat(self.batch)
        return packed_positions(self.cu_seqlens, rows)


def packed_positions(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """int64 (total): the sequence of each packed position, and the position in it. Positions after the last sequence
    are in none: beyond the capacity of the last."""
    sequence = sequence_of_keys(cu_seqlens, total).clamp_(max=cu_seqlens.shape[0] - 2)
    positions = torch.arange(total, device=cu_seqlens.device)
    return sequence, torch.where(positions < cu_seqlens[-1], positions - cu_seqlens[sequence], 1 << 40)


@torch.no_grad()
def compose_attention_with_kvcache(*args) -> tuple[Tensor, Tensor]:
    """(out, lse) of `flash_dmattn_with_kvcache`, for arguments that attention_with_kvcache has checked."""
    given = KvCacheArguments(*args)
    offsets = None if given.cu_seqlens_q is None else read(given.cu_seqlens_q)
    if offsets is not None and offsets[-1] < given.query.shape[0]:
        return without_padding(given, offsets[-1])
    query, slots = given.query, Slots(given)
    with torch.autocast(query.device.type, enabled=False):
        is_empty = slots.batches == 0 or slots.capacity == 0 or query.numel() == 0
        if not is_empty:
            sequences = Sequences(given, slots.capacity)
            if given.window_size is not None and query.device.type == "cpu":
                refuse_nan_biases(given, slots, sequences)
            append(given, slots, sequences)
        if is_empty or given.window_size == 0:
            return nothing_visible(given)
        if packs_rows(given):
            return attend_packed(given, slots, sequences)
        is_long = sequences.longest > MAX_KEYS_TOGETHER and not slots.are_whole(given)
        separate = query.device.type == "cpu" and (given.batch_invariant or is_long)
        return (one_by_one if separate else attend_to_cache)(given, slots, sequences)


def nothing_visible(given: KvCacheArguments) -> tuple[Tensor, Tensor]:
    query = given.query
    *batch, rows, heads, _ = query.shape
    dtype = accumulation_dtype(query.dtype)
    out = query.new_zeros(*query.shape[:-1], given.v_cache.shape[3])
    return out, query.new_full((*batch, heads, rows), -torch.inf, dtype=dtype)


def without_padding(given: KvCacheArguments, total: int) -> tuple[Tensor, Tensor]:
    """(out, lse) of the first `total` packed rows; those after the last sequence see nothing and write nothing."""
    out, lse = nothing_visible(given)
    rows = {name: getattr(given, name) for name in ("query", "key", "value", "bias")}
    of_sequences = given._replace(**{name: x[:total] for name, x in rows.items() if x is not None})
    out[:total], lse[:, :total] = compose_attention_with_kvcache(*of_sequences)
    return out, lse


def refuse_nan_biases(given: KvCacheArguments, slots: Slots, sequences: Sequences) -> None:
    """Raises where window_size would select by NaN, before anything is written. CUDA kernels check it themselves."""
    known = slots.whole(given.bias_cache, max(sequences.before.tolist(), default=0))
    refuse_nan(known.transpose(1, 2), sequences.before, name="bias_cache")
    if given.bias is not None:
        refuse_nan(given.bias, name="bias")


def append(given: KvCacheArguments, slots: Slots, sequences: Sequences) -> None:
    """Writes the new tokens into the cache, after each sequence's keys. Tokens without a slot there are dropped."""
    if given.key is None:
        return
    total = given.query.shape[:-2].numel()
    sequence, row = sequences.of_rows(total)
    element, key, exists = slots.find(sequence, sequences.before[sequence] + row)
    # A token without a slot repeats the write of one that has a slot. If none has one, all rewrite the old values.
    source = torch.where(exists, torch.arange(total, device=exists.device), exists.to(torch.int8).argmax())
    element, key, any_exists = element[source], key[source], exists.any()
    for cache, new in zip(caches_of(given), (given.key, given.value, given.bias)):
        new = new.reshape(total, *cache.shape[2:])[source]
        cache.index_put_((element, key), torch.where(any_exists, new, cache[element, key]))


def attend_packed(given: KvCacheArguments, slots: Slots, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """batch_invariant on CUDA: all sequences packed, in one call."""
    query, offsets = given.query, given.cu_seqlens_q
    if offsets is None:
        offsets = torch.arange(sequences.batch + 1, dtype=torch.int32, device=query.device) * sequences.max_rows
    rows = query.flatten(0, -3)
    out, lse = attend_to_cache(given._replace(query=rows, cu_seqlens_q=offsets), slots, sequences)
    if query.ndim == 3:
        return out, lse
    return out.unflatten(0, query.shape[:2]), lse.unflatten(1, query.shape[:2]).transpose(0, 1)


def one_by_one(given: KvCacheArguments, _: Slots, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """On the CPU: each sequence in a call of its own."""
    offsets = None if given.cu_seqlens_q is None else given.cu_seqlens_q.tolist()
    parts = []
    for b in range(sequences.batch):
        query = given.query[b : b + 1] if offsets is None else given.query[None, offsets[b] : offsets[b + 1]]
        parts.append(attend_alone(given, sequences, b, query))
    outs, lses = zip(*parts)
    if offsets is None:
        return torch.cat(outs), torch.cat(lses)
    return torch.cat(outs, dim=1)[0], torch.cat(lses, dim=2)[0]


def attend_alone(given: KvCacheArguments, sequences: Sequences, b: int, query: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of sequence b, whose new tokens are in the cache; query (1, rows, H, D)."""
    table, elements, relative_bias = given.block_table, given.cache_batch_idx, given.relative_bias
    if table is None:
        elements = torch.full((1,), b, device=query.device) if elements is None else elements[b : b + 1]
    if relative_bias is not None and relative_bias.shape[0] > 1:
        relative_bias = relative_bias[b : b + 1]
    alone = given._replace(
        query=query,
        key=None,
        cache_seqlens=sequences.keys[b : b + 1],
        block_table=None if table is None else table[b : b + 1],
        cache_batch_idx=elements,
        relative_bias=relative_bias,
        cu_seqlens_q=None,
        max_seqlen_q=None,
    )
    if query.numel() == 0:
        return nothing_visible(alone)
    slots = Slots(alone)
    return attend_to_cache(alone, slots, Sequences(alone, slots.capacity))


def packs_rows(given: KvCacheArguments) -> bool:
    return given.batch_invariant and given.query.device.type != "cpu"


def attend_to_cache(given: KvCacheArguments, slots: Slots, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """(out, lse), when the new tokens are in the cache."""
    longest, window_size = sequences.longest, given.window_size
    is_packed = given.cu_seqlens_q is not None
    selects = window_size is not None and (window_size < longest or packs_rows(given))
    # The kernels that select key lists for few rows read a contiguous cache in place. Distances of a relative bias need
    # every key at its position.
    is_in_place = slots.are_whole(given)
    few_rows = is_in_place and sequences.max_rows <= MAX_TOPK_LIST_ROWS
    only_best = selects and not few_rows and given.relative_bias is None
    if only_best:
        keys = best_and_new_keys(given, slots, sequences)
    elif is_packed:
        keys = all_keys_packed(given, slots, sequences)
    else:
        keys = Keys([slots.whole(cache, longest) for cache in caches_of(given)], sequences.keys, longest)
    if fallbacks.enabled() and given.query.device.type == "cuda" and (only_best or not is_in_place):
        report(selects and given.relative_bias is not None)
    return call_packed(given, sequences, keys) if is_packed else call_fixed(given, keys)


def report(needs_all_keys: bool) -> None:
    text = "no kernel reads the cache in place for this call: keys are gathered, then attended to"
    if needs_all_keys:
        text += "; with window_size and relative_bias these are all keys, without relative_bias only the selected"
    fallbacks.report("attention over a cache by other operators", text)


def caches_of(given: KvCacheArguments) -> list[Tensor]:
    return [cache for cache in (given.k_cache, given.v_cache, given.bias_cache) if cache is not None]


def all_keys_packed(given: KvCacheArguments, slots: Slots, sequences: Sequences) -> Keys:
    sequence, position = packed(sequences.keys, sequences.batch * sequences.longest)
    element, key, exists = slots.find(sequence, position)
    tensors = masked_where(~exists[:, None], [cache[element, key] for cache in caches_of(given)])
    return Keys(tensors, sequences.keys, sequences.longest)


def masked_where(is_masked: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """The tensors of `Keys`, with biases -inf where masked: a bias to select by may not be NaN."""
    return [*tensors[:2], *(biases.masked_fill(is_masked, -torch.inf) for biases in tensors[2:])]


def packed(counts: Tensor, max_total: int) -> tuple[Tensor, Tensor]:
    """int64 (total): the sequence of each of the `counts` keys of the sequences, and its number there. The total is
    `max_total` where the counts cannot be read."""
    values = read(counts)
    return packed_positions(offsets_of(counts), max_total if values is None else sum(values))


def offsets_of(counts: Tensor) -> Tensor:
    return pad(counts.cumsum(0), (1, 0)).int()


def best_and_new_keys(given: KvCacheArguments, slots: Slots, sequences: Sequences) -> Keys:
    """The w best keys before the new rows, which differ by head, and those of the new rows, in the cache's order."""
    prefix = (sequences.keys - sequences.rows).clamp_(min=0)  # keys before the first new row's own
    values = read(prefix)
    longest = sequences.longest if values is None else max(values)
    max_selected = min(given.window_size, longest)
    best, found = best_keys(slots.whole_biases(given.bias_cache, longest), prefix, max_selected)
    selected = prefix.clamp(max=max_selected)  # slots for the best keys; a head with fewer leaves the first ones empty
    counts, width = selected + (sequences.keys - prefix), max_selected + sequences.max_rows
    if given.cu_seqlens_q is None:
        sequence = torch.arange(sequences.batch, device=prefix.device)[:, None].expand(-1, width)
        number = torch.arange(width, device=prefix.device).expand(sequence.shape)
    else:
        sequence, number = packed(counts, sequences.batch * max_selected + given.query.shape[0])
    heads = torch.arange(given.k_cache.shape[2], device=prefix.device)
    sequence, number = sequence[..., None], number[..., None]
    behind = number - selected[sequence]  # the number of a new row's key
    rank = behind + found[sequence, heads]
    position = best[sequence, heads, rank.clamp(0, best.shape[2] - 1)]
    position = torch.where(behind < 0, position, prefix[sequence] + behind)
    element, key, exists = slots.find(sequence, position)
    tensors = [cache[element, key, heads] for cache in caches_of(given)]
    return Keys(masked_where(~exists | ((behind < 0) & (rank < 0)), tensors), counts, width)


def best_keys(bias: Tensor, lengths: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best of the first `lengths` keys, of biases (B, keys, Hkv), without masked keys.

    Returns:
        positions int64 (B, Hkv, count), ascending, at least one column; 0 beyond the number of keys found.
        int64 (B, Hkv): the number of keys found.
    """
    batch, _, heads = bias.shape
    if count == 0:
        return lengths.new_zeros(batch, heads, 1), lengths.new_zeros(batch, heads)
    # A head with too few keys gathers the first key, masked: bits must not depend on uninitialized memory.
    positions, is_key = topk_keys(bias.transpose(1, 2), count, lengths.int())
    return positions, is_key.sum(dim=-1)


def call_fixed(given: KvCacheArguments, keys: Keys) -> tuple[Tensor, Tensor]:
    key, value, *biases = keys.tensors
    bias = biases[0].transpose(1, 2).unsqueeze(2) if biases else None
    options = {**options_of(given), "relative_bias": given.relative_bias, "cache_seqlens": keys.counts.int()}
    return attend(kernels_for(given.query), Call(given.query, key, value, attn_bias=bias, **options))


def call_packed(given: KvCacheArguments, sequences: Sequences, keys: Keys) -> tuple[Tensor, Tensor]:
    (key, value, *biases), counts, max_keys = keys
    options = options_of(given) | {"relative_bias": given.relative_bias, "attn_bias": biases[0] if biases else None}
    call = Call(given.query, key, value, **options)
    call.varlen = Varlen(given.cu_seqlens_q, offsets_of(counts), sequences.max_rows, max_keys)
    return attend_invariantly(call) if packs_rows(given) else attend(kernels_for(call.query), call)


def attend_invariantly(call: Call) -> tuple[Tensor, Tensor]:
    """(out, lse) of a packed call. The bits of a sequence do not depend on the others. Changes `call`."""
    multiple, keys = LIST_ROWS, max(call.varlen.max_seqlen_k, INVARIANT_MIN_KEYS)
    if call.window_size is None:
        multiple, keys = INVARIANT_ROWS, max(keys, call.key.shape[0] + 1)
    else:
        call.sparse = "lists"  # "auto" chooses by the number of keys
    rows = -(-call.varlen.max_seqlen_q // multiple) * multiple
    call.varlen = call.varlen._replace(max_seqlen_q=rows, max_seqlen_k=keys)
    call.keeps_max_seqlen = True
    return attend(kernels_for(call.query), call)


def options_of(given: KvCacheArguments) -> dict:
    names = ("softmax_scale", "is_causal", "softcap", "window_size", "sinks")
    return {name: getattr(given, name) for name in names} | {"return_lse": True}


@torch.no_grad()
def attend_to_gathered_keys(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    window_size: int | None,
    softmax_scale: float,
    is_causal: bool,
    softcap: float,
    relative_bias: Tensor | None,
    sinks: Tensor | None,
    batch_invariant: bool,
) -> tuple[Tensor, Tensor]:
    """(out, lse) over GatheredCache (csrc/torch/cuda_backend.h)."""
    if fallbacks.enabled():
        report(False)
    with torch.autocast(query.device.type, enabled=False):
        if cu_seqlens_q is None and sinks is None and relative_bias is None:
            options = (softmax_scale, is_causal, softcap, False, True, window_size, None)
            result = ops.fast_path(query, key, value, None, bias, *options, LIMITS)
            if result is not None:
                return result
        options = {"softmax_scale": softmax_scale, "is_causal": is_causal, "softcap": softcap, "return_lse": True}
        options |= {"window_size": window_size, "relative_bias": relative_bias, "sinks": sinks}
        call = Call(query, key, value, attn_bias=bias, **options)
        if cu_seqlens_q is not None:
            call.varlen = Varlen(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return attend_invariantly(call) if batch_invariant else attend(kernels_for(query), call)


if ops.compose_attention_with_kvcache is not None:
    torch.library.impl(f"{ops.NAMESPACE}::attend_to_gathered_keys", "CUDA")(attend_to_gathered_keys)
    for _device in ("CPU", "CUDA"):
        torch.library.impl(f"{ops.NAMESPACE}::compose_attention_with_kvcache", _device)(compose_attention_with_kvcache)
