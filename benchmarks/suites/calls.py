"""Whole calls: flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True, window_size=w), the selection included.

prefill: "cuDNN, all keys" is causal, without mask and bias. FlexAttention has the same mask and bias; its block mask is
    made beforehand.
decode: one row. "top-k by hand" is torch.topk of the bias, a gather of keys and values, and SDPA with the bias as its
    mask; "SDPA, all keys" has no bias. Both are the fastest of several ways, of which the JSON has each.
host: the time until a small call returns, the median of 60 batches of 50 calls (3 batches on the CPU), beside SDPA in
    its own layout, whose mask is made beforehand. "over pages" is flash_dmattn_with_kvcache, as in the suite serving.
selection: the mask from a bias and its key lists, as CUDA graphs; "without a graph" is both as plain calls.

"tiles" and "lists" are values of `sparse`; "CUDA graph" replays the call; "cache" is one graph captured for a
preallocated cache of which all keys or a quarter are filled (`cache_seqlens`). On CUDA the L2 cache is cold.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from frame import Demand, Setting, Suite, best
from limit import limit_of
from peers import (
    BY_HAND,
    CUDNN_ALL,
    DENSE,
    FLEX,
    OURS,
    ROW_KERNELS,
    SDPA,
    TAKES,
    by_hand,
    cudnn,
    dense,
    flex_where_it_fits,
    from_cache,
    sdpa_in_its_layout,
    takes_lengths,
    whole_call,
)
from problem import Problem, named, square, top_k
from rows import BOTH, FORWARD, Row
from timing import call_for, captured, host_seconds

from flash_dmattn import KeyIntervalMask, KeyLists, flash_dmattn_func
from flash_dmattn.masks import SPARSE
from suites.dense import make_call
from suites.serving import Cache

SPARSE_NAMES = {sparse: OURS if sparse == "auto" else f"{OURS}, {sparse}" for sparse in SPARSE}
GRAPH, CACHE, QUARTER = f"{OURS}, CUDA graph", f"{OURS}, cache", f"{OURS}, cache, a quarter filled"
BY_HAND_GRAPH = f"{BY_HAND}, CUDA graph"
SELECTION, TOPK, LISTS, CALLS = "selection", f"{OURS}, topk", f"{OURS}, key lists", f"{OURS}, without a graph"
HOST_TIME = "host time"


# The workloads


def one_row(batch: int, seqlen: int, window: int, *heads: int) -> Problem:
    return named("", top_k("", seqlen, window, *heads, batch=batch, seqlen_q=1))


def rows_of(seqlen: int, window: int, *heads: int) -> Problem:
    return named("", top_k("", seqlen, window, *heads))


@dataclass(frozen=True)
class Small:
    """A small call, B1 H8 S128 D64.

    Attributes:
        trained: the names of the tensors that get gradients.
        over_pages: whether the keys are in the pages of a cache.
    """

    problem: Problem
    trained: tuple[str, ...] = ()
    over_pages: bool = False

    @property
    def name(self) -> str:
        return self.problem.name

    def shrunk(self, by: int) -> "Small":
        return self


def small(name: str, trained: tuple[str, ...] = (), over_pages: bool = False, **options) -> Small:
    return Small(square(name, 1, 8, 128, 64, **options), trained, over_pages)


QKV = ("query", "key", "value")
PLAIN, MASKED, WINDOW = "forward, no bias", "forward, bool mask and dense bias", "forward, key bias and window_size"
PAGES = "decoding over pages, key bias and window_size"
PLAIN_BOTH = "forward and backward, no bias"
BIAS, DBIAS = "forward and backward, dense bias without dbias", "forward and backward, dense bias and dbias"
DENSE_BIAS, KEY_BIAS = {"bias": "B H Sq Sk"}, {"bias": "B H 1 Sk"}
SMALL_CALLS = [
    small(PLAIN),
    small(MASKED, mask="B H Sq Sk", **DENSE_BIAS),
    small(WINDOW, window=32, as_intervals=True, is_causal=True, **KEY_BIAS),
    small(PAGES, over_pages=True, seqlen_q=1, window=32, as_intervals=True, is_causal=True, **KEY_BIAS),
    small(PLAIN_BOTH, QKV),
    small(BIAS, QKV, **DENSE_BIAS),
    small(DBIAS, (*QKV, "bias"), **DENSE_BIAS),
]
LENGTHS = [(1024, 256), (2048, 512), (4096, 1024), (8192, 1024), (16384, 2048), (32768, 2048), (131072, 2048)]
PREFILL = {
    "cpu": [rows_of(2048, 256, 8, 2, 64)],
    "cuda": [rows_of(*sizes, 32, 8, 128) for sizes in LENGTHS],
}
DECODE = {
    "cpu": [one_row(batch, 8192, 512, 8, 2, 64) for batch in (1, 4)],
    "cuda": [one_row(n, *sizes, 32, 8, 128) for sizes in ((8192, 1024), (131072, 2048)) for n in (1, 8, 32)],
}
SELECTED = {
    "cpu": [rows_of(8192, 512, 8, 8, 8)],
    "cuda": [rows_of(seqlen, 2048, 8, 8, 8) for seqlen in (8192, 32768, 131072)],
}


# What --check requires


AUTO_AT_MOST = 1.1  # times the fastest value of `sparse`
OF_SPARSE = {"peers": tuple(SPARSE_NAMES.values())}
PREFILL_DEMANDS = [
    Demand("B1 H32/8 S2048 D128 w512", FORWARD, 2.0, (CUDNN_ALL,)),
    Demand("B1 H32/8 S4096 D128 w1024", FORWARD, 1.3, (CUDNN_ALL,)),
    Demand("B1 H32/8 S8192 D128 w1024", FORWARD, 0.75, (CUDNN_ALL,)),
    Demand("", FORWARD, AUTO_AT_MOST, **OF_SPARSE),
    Demand("", BOTH, AUTO_AT_MOST, **OF_SPARSE),
]
DECODE_DEMANDS = [
    Demand("B8 H32/8 Sk131072 D128 w2048", FORWARD, 0.4, (BY_HAND,)),
    Demand("B1 H32/8 Sk131072 D128 w2048", FORWARD, 0.6, (BY_HAND,)),
    Demand("B1 H32/8 Sk131072 D128 w2048", FORWARD, 1.0, (DENSE,)),
    Demand("B32 H32/8 Sk8192 D128 w1024", FORWARD, 0.45, (DENSE,)),
    Demand("", FORWARD, AUTO_AT_MOST, **OF_SPARSE),
]
HOST_DEMANDS = [
    Demand(PLAIN, HOST_TIME, 2.0, (SDPA,)),
    Demand(MASKED, HOST_TIME, 3.0, (SDPA,)),
    Demand(BIAS, HOST_TIME, 1.5, (SDPA,)),
    Demand(DBIAS, HOST_TIME, 1.5, (SDPA,)),
    Demand(WINDOW, HOST_TIME, 100e-6),
]
SELECTION_DEMANDS = [
    Demand("B1 H8 S8192 D8 w2048", SELECTION, 0.06e-3),
    Demand("B1 H8 S32768 D8 w2048", SELECTION, 0.12e-3),
    Demand("B1 H8 S131072 D8 w2048", SELECTION, 0.35e-3),
]


# Measuring


def prefill(problem: Problem, setting: Setting) -> list[Row]:
    torch.compiler.reset()
    inputs, rows = setting.inputs(problem), []
    builders = {name: partial(whole_call, flash_dmattn_func, sparse=sparse) for sparse, name in SPARSE_NAMES.items()}
    if setting.device == "cuda":
        builders |= {CUDNN_ALL: cudnn, FLEX: flex_where_it_fits}
    for direction, given in ((FORWARD, inputs), (BOTH, inputs.requiring_grad())):
        makers = {name: partial(make_call, direction, build, given) for name, build in builders.items()}
        rows += setting.time(problem.name, direction, makers, limit_of(direction, inputs, mask_is_given=False))
    return rows


def decode(problem: Problem, setting: Setting) -> list[Row]:
    inputs, attention, device = setting.inputs(problem), flash_dmattn_func, setting.device
    time = partial(setting.time, problem.name, FORWARD)
    limit = limit_of(FORWARD, inputs, mask_is_given=False)
    inputs = replace(inputs, mask=None)  # the limit has counted the mask of the window, which takes memory

    calls = {name: whole_call(attention, inputs, sparse=sparse).forward for sparse, name in SPARSE_NAMES.items()}
    makers = {name: partial(lambda call: call, call) for name, call in calls.items()}
    if device == "cuda":
        makers[GRAPH] = partial(captured, calls[OURS], device)
    with_lengths = takes_lengths(attention)
    if with_lengths:
        makers[CACHE] = partial(from_cache, attention, inputs, 1, device)
    rows = time(makers, limit)
    if with_lengths:
        rows += time({QUARTER: partial(from_cache, attention, inputs, 4, device)})

    ways = {}  # by hand: the kernel and the call of each
    for kernel in ROW_KERNELS[device]:
        taken = {taking: partial(by_hand, inputs, taking, kernel) for taking in TAKES if BY_HAND in kernel.uses}
        makers = {f"{BY_HAND}: {taking}, {kernel.name}": make for taking, make in taken.items()}
        ways |= {name: (kernel, make) for name, make in makers.items()}
        if DENSE in kernel.uses:
            makers[f"{DENSE}: {kernel.name}"] = partial(dense, inputs, kernel)
        with kernel.selected():
            rows += time(makers, limit)
    if device == "cuda":
        kernel, make = ways[best(rows, FORWARD, BY_HAND).implementation]
        with kernel.selected():
            rows += time({BY_HAND_GRAPH: lambda: captured(make(), device)}, limit)
    return rows


def host(case: Small, setting: Setting) -> list[Row]:
    problem, device = case.problem, setting.device
    inputs = setting.inputs(problem)
    for name in case.trained:
        inputs.leaves()[name].requires_grad_()
    direction = BOTH if case.trained else FORWARD
    if case.over_pages:
        makers = {OURS: Cache(inputs).ours}
    else:
        makers = {
            OURS: lambda: call_for(direction, whole_call(flash_dmattn_func, inputs), inputs.dout),
            SDPA: lambda: call_for(direction, sdpa_in_its_layout(inputs), inputs.dout.transpose(1, 2).contiguous()),
        }
    return setting.time(problem.name, HOST_TIME, makers, clock=partial(host_seconds, device=device))


def selection(problem: Problem, setting: Setting) -> list[Row]:
    inputs = setting.inputs(problem)
    seqlen = problem.seqlen_q

    def topk() -> KeyIntervalMask:
        return KeyIntervalMask.topk(inputs.bias, problem.window, seqlen)

    def lists(mask: KeyIntervalMask) -> KeyLists:
        return KeyLists.build(mask, seqlen, is_causal=True)

    calls = {OURS: lambda: lists(topk()), TOPK: topk, LISTS: lambda: lists(inputs.mask)}
    makers = {name: partial(captured, call, setting.device) for name, call in calls.items()}
    return setting.time(problem.name, SELECTION, makers | {CALLS: lambda: calls[OURS]})


def suite(
    name: str, workloads: dict[str, list], measure: Callable, demands: list[Demand], unit: str = "ms", **others
) -> Suite:
    return Suite(name, __doc__, workloads, measure, demands={"cuda": demands, **others}, unit=unit)


SUITES = {
    "prefill": suite("prefill", PREFILL, prefill, PREFILL_DEMANDS),
    "decode": suite("decode", DECODE, decode, DECODE_DEMANDS, cpu=[Demand("", FORWARD, 1.2, (BY_HAND,))]),
    "host": suite("host", {"cpu": SMALL_CALLS, "cuda": SMALL_CALLS}, host, HOST_DEMANDS, "us"),
    "selection": suite("selection", SELECTED, selection, SELECTION_DEMANDS),
}
