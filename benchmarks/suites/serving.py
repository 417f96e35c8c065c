"""Attention over a cache of keys, values and biases (flash_dmattn_with_kvcache), the selection included.

decode: one row of each sequence; chunk: rows of a prompt behind a prefix that is in the cache; mixed: both in a batch.
    Without a window all keys are visible and there is no bias.

"flash_dmattn" reads pages of 64 keys in random order and writes the new tokens; "contiguous" has one tensor instead,
"CUDA graph" replays the call. "its part of a whole prefill" is one flash_dmattn_func over the whole sequence, times the
share of the visible scores that the chunk's rows have. By hand: torch.topk of the biases, the selected keys and values
gathered from the pages, SDPA; without a window all pages are gathered. FlexAttention and FlashAttention find the new
tokens in the cache; FlexAttention's is contiguous, and its block mask is made beforehand. On CUDA the L2 cache is cold.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from einops import rearrange
from frame import Demand, Setting, Suite
from limit import PEAK_BYTES, limit_of
from peers import (
    BY_HAND,
    DENSE,
    FLASH2,
    FLASH4,
    FLEX,
    OURS,
    ROW_KERNELS,
    RowKernel,
    flex_where_it_fits,
    has_flash_attention_4,
    whole_call,
)
from problem import Inputs, Problem, named, shrunk, square, top_k
from rows import FORWARD, Row
from timing import Call, captured
from torch import Tensor

from flash_dmattn import flash_dmattn_func, flash_dmattn_with_kvcache

CONTIGUOUS, GRAPH, INVARIANT = f"{OURS}, contiguous", f"{OURS}, CUDA graph", f"{OURS}, batch_invariant"
WHOLE = f"{OURS}, its part of a whole prefill"
PAGES2, PAGES4 = f"{FLASH2}, pages", f"{FLASH4}, pages"
PAGE_SIZE, FLASH2_PAGE_SIZE = 64, 256
DENSE_SHARE = 0.8  # of PEAK_BYTES, which decoding over all keys must reach


# The workloads


@dataclass(frozen=True)
class Serving:
    """Sequences with their keys in a cache, of which the last ones come with the call.

    Attributes:
        problem: all sequences have its keys, and at most its rows.
        rows: of each sequence, where they differ.
    """

    problem: Problem
    rows: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return self.problem.name

    def shrunk(self, by: int) -> "Serving":
        problem = shrunk(self.problem, by)
        return Serving(problem, tuple(min(rows, problem.seqlen_q) for rows in self.rows))


def serving(label: str, batch: int, seqlen_q: int, seqlen_k: int, window: int | None, *sizes: int) -> Serving:
    if window is not None:
        return Serving(named(label, top_k("", seqlen_k, window, *sizes, batch=batch, seqlen_q=seqlen_q)))
    heads, kv_heads, head_dim = sizes
    options = {"kv_heads": kv_heads, "seqlen_q": seqlen_q, "is_causal": True}
    return Serving(named(label, square("", batch, heads, seqlen_k, head_dim, **options)))


def mixed(batch: int, chunks: int, *arguments) -> Serving:
    """`chunks` sequences have chunks of prompts, the others single rows."""
    one = serving("mixed, 1 chunk" if chunks == 1 else f"mixed, {chunks} chunks", batch, *arguments)
    return replace(one, rows=(one.problem.seqlen_q,) * chunks + (1,) * (batch - chunks))


SIZES, SMALL = (32, 8, 128), (8, 2, 64)
B32 = (32, 1, 8192)
WORKLOADS = {
    "cuda": [
        serving("decode", 1, 1, 131072, 2048, *SIZES),
        serving("decode", 8, 1, 131072, 2048, *SIZES),
        serving("decode", *B32, 1024, *SIZES),
        serving("decode, all keys", *B32, None, *SIZES),
        serving("chunk", 1, 2048, 32768, 2048, *SIZES),
        mixed(32, 2, 1024, 8192, 1024, *SIZES),
        mixed(32, 2, 1024, 8192, None, *SIZES),
    ],
    "cpu": [
        serving("decode", 4, 1, 8192, 512, *SMALL),
        serving("decode, all keys", 4, 1, 8192, None, *SMALL),
        serving("chunk", 1, 256, 4096, 256, *SMALL),
        mixed(4, 1, 256, 2048, 256, *SMALL),
    ],
}


def least_bytes(problem: Problem) -> int:
    """The bytes of all keys and values in 16 bits."""
    return 2 * 2 * problem.batch * problem.seqlen_k * problem.kv_heads * problem.head_dim


# What --check requires

DECODE1, DECODE8, DECODE32, ALL_KEYS, CHUNK = (workload.name for workload in WORKLOADS["cuda"][:5])
DEMANDS = [
    Demand(DECODE1, FORWARD, 0.020e-3, implementation=CONTIGUOUS),
    Demand(DECODE8, FORWARD, 0.042e-3, implementation=CONTIGUOUS),
    Demand(DECODE32, FORWARD, 0.050e-3, implementation=CONTIGUOUS),
    *(Demand(name, FORWARD, 1.05, (CONTIGUOUS,)) for name in (DECODE1, DECODE8, DECODE32)),
    Demand(ALL_KEYS, FORWARD, least_bytes(WORKLOADS["cuda"][3].problem) / (DENSE_SHARE * PEAK_BYTES)),
    Demand("", FORWARD, 1.15, (OURS,), implementation=INVARIANT),
    Demand(CHUNK, FORWARD, 1.15, (WHOLE,)),
]


# The cache


@dataclass(frozen=True)
class Cache:
    """The keys, values and biases of `inputs` in pages of a random order, or one tensor each.

    Attributes:
        tensors: keys and values (pages, page_size, Hkv, D), and biases (pages, page_size, Hkv) where there are any; or
            (B, Sk, Hkv, D) and (B, Sk, Hkv). The biases of a head are contiguous.
        table: int32 (B, pages of a sequence), or None.
    """

    inputs: Inputs
    rows: tuple[int, ...] = ()
    page_size: int | None = PAGE_SIZE
    seed: int = 0
    table: Tensor | None = field(init=False)
    tensors: list[Tensor] = field(init=False)

    def __post_init__(self):
        inputs, problem = self.inputs, self.inputs.problem
        whole = [inputs.key, inputs.value]
        if inputs.bias is not None:
            whole.append(rearrange(inputs.bias, "b h 1 keys -> b keys h"))
        table = None
        if self.page_size is not None:
            shape = (problem.batch, -(-problem.seqlen_k // self.page_size))
            generator = torch.Generator().manual_seed(self.seed)
            table = torch.randperm(shape[0] * shape[1], generator=generator).view(shape)
            table = table.to(inputs.query.device, torch.int32)
            whole = [self.in_pages(x, table) for x in whole]
            whole[2:] = [biases.transpose(1, 2).contiguous().transpose(1, 2) for biases in whole[2:]]
        object.__setattr__(self, "table", table)
        object.__setattr__(self, "tensors", whole)

    def in_pages(self, whole: Tensor, table: Tensor) -> Tensor:
        batch, keys = whole.shape[:2]
        pages = whole.new_full((table.numel(), self.page_size, *whole.shape[2:]), torch.nan)
        padded = whole.new_full((batch, table.shape[1] * self.page_size, *whole.shape[2:]), torch.nan)
        padded[:, :keys] = whole
        pages[table.flatten().long()] = padded.view_as(pages)
        return pages

    @cached_property
    def lengths(self) -> Tensor:
        """int32 (B): the new rows of each sequence."""
        problem = self.inputs.problem
        rows = self.rows or (problem.seqlen_q,) * problem.batch
        return torch.tensor(rows, dtype=torch.int32, device=self.inputs.query.device)

    def of_rows(self, tensor: Tensor) -> Tensor:
        """The new rows of (B, Sq, ..): packed where sequences have different numbers of them."""
        return torch.cat([x[-n:] for x, n in zip(tensor, self.rows)]) if self.rows else tensor

    @cached_property
    def offsets(self) -> dict[str, object]:
        """The arguments of packed rows."""
        if not self.rows:
            return {}
        cu_seqlens = torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)]).int()
        return {"cu_seqlens_q": cu_seqlens, "max_seqlen_q": max(self.rows)}

    def ours(self, **options) -> Call:
        """Writes the new tokens, which are there already, and attends."""
        inputs, problem = self.inputs, self.inputs.problem
        keys, values, *biases = self.tensors
        new = (x[:, -problem.seqlen_q :] for x in (inputs.key, inputs.value))
        query, key, value = (self.of_rows(x).contiguous() for x in (inputs.query, *new))
        if biases:
            bias = rearrange(inputs.bias[..., -problem.seqlen_q :], "b h 1 keys -> b keys h")
            options |= {"bias_cache": biases[0], "bias": self.of_rows(bias).contiguous()}
        options |= {"window_size": problem.window, "block_table": self.table, **self.offsets}
        before = problem.seqlen_k - self.lengths
        return lambda: flash_dmattn_with_kvcache(query, keys, values, key, value, cache_seqlens=before, **options)


# Peers over pages


def by_hand(cache: Cache, kernel: RowKernel) -> Call:
    """One row: the keys of largest bias, gathered from the pages, their bias added to the scores."""
    inputs, problem = cache.inputs, cache.inputs.problem
    keys, values, biases = cache.tensors
    heads = torch.arange(problem.kv_heads, device=keys.device)[:, None]
    rows = [x.view(-1, problem.head_dim) for x in (keys, values)]
    pages = cache.table.long()
    window = min(problem.window, problem.seqlen_k)

    def forward() -> Tensor:
        bias = rearrange(biases[pages].flatten(1, 2)[:, : problem.seqlen_k], "b keys h -> b h keys")
        bias, found = bias.topk(window, dim=-1, sorted=False)
        page = pages.gather(1, (found // cache.page_size).flatten(1)).view_as(found)
        places = (page * cache.page_size + found % cache.page_size) * problem.kv_heads + heads
        key, value = (x.index_select(0, places.flatten()).view(*places.shape, problem.head_dim) for x in rows)
        return kernel.attend(inputs.query, key, value, bias[:, :, None])

    return forward


def dense_by_hand(cache: Cache, kernel: RowKernel) -> Call:
    """One row: all pages gathered."""
    keys, pages = cache.inputs.problem.seqlen_k, cache.table.long()

    def forward() -> Tensor:
        key, value = (x[pages].flatten(1, 2)[:, :keys].transpose(1, 2) for x in cache.tensors)
        return kernel.attend(cache.inputs.query, key, value, None)

    return forward


def flash_attention_2(inputs: Inputs) -> Call:
    """It reads pages of 256 keys."""
    from flash_attn import flash_attn_with_kvcache

    cache = Cache(inputs, page_size=FLASH2_PAGE_SIZE)
    problem, tables = inputs.problem, {"block_table": cache.table}
    lengths = torch.full_like(cache.lengths, problem.seqlen_k)
    return lambda: flash_attn_with_kvcache(
        inputs.query, *cache.tensors, cache_seqlens=lengths, causal=problem.seqlen_q > 1, **tables
    )


def flash_attention_4(cache: Cache) -> Call:
    from flash_attn.cute import flash_attn_varlen_func

    problem = cache.inputs.problem
    query = cache.of_rows(cache.inputs.query)
    lengths = torch.full_like(cache.lengths, problem.seqlen_k)
    options = {"seqused_k": lengths, "page_table": cache.table, "causal": True, "max_seqlen_k": problem.seqlen_k}
    return lambda: flash_attn_varlen_func(query, *cache.tensors, **options, **cache.offsets)[0]


# Measuring


def measure(workload: Serving, setting: Setting) -> list[Row]:
    torch.compiler.reset()
    inputs, device = setting.inputs(workload.problem), setting.device
    problem, is_mixed = workload.problem, bool(workload.rows)
    limit = None if is_mixed else limit_of(FORWARD, inputs, mask_is_given=False)
    time = partial(setting.time, workload.name, FORWARD)
    cache = Cache(inputs, workload.rows, seed=setting.seed)
    makers: dict[str, Callable[[], Call]] = {
        OURS: cache.ours,
        CONTIGUOUS: lambda: replace(cache, page_size=None).ours(),
        INVARIANT: lambda: cache.ours(batch_invariant=True),
    }
    if device == "cuda":
        makers[GRAPH] = lambda: captured(cache.ours(), device)
        if not is_mixed:
            makers[FLEX] = lambda: flex_where_it_fits(inputs).forward
        if problem.window is None:
            makers |= flash_attention(cache, is_mixed)
    rows = time(makers, limit)
    if problem.seqlen_q == 1:
        rows += rows_by_hand(cache, time, limit, device)
    elif not is_mixed:
        rows += part_of_prefill(workload, setting)
    return rows


def flash_attention(cache: Cache, is_mixed: bool) -> dict[str, Callable[[], Call]]:
    """Those that are installed."""
    makers = {}
    if importlib.util.find_spec("flash_attn_2_cuda") and not is_mixed:
        makers[PAGES2] = lambda: flash_attention_2(cache.inputs)
    if has_flash_attention_4():
        makers[PAGES4] = lambda: flash_attention_4(cache)
    return makers


def rows_by_hand(cache: Cache, time: Callable[..., list[Row]], limit: float | None, device: str) -> list[Row]:
    """A row for each of SDPA's kernels."""
    rows, name, make = [], BY_HAND, by_hand
    if cache.inputs.problem.window is None:
        name, make = DENSE, dense_by_hand
    for kernel in ROW_KERNELS[device]:
        if name in kernel.uses:
            with kernel.selected():
                rows += time({f"{name}: {kernel.name}": partial(make, cache, kernel)}, limit)
    return rows


def part_of_prefill(workload: Serving, setting: Setting) -> list[Row]:
    """A prefill of the whole sequence, times the part of its visible scores that the chunk's rows have."""
    problem = workload.problem
    inputs = setting.inputs(replace(problem, seqlen_q=problem.seqlen_k))
    seen = torch.arange(1, problem.seqlen_k + 1, dtype=torch.float64).clamp(max=problem.window)
    part = (seen[-problem.seqlen_q :].sum() / seen.sum()).item()
    call = whole_call(flash_dmattn_func, inputs).forward
    (row,) = setting.time(workload.name, FORWARD, {WHOLE: lambda: call})
    return [row if row.seconds is None else replace(row, figures={"seconds": part * row.seconds})]


SUITES = {
    "serving": Suite(
        "serving",
        __doc__,
        WORKLOADS,
        measure,
        demands={"cuda": DEMANDS},
    )
}
