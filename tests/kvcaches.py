"""Caches of keys for tests: the same sequences contiguous and in pages, with NaN wherever no key is."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from helpers import assert_close, in_float64
from torch import Tensor

from flash_dmattn import flash_dmattn_with_kvcache
from flash_dmattn.backends import reference as reference_backend
from flash_dmattn.masks.topk import topk_mask
from flash_dmattn.ops.schema import KvCacheArguments
from flash_dmattn.sinks import apply_sinks

LAYOUTS = {
    "contiguous": {"permute": False, "spare": 0},
    "batch elements": {},
    "pages of 16": {"page_size": 16},
    "pages of 64": {"page_size": 64},
}
# (keys before the new rows, new rows) of each sequence.
BATCHES = {
    "decoding": [(40, 1), (0, 1), (299, 1), (64, 1)],
    "few rows": [(40, 5), (0, 5), (299, 5)],
    "chunks": [(100, 40), (0, 40), (7, 40)],
    "mixed": [(40, 1), (130, 30), (0, 17), (64, 1), (12, 0), (0, 0), (33, 4)],
    "packed decoding": [(40, 1), (0, 0), (299, 1)],
}
WINDOWS = {
    "dense": {},
    "window 8": {"window_size": 8},
    "window 64": {"window_size": 64},
    "window beyond": {"window_size": 1000},
    "window 0": {"window_size": 0},
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
each_batch = pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
each_window = pytest.mark.parametrize("options", WINDOWS.values(), ids=WINDOWS)


@dataclass
class Sequence:
    """The keys of one sequence, of which the last `new` come with the call, and its new rows."""

    query: Tensor  # (rows, H, D)
    keys: Tensor  # (keys, Hkv, D)
    values: Tensor
    biases: Tensor  # (keys, Hkv)

    @property
    def rows(self) -> int:
        return self.query.shape[0]

    @property
    def before(self) -> int:
        return self.keys.shape[0] - self.rows


def make_sequence(before, rows, heads=4, kv_heads=2, head_dim=16, dtype=torch.float32, device="cpu", bias_dtype=None):
    def randn(*shape):
        return torch.randn(*shape, device=device).to(dtype)

    keys = before + rows
    biases = torch.randn(keys, kv_heads, device=device).to(bias_dtype or dtype)
    return Sequence(
        randn(rows, heads, head_dim), randn(keys, kv_heads, head_dim), randn(keys, kv_heads, head_dim), biases
    )


def make_sequences(lengths, **sizes):
    """One sequence for each (keys before, new rows)."""
    return [make_sequence(before, rows, **sizes) for before, rows in lengths]


@dataclass
class Call:
    """The arguments of flash_dmattn_with_kvcache for some sequences."""

    query: Tensor
    k_cache: Tensor
    v_cache: Tensor
    arguments: dict = field(default_factory=dict)

    def __call__(self, **options):
        return flash_dmattn_with_kvcache(self.query, self.k_cache, self.v_cache, **(self.arguments | options))

    def to(self, device):
        moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in self.arguments.items()}
        return Call(self.query.to(device), self.k_cache.to(device), self.v_cache.to(device), moved)

    def put_heads_first(self):
        """Makes the cached biases of a head contiguous in a page or batch element."""
        self.arguments["bias_cache"] = self.arguments["bias_cache"].transpose(1, 2).contiguous().transpose(1, 2)

    def caches(self):
        return self.k_cache, self.v_cache, self.arguments["bias_cache"]

    def operator_arguments(self, **options):
        """The arguments of the operators."""
        given = {"query": self.query, "k_cache": self.k_cache, "v_cache": self.v_cache, **self.arguments}
        given |= {"softmax_scale": 0.25, "is_causal": True, "softcap": 0.0, "batch_invariant": False, **options}
        return KvCacheArguments(*(given.get(name) for name in KvCacheArguments._fields))


def make_call(sequences, *, page_size=None, packed=None, appends=True, biased=True, permute=True, spare=3, room=None):
    """A call of the sequences, whose cache holds NaN wherever no key of theirs is.

    page_size: None for a contiguous cache. packed: by default where the sequences differ in their rows.
    appends: passes the new tokens; otherwise they are in the cache.
    room: keys of a contiguous cache, or of a block table's row.
    """
    first, batch = sequences[0], len(sequences)
    packed = len({s.rows for s in sequences}) > 1 if packed is None else packed
    room = max(s.before + s.rows for s in sequences) + 5 if room is None else room
    caches = [first.keys, first.values] + ([first.biases] if biased else [])
    device = first.keys.device

    def nan(*shape, like):
        return torch.full((*shape, *like.shape[1:]), torch.nan, dtype=like.dtype, device=device)

    arguments = {"cache_seqlens": torch.tensor([s.before for s in sequences], dtype=torch.int32, device=device)}
    if not appends:
        arguments["cache_seqlens"] += torch.tensor([s.rows for s in sequences], dtype=torch.int32, device=device)
    if page_size is None:
        elements = torch.randperm(batch + spare) if permute else torch.arange(batch + spare)
        caches = [nan(batch + spare, room, like=x) for x in caches]
        if permute or spare:
            arguments["cache_batch_idx"] = elements[:batch].int().to(device)
        slots = [(element, None) for element in elements[:batch].tolist()]
    else:
        width = -(-room // page_size)
        pages = batch * width + spare
        order = torch.randperm(pages) if permute else torch.arange(pages)
        caches = [nan(pages, page_size, like=x) for x in caches]
        table = torch.randint(-(2**31), 2**31 - 1, (batch, width), dtype=torch.int32)  # unused entries: any value
        for b, s in enumerate(sequences):
            used = -(-(s.before + s.rows) // page_size)
            table[b, :used] = order[b * width : b * width + used].int()
        arguments["block_table"] = table.to(device)
        slots = [(None, row) for row in table]
    for s, (element, pages) in zip(sequences, slots):
        position = torch.arange(s.before if appends else s.before + s.rows)
        if pages is None:
            place = torch.full_like(position, element), position
        else:
            place = pages[position // page_size].long(), position % page_size
        for cache, rows in zip(caches, (s.keys, s.values, s.biases)):
            cache[tuple(x.to(device) for x in place)] = rows[: len(position)]
    new = {"query": [s.query for s in sequences]}
    if appends:
        new |= {"key": [s.keys[s.before :] for s in sequences], "value": [s.values[s.before :] for s in sequences]}
        if biased:
            new["bias"] = [s.biases[s.before :] for s in sequences]
    join = torch.cat if packed else torch.stack
    arguments |= {name: join(parts) for name, parts in new.items()}
    if packed:
        rows = torch.tensor([0, *(s.rows for s in sequences)])
        arguments["cu_seqlens_q"] = rows.cumsum(0).int().to(device)
        arguments["max_seqlen_q"] = max(s.rows for s in sequences)
    if biased:
        arguments["bias_cache"] = caches[2]
    return Call(arguments.pop("query"), caches[0], caches[1], arguments)


def split(result, sequences, packed):
    """The (out, lse) of each sequence, (rows, H, D) and (H, rows), of a call's result."""
    out, lse = result
    if not packed:
        return list(zip(out, lse))
    rows = [s.rows for s in sequences]
    return list(zip(out.split(rows), lse.split(rows, dim=1)))


