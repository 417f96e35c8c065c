"""Attention over a cache of keys, composed of other operators: the operator compose_attention_with_kvcache.

It serves every call of attention_with_kvcache (csrc/torch/kvcache.h) that no kernel of its own serves, on every device.
It writes the new tokens into the cache, gathers the keys that the rows may see, and calls attention over those.

With window_size few keys are gathered. A key before the new rows that is not among the w largest biases of these keys
is not among the w largest of any row. So a sequence needs the w best keys before its new rows, and the keys of these.
On CUDA nothing waits for the device: lengths, pages and offsets are read there, and clamped to what exists.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import fallbacks, ops
from .arguments import is_host_readable
from .attend import attend, kernels_for
from .call import Call, Varlen
from .masks.topk import sequence_of_keys
from .ops.list_sizes import MAX_TOPK_LIST_ROWS, list_capacity
from .ops.schema import KvCacheArguments


class Slots:
    """Where the keys of the sequences are in the cache."""

    def __init__(self, given: KvCacheArguments):
        self.table, self.elements = given.block_table, given.cache_batch_idx
        self.batches, self.width = given.k_cache.shape[:2]  # pages of the cache and their size, or batch elements
        self.room = self.width if self.table is None else self.table.shape[1] * self.width

    def find(self, sequence: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(page or batch element, key in it, whether it exists), each int64 and inside the cache.

        sequence, position: int64, broadcast to each other; any values.
        """
        exists = (position >= 0) & (position < self.room)
        position = position.clamp(0, self.room - 1)
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


class Sequences:
    """The new rows and the keys of each sequence, when the new tokens are in the cache."""

    def __init__(self, given: KvCacheArguments, room: int):
        self.batch, device = given.cache_seqlens.shape[0], given.query.device
        self.cu_seqlens = given.cu_seqlens_q
        before = given.cache_seqlens.long().clamp(0, room)
        if self.cu_seqlens is None:
            self.most_rows = given.query.shape[1]
            self.rows = torch.full((self.batch,), self.most_rows, device=device)
        else:
            self.most_rows = given.max_seqlen_q
            self.rows = self.cu_seqlens.diff().long()
        self.before = before
        self.keys = before if given.key is None else (before + self.rows).clamp_(max=room)
        # On the CPU the most keys that a sequence has; elsewhere the most that it may have.
        is_readable = is_host_readable(self.keys)
        self.longest = max(self.keys.tolist(), default=0) if is_readable else room

    def of_rows(self, rows: int) -> tuple[Tensor, Tensor]:
        """int64 (rows): the sequence of each packed row, and the row's number in it."""
        device = self.rows.device
        if self.cu_seqlens is None:
            sequence = torch.arange(self.batch, device=device).repeat_interleave(self.most_rows, output_size=rows)
            return sequence, torch.arange(self.most_rows, device=device).repeat(self.batch)
        return packed_positions(self.cu_seqlens, rows)


