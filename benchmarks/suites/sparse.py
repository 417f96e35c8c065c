"""Attention that computes visible scores only, beside attention to all keys.

Top-w mask: each row sees the w keys of largest bias up to its own; each KV head has its own bias. `topk` makes the mask
beforehand. The forward builds the key lists; "key lists" is their part of it. A decoding step gets lists made
beforehand. Indices: each run of rows has the keys that its last row sees, named beforehand as by an indexer, or random
keys; the forward calls `KeyLists.from_indices`.

Peers: FlexAttention has the same mask, read from the same intervals, and the same bias. "cuDNN, all keys" is causal and
has no bias. "cuDNN, dense S x w" lets each row see the first w keys: as many products as the mask has. "flash_dmattn,
tiles" uses no key lists. "flash_dmattn, top-k mask" beside indices has a top-k mask of the same density.
"""

from functools import partial

import torch
from frame import Demand, Setting, Suite
from limit import size
from peers import (
    CUDNN_ALL,
    CUDNN_DENSE,
    FLEX,
    OURS,
    OURS_TILES,
    Build,
    cudnn,
    cudnn_of_window,
    flex_where_it_fits,
    lists_of_indices,
    ours_indexed,
    ours_sparse,
)
from problem import Indexed, Problem, indexed, named, top_k
from rows import BACKWARD, BOTH, FORWARD, Row
from timing import call_for, medians

from flash_dmattn import KeyIntervalMask, KeyLists
from flash_dmattn.masks import SPARSE
from suites.dense import time_directions

TOPK, LISTS = "topk", "key lists"  # the mask from a bias, and the key lists from a mask
OURS_TOP_K = f"{OURS}, top-k mask"
PEERS: dict[str, Build] = {FLEX: flex_where_it_fits, CUDNN_ALL: cudnn, CUDNN_DENSE: cudnn_of_window}


def mask_of(label: str, *sizes: int, **options) -> Problem:
    return named(label, top_k("", *sizes, **options))


def indices_of(label: str, *sizes: int, **options) -> Indexed:
    return named(label, indexed("", *sizes, **options))


WORKLOADS = {
    "cpu": [
        mask_of("top-k mask", 8192, 512, 8, 2, 64),
        indices_of("indices for each 64 rows", 8192, 512, 8, 2, 64, tile_rows=64),
    ],
    "cuda": [
        mask_of("top-k mask", 8192, 1024, 32, 8, 128),
        mask_of("top-k mask", 32768, 2048, 32, 8, 128),
        mask_of("top-k mask", 131072, 2048, 32, 8, 128),
        mask_of("top-k mask", 2**20, 2048, 8, 2, 64),
        mask_of("decode, top-k mask", 131072, 2048, 32, 8, 128, batch=8, seqlen_q=1),
        indices_of("indices for each row", 8192, 512, 32, 8, 128, tile_rows=1),
        indices_of("random indices for each row", 8192, 512, 32, 8, 128, tile_rows=1, at_random=True),
        indices_of("indices for each 64 rows", 8192, 512, 32, 8, 128, tile_rows=64),
        indices_of("indices for each 64 rows", 32768, 2048, 32, 8, 128, tile_rows=64),
    ],
}
S8K, S32K, S131K, _, DECODE, *_, EACH_64 = (problem.name for problem in WORKLOADS["cuda"])
CPU = WORKLOADS["cpu"][0].name


def times_as_fast(workload: str, peer: str, forward: float, backward: float) -> list[Demand]:
    """At least so many times the peer's speed."""
    return [Demand(workload, FORWARD, 1 / forward, (peer,)), Demand(workload, BACKWARD, 1 / backward, (peer,))]


def over_dense(workload: str, forward: float, backward: float) -> list[Demand]:
    """Relative to the same number of dense products."""
    peers = (CUDNN_DENSE,)
    return [Demand(workload, FORWARD, forward, peers, plus=TOPK), Demand(workload, BACKWARD, backward, peers)]


def part_of_lists(workload: str) -> Demand:
    return Demand(workload, LISTS, 0.1, (OURS,), peer_direction=FORWARD)