def reference(
    sequence,
    dtype=torch.float64,
    *,
    window_size=None,
    biased=True,
    softmax_scale=None,
    softcap=0.0,
    is_causal=True,
    relative_bias=None,
    sinks=None,
    batch_invariant=False,
):
    """(out, lse) of a sequence in `dtype`: all its keys at once, and those of each row selected one row at a time."""
    query, keys, values = (x.to(dtype)[None] for x in (sequence.query, sequence.keys, sequence.values))
    bias, rows, total = sequence.biases.T[None, :, None] if biased else None, sequence.rows, sequence.keys.shape[0]
    mask = None
    if window_size is not None:
        row, key = torch.arange(rows)[:, None] + total - rows, torch.arange(total)
        candidates = (key <= row).to(query.device).expand(1, bias.shape[1], rows, total)
        mask = topk_mask(bias, candidates, window_size)
    options = {
        "softmax_scale": query.shape[3] ** -0.5 if softmax_scale is None else softmax_scale,
        "is_causal": is_causal,
        "softcap": softcap,
        "deterministic": False,
    }
    if relative_bias is not None:
        options["relative_bias"] = in_float64(relative_bias).to(dtype)
    bias = None if bias is None else in_float64(bias).to(dtype)
    out, lse = reference_backend.attention(query, keys, values, mask, bias, **options)
    if sinks is not None:
        out = apply_sinks(out, lse, sinks)
    return out[0], lse[0]


def count_positions(sequences):
    """Changes queries and values (D = 64) so that out counts the visible keys by position % 64 where biases are nearly
    equal: a wrong key shows, unless it has the same position % 64."""
    for s in sequences:
        s.query.zero_()
        codes = torch.nn.functional.one_hot(torch.arange(len(s.values), device=s.values.device) % 64, 64)
        s.values.copy_(codes[:, None].expand_as(s.values))


def assert_same_counts(out, sequence, window_size):
    """out (rows, H, D) of a sequence of count_positions, of which each row selects `window_size` keys."""
    exact, _ = reference(sequence, window_size=window_size)
    torch.testing.assert_close(out.double(), exact, rtol=8e-3, atol=0.3 / window_size)


def check(sequences, *, call=None, options=None, **layout):
    """Calls attention over the cache of the sequences, and compares each with float64. Returns the results."""
    options = options or {}
    call = make_call(sequences, **layout) if call is None else call
    results = split(call(return_lse=True, **options), sequences, "cu_seqlens_q" in call.arguments)
    options = {"biased": layout.get("biased", True), **options}
    for b, (sequence, result) in enumerate(zip(sequences, results, strict=True)):
        own = dict(options)
        if options.get("relative_bias") is not None and options["relative_bias"].shape[0] > 1:
            own["relative_bias"] = options["relative_bias"][b : b + 1]
        dtype = sequence.query.dtype
        exact, eager = (reference(sequence, precision, **own) for precision in (torch.float64, dtype))
        assert_close(result, eager, exact, dtype, ("out", "lse"))
    return results