def packed_positions(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """int64 (total): the sequence of each packed position, and the position in it. Positions after the last sequence
    are in none: beyond the room of the last."""
    sequence = sequence_of_keys(cu_seqlens, total).clamp_(max=cu_seqlens.shape[0] - 2)
    positions = torch.arange(total, device=cu_seqlens.device)
    return sequence, torch.where(positions < cu_seqlens[-1], positions - cu_seqlens[sequence], 1 << 40)


@torch.no_grad()
def compose_attention_with_kvcache(*args) -> tuple[Tensor, Tensor]:
    """(out, lse) of `flash_dmattn_with_kvcache`, for arguments that attention_with_kvcache has checked."""
    given = KvCacheArguments(*args)
    query, slots = given.query, Slots(given)
    with torch.autocast(query.device.type, enabled=False):
        is_empty = slots.batches == 0 or slots.room == 0 or query.numel() == 0
        if not is_empty:
            sequences = Sequences(given, slots.room)
            append(given, slots, sequences)
        if is_empty or given.window_size == 0:
            return nothing_visible(given)
        if given.batch_invariant:
            return one_by_one(given, sequences)
        return attend_to_cache(given, slots, sequences)


def nothing_visible(given: KvCacheArguments) -> tuple[Tensor, Tensor]:
    query = given.query
    *batch, rows, heads, _ = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    out = query.new_zeros(*query.shape[:-1], given.v_cache.shape[3])
    return out, query.new_full((*batch, heads, rows), -torch.inf, dtype=dtype)


def append(given: KvCacheArguments, slots: Slots, sequences: Sequences) -> None:
    """Writes the new tokens into the cache, behind each sequence's keys. Tokens without a place there are dropped."""
    if given.key is None:
        return
    total = given.query.shape[:-2].numel()
    sequence, row = sequences.of_rows(total)
    element, key, exists = slots.find(sequence, sequences.before[sequence] + row)
    # A token without a place writes what one that has a place writes; where none has, all write what is there.
    source = torch.where(exists, torch.arange(total, device=exists.device), exists.to(torch.int8).argmax())
    element, key, any_exists = element[source], key[source], exists.any()
    for cache, new in (
        (given.k_cache, given.key),
        (given.v_cache, given.value),
        (given.bias_cache, given.bias),
    ):
        if cache is not None:
            new = new.reshape(total, *cache.shape[2:])[source]
            cache.index_put_((element, key), torch.where(any_exists, new, cache[element, key]))


def one_by_one(given: KvCacheArguments, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Each sequence in a call of its own, so that its bits depend on no other."""
    if given.cu_seqlens_q is not None and not is_host_readable(given.cu_seqlens_q):
        return one_by_one_on_device(given, sequences)
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
    return attend_to_cache(alone, slots, Sequences(alone, slots.room))


def attend_to_cache(given: KvCacheArguments, slots: Slots, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """(out, lse), when the new tokens are in the cache."""
    room, window_size = sequences.longest, given.window_size
    is_packed = given.cu_seqlens_q is not None
    selects = window_size is not None and window_size < room
    # The kernels that select key lists for few rows read a contiguous cache in place. Distances of a relative bias need
    # every key at its position.
    is_in_place = slots.table is None and slots.elements is None and not is_packed
    few_rows = is_in_place and sequences.most_rows <= MAX_TOPK_LIST_ROWS
    if selects and not few_rows and given.relative_bias is None:
        keys = best_and_new_keys(given, slots, sequences)
    elif is_packed:
        keys = all_keys_packed(given, slots, sequences)
    else:
        keys = [slots.whole(cache, room) for cache in caches_of(given)], sequences.keys
    if fallbacks.enabled() and given.query.device.type == "cuda":
        report(given, selects)
    return call_attention(given, sequences, *keys)


def report(given: KvCacheArguments, selects: bool) -> None:
    text = "no kernel reads the cache in place for this call: keys are gathered, then attended to"
    if selects and given.relative_bias is not None:
        text += "; with window_size and relative_bias all keys of the cache, without relative_bias only the best"
    fallbacks.report("attention over a cache of other operators", text)


def caches_of(given: KvCacheArguments) -> list[Tensor]:
    return [cache for cache in (given.k_cache, given.v_cache, given.bias_cache) if cache is not None]


def all_keys_packed(given: KvCacheArguments, slots: Slots, sequences: Sequences) -> tuple[list[Tensor], Tensor]:
    """(keys, values and biases packed without gaps, the keys of each sequence)"""
    sequence, position, _ = packed(sequences, sequences.keys, sequences.longest)
    element, key, _ = slots.find(sequence, position)
    return [cache[element, key] for cache in caches_of(given)], sequences.keys


def packed(sequences: Sequences, counts: Tensor, most: int) -> tuple[Tensor, Tensor, int]:
    """int64 (total): the sequence of each of the `counts` elements of a sequence, and its number there; and total, at
    most `most` for a sequence where the counts cannot be read."""
    total = sum(counts.tolist()) if is_host_readable(counts) else sequences.batch * most
    return *packed_positions(offsets_of(counts), total), total


def offsets_of(counts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()


def best_and_new_keys(given: KvCacheArguments, slots: Slots, sequences: Sequences) -> tuple[list[Tensor], Tensor]:
    """(keys, values and biases, the number of each sequence's): the w best keys before the new rows, which differ by
    head, and those of the new rows, in the cache's order. (B, w + Sq, ..), or packed without gaps."""
    prefix = (sequences.keys - sequences.rows).clamp_(min=0)  # keys before the first new row's own
    longest = sequences.longest
    if is_host_readable(prefix):
        longest = max(prefix.tolist(), default=0)
    most = min(given.window_size, longest)
    best, found = best_keys(slots.whole(given.bias_cache, longest), prefix, most)
    selected = prefix.clamp(max=most)  # slots for the best keys; a head with fewer leaves the first ones empty
    counts = selected + (sequences.keys - prefix)
    if given.cu_seqlens_q is None:
        width = most + sequences.most_rows
        sequence = torch.arange(sequences.batch, device=prefix.device)[:, None].expand(-1, width)
        number = torch.arange(width, device=prefix.device).expand(sequence.shape)
    else:
        sequence, number, _ = packed(sequences, counts, most + sequences.most_rows)
    heads = torch.arange(given.k_cache.shape[2], device=prefix.device)
    sequence, number = sequence[..., None], number[..., None]
    is_selected = number < selected[sequence]
    rank = number - (selected[sequence] - found[sequence, heads])
    position = best[sequence, heads, rank.clamp(0, best.shape[2] - 1)]
    position = torch.where(is_selected, position, prefix[sequence] + (number - selected[sequence]))
    element, key, _ = slots.find(sequence, position)
    keys, values, biases = (cache[element, key, heads] for cache in caches_of(given))
    return [keys, values, biases.masked_fill(is_selected & (rank < 0), -torch.inf)], counts


def best_keys(bias: Tensor, lengths: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best of the first `lengths` keys, of biases (B, keys, Hkv), without hidden keys.

    Returns:
        positions int64 (B, Hkv, count), ascending, at least one column; entries beyond the next are undefined.
        int64 (B, Hkv): the number of keys found.
    """
    batch, keys, heads = bias.shape
    if count == 0:
        return lengths.new_zeros(batch, heads, 1), lengths.new_zeros(batch, heads)
    lists, (begin, end), _ = ops.topk_lists(bias.transpose(1, 2), count, 1, lengths.int())
    lists = lists.view(batch, heads, list_capacity(count, 1, keys))[..., :count]
    # Lists are padded with -1 to a multiple of 64; memory beyond is uninitialized.
    is_key = (torch.arange(count, device=bias.device) < end - begin) & (lists >= 0)
    return lists.long(), is_key.sum(dim=-1)


def call_attention(
    given: KvCacheArguments, sequences: Sequences, rows: list[Tensor], counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention of the new rows over the first `counts` keys of each sequence."""
    keys, values, *biases = rows
    bias = biases[0] if biases else None
    if bias is not None and given.query.dtype == torch.float64:
        bias = bias.to(torch.float64)
    options = {
        "softmax_scale": given.softmax_scale,
        "is_causal": given.is_causal,
        "softcap": given.softcap,
        "return_lse": True,
        "window_size": given.window_size,
        "relative_bias": given.relative_bias,
        "sinks": given.sinks,
    }
    if given.cu_seqlens_q is None:
        options["cache_seqlens"] = counts.int()
        bias = None if bias is None else bias.transpose(1, 2).unsqueeze(2)
    else:
        longest = max(counts.tolist(), default=0) if is_host_readable(counts) else keys.shape[0] // sequences.batch
        options["varlen"] = Varlen(given.cu_seqlens_q, offsets_of(counts), sequences.most_rows, longest)
    return attend(kernels_for(given.query), Call(given.query, keys, values, attn_bias=bias, **options))


if ops.compose_attention_with_kvcache is not None:
    for _device in ("CPU", "CUDA"):
        torch.library.impl(f"{ops.NAMESPACE}::compose_attention_with_kvcache", _device)(compose_attention_with_kvcache)