DEMANDS = {
    "cpu": times_as_fast(CPU, OURS_TILES, 4, 4),
    "cuda": [
        *times_as_fast(S8K, FLEX, 2, 2),
        *over_dense(S8K, 1.6, 1.6),
        *times_as_fast(S32K, CUDNN_ALL, 3, 3),
        *over_dense(S32K, 1.4, 1.5),
        part_of_lists(S32K),
        *times_as_fast(S131K, CUDNN_ALL, 22, 18),
        part_of_lists(S131K),
        Demand(S131K, TOPK, 3e-3),
        Demand(S131K, BOTH, 3, figure="peak_over_tensors"),
        Demand(DECODE, FORWARD, 0.1e-3),
        *times_as_fast(EACH_64, OURS_TOP_K, 1 / 1.15, 1 / 1.15),
        part_of_lists(EACH_64),
    ],
}


def builders_of(problem: Problem, setting: Setting) -> dict[str, Build]:
    backend, sparse = next(iter(setting.own.values())), setting.options.sparse
    peers = [OURS_TILES] if setting.device == "cpu" else list(PEERS)
    if problem.seqlen_q >= 2**20:
        peers = []  # they take seconds a call, or refuse
    available = PEERS | {OURS_TILES: partial(ours_sparse, backend, "tiles")}
    if isinstance(problem, Indexed):
        own = {name: partial(ours_indexed, one) for name, one in setting.own.items()}
        own[OURS_TOP_K] = partial(ours_sparse, backend, "lists")
        names = [*setting.names(OURS, OURS_TOP_K, *peers)]
    else:
        own = {name: partial(ours_sparse, one, sparse) for name, one in setting.own.items()}
        names = [name for name in setting.names(OURS, *peers) if name != OURS_TOP_K]
    available |= own
    return {name: available[name] for name in names}


def measure(problem: Problem, setting: Setting) -> list[Row]:
    """The preparation and the peak memory of the first implementation, and the times of all."""
    builders = builders_of(problem, setting)
    first, build = next(iter(builders.items()))
    is_trained = problem.seqlen_q > 1
    rows = time_preparation(problem, first, setting)
    if setting.device == "cuda" and is_trained:
        rows += peak_memory(problem, first, build, setting)
    directions = [FORWARD, BACKWARD] if is_trained else [FORWARD]
    return rows + time_directions(problem, directions, builders, setting)


def time_preparation(problem: Problem, implementation: str, setting: Setting) -> list[Row]:
    inputs = setting.inputs(problem)
    if isinstance(problem, Indexed):
        calls = {LISTS: lists_of_indices(inputs)}
    else:
        calls = {
            TOPK: lambda: KeyIntervalMask.topk(inputs.bias, problem.window, problem.seqlen_q),
            LISTS: lambda: KeyLists.build(inputs.mask, problem.seqlen_q, is_causal=problem.is_causal),
        }
    seconds = medians(calls, setting.samples, setting.device)
    return [setting.row(problem.name, step, implementation, seconds=taken) for step, taken in seconds.items()]


def peak_memory(problem: Problem, implementation: str, build: Build, setting: Setting) -> list[Row]:
    """Forward and backward, inputs included."""
    before = torch.cuda.memory_allocated()
    inputs = setting.inputs(problem).requiring_grad()
    torch.cuda.reset_peak_memory_stats()
    try:
        call_for(BOTH, build(inputs), inputs.dout)()
    except (TypeError, ValueError, RuntimeError):
        return []  # the times show the refusal
    peak = torch.cuda.max_memory_allocated() - before
    tensors = 2 * sum(map(size, (inputs.query, inputs.key, inputs.value, inputs.dout)))
    return [setting.row(problem.name, BOTH, implementation, peak_bytes=peak, peak_over_tensors=peak / tensors)]


def add_arguments(parser) -> None:
    parser.add_argument("--sparse", choices=SPARSE, default="auto", help="of flash_dmattn (default: %(default)s)")
    parser.add_argument("--seqlen", type=int, help="replaces the workloads by one top-k mask: its number of keys")
    parser.add_argument(
        "--window", type=int, default=2048, help="with --seqlen: visible keys per row (default: %(default)s)"
    )
    parser.add_argument("--heads", type=int, nargs=2, default=(8, 2), help="query and KV heads (default: 8 2)")
    parser.add_argument("--head-dim", type=int, default=64, help="(default: %(default)s)")


def choose(options, problems: list[Problem]) -> list[Problem]:
    if options.seqlen is None:
        return problems
    return [mask_of("top-k mask", options.seqlen, options.window, *options.heads, options.head_dim)]


SUITES = {
    "sparse": Suite(
        "sparse",
        __doc__,
        WORKLOADS,
        measure,
        (OURS, OURS_TOP_K, OURS_TILES, *PEERS),
        DEMANDS,
        has_backends=True,
        arguments=add_arguments,
        choose=choose,
    )
}
