"""How fast is attention that pays for visible pairs only? Ours beside attention that goes over all keys.

    python benchmarks/sparse_performance.py --device cuda --json sparse.json
    python benchmarks/sparse_performance.py --device cuda --check    # exit status 1 where it is slower than asked for
    python benchmarks/sparse_performance.py --device cpu             # beside our own kernels without lists of keys

Every row sees, of the keys up to its own, the `w` of largest bias; each key/value head has its own bias. `topk` makes
that mask, beforehand; the lists of keys are built in the forward, and `key lists` says what of it they take. A step of
decoding is given lists that were made beforehand.

Where the name of the work says indices, each run of so many rows has the keys that the last of them sees, named
beforehand as by an indexer, or any at random, and `KeyLists.from_indices` makes the lists in the forward; intervals is
ours with the top-w mask, of the same density.

flex is FlexAttention with the same mask, read from the same intervals, and the same bias; its block mask is made
beforehand. cudnn is cuDNN's attention to all keys up to the row's own, without any mask or bias; cudnn-w lets every row
see the first w keys, which are as many products as are asked for, and none to look for. tiles is ours without lists of
keys.
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch
from performance import BACKWARD, FORWARD, Timing, Work, grouped, ratio, shrunk
from problem import Inputs, Problem
from report import (
    add_common,
    argument_parser,
    console,
    describe,
    dtype_of,
    environment,
    parse,
    progress,
    require_workloads,
    write_json,
)
from rich.markup import escape
from sparse import (
    LISTS,
    TOPK,
    Indexed,
    Memory,
    add_sparse_argument,
    by_indices,
    cudnn,
    cudnn_of_window,
    flex,
    indexed,
    measure,
    ours,
    show,
    top_w,
)

S8K, S32K, S131K, DECODE = "S8192 w1024", "S32768 w2048", "S131072 w2048", "decode, Sk131072 w2048"
CPU, CPU_INDICES = "S8192 w512", "S8192 k512, indices for each 64 rows"
EACH_64 = "S32768 k2048, indices for each 64 rows"
WORKLOADS = {
    "cpu": [top_w(CPU, 8192, 512, 8, 2, 64), indexed(CPU_INDICES, 8192, 512, 8, 2, 64, tile_rows=64)],
    "cuda": [
        top_w(S8K, 8192, 1024, 32, 8, 128),
        top_w(S32K, 32768, 2048, 32, 8, 128),
        top_w(S131K, 131072, 2048, 32, 8, 128),
        top_w(DECODE, 131072, 2048, 32, 8, 128, batch=8, seqlen_q=1),
        indexed("S8192 k512, indices for each row", 8192, 512, 32, 8, 128, tile_rows=1),
        indexed("S8192 k512, random indices for each row", 8192, 512, 32, 8, 128, tile_rows=1, at_random=True),
        indexed("S8192 k512, indices for each 64 rows", 8192, 512, 32, 8, 128, tile_rows=64),
        indexed(EACH_64, 32768, 2048, 32, 8, 128, tile_rows=64),
    ],
}

PEERS = ("flex", "cudnn", "cudnn-w", "tiles")
INTERVALS = "intervals"  # the peer of indices


def builders_of(
    problem: Problem, backends: list[str], peers: list[str], sparse: str
) -> dict[str, Callable[[Inputs], Work]]:
    peer_builders = {
        "flex": flex,
        "cudnn": cudnn,
        "cudnn-w": cudnn_of_window,
        "tiles": partial(ours, backends[0], "tiles"),
    }
    if isinstance(problem, Indexed):
        own = {name: partial(by_indices, name) for name in backends} | {INTERVALS: partial(ours, backends[0], "lists")}
    else:
        own = {name: partial(ours, name, sparse) for name in backends}
    return own | {peer: peer_builders[peer] for peer in peers}


# What --check asks for


@dataclass(frozen=True)
class Measured:
    """One workload, by one of our backends."""

    name: str
    timings: dict[str, dict[str, Timing]]  # by quantity and implementation
    memory: float | None  # over that of the tensors

    def seconds(self, quantity: str, name: str = "") -> float:
        timing = self.timings.get(quantity, {}).get(name or self.name)
        return math.nan if timing is None or timing.seconds is None else timing.seconds


def speed(peer: str, forward: float, backward: float, measured: Measured) -> Iterator[str]:
    for quantity, least in ((FORWARD, forward), (BACKWARD, backward)):
        times = ratio(measured.timings.get(quantity, {}), measured.name, peer) or math.nan
        if not times >= least:
            yield f"{quantity}: {times:.2f} x {peer}'s speed, at least {least:g} are asked for"


def over_window(forward: float, backward: float, measured: Measured) -> Iterator[str]:
    """Beside cudnn-w, which has no mask to make either."""
    for quantity, most, before in ((FORWARD, forward, measured.seconds(TOPK)), (BACKWARD, backward, 0.0)):
        times = (before + measured.seconds(quantity)) / measured.seconds(quantity, "cudnn-w")
        if not times <= most:
            of = f"{TOPK} and {quantity}" if before else quantity
            yield f"{of}: {times:.2f} x cudnn-w's time, at most {most:g} are asked for"


def milliseconds(quantity: str, most: float, measured: Measured) -> Iterator[str]:
    taken = 1e3 * measured.seconds(quantity)
    if not taken <= most:
        yield f"{quantity}: {taken:.2f} ms, at most {most:g} are asked for"


def part_of_lists(most: float, measured: Measured) -> Iterator[str]:
    part = measured.seconds(LISTS) / measured.seconds(FORWARD)
    if not part <= most:
        yield f"{LISTS}: {part:.0%} of the forward, at most {most:.0%} are asked for"


def memory(most: float, measured: Measured) -> Iterator[str]:
    times = math.nan if measured.memory is None else measured.memory
    if not times <= most:
        yield f"memory: {times:.2f} x that of the tensors, at most {most:g} are asked for"


DEMANDS = {
    CPU: [partial(speed, "tiles", 4, 4)],
    S8K: [partial(speed, "flex", 2, 2), partial(over_window, 1.6, 1.6)],
    S32K: [partial(speed, "cudnn", 3, 3), partial(over_window, 1.4, 1.5), partial(part_of_lists, 0.1)],
    S131K: [
        partial(speed, "cudnn", 22, 18),
        partial(part_of_lists, 0.1),
        partial(milliseconds, TOPK, 3),
        partial(memory, 3),
    ],
    DECODE: [partial(milliseconds, FORWARD, 0.1)],
    EACH_64: [partial(speed, INTERVALS, 1 / 1.15, 1 / 1.15), partial(part_of_lists, 0.1)],
}


def failures(timings: list[Timing], memories: list[Memory], name: str) -> list[str]:
    """A sentence for each figure that was not reached, or not measured."""
    by_workload: dict[str, dict[str, dict[str, Timing]]] = {}
    for (workload, _, quantity), group in grouped(timings).items():
        by_workload.setdefault(workload, {})[quantity] = group
    ratios = {memory.workload: memory.ratio for memory in memories if memory.implementation == name}
    return [
        f"{workload}, {failure}"
        for workload, by_quantity in by_workload.items()
        for demand in DEMANDS.get(workload, ())
        for failure in demand(Measured(name, by_quantity, ratios.get(workload)))
    ]


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 1 where ours refused, or where --check asks for more."""
    parser = argument_parser(__doc__, backends="the device's kernels")
    parser.add_argument(
        "--peer", action="append", choices=PEERS, help="may be repeated (default: all but tiles; tiles on the CPU)"
    )
    add_common(parser, dtype={}, workload={}, shrink={}, threads={}, samples={}, check={})
    add_sparse_argument(parser)
    options = parse(parser, arguments)
    names = options.backend or [options.device]
    peers = options.peer or (["tiles"] if options.device == "cpu" else [peer for peer in PEERS if peer != "tiles"])
    dtype = dtype_of(options)
    chosen = [problem for problem in WORKLOADS[options.device] if options.workload in problem.name]
    problems = [shrunk(problem, options.shrink) for problem in chosen]
    require_workloads(parser, options, problems)
    torch.set_num_threads(options.threads)

    on, where = console(), environment(options.device)
    on.print(describe(where), highlight=False)
    timings, memories = [], []
    with progress(on) as bar:
        task = bar.add_task("", total=len(problems))
        for problem in problems:
            bar.update(task, description=problem.name)
            builders = builders_of(problem, names, peers, options.sparse)
            taken, peak = measure(problem, dtype, builders, options.seed, options.samples, options.device)
            timings, memories = timings + taken, memories + peak
            bar.advance(task)

    indices = [INTERVALS] if any(isinstance(problem, Indexed) for problem in problems) else []
    show(on, timings, memories, names, peers + indices)
    if options.json:
        results = {"timings": list(map(asdict, timings)), "memory": list(map(asdict, memories))}
        write_json(options.json, where, sparse=options.sparse, shrink=options.shrink, seed=options.seed, **results)
    missed = failures(timings, memories, names[0]) if options.check else []
    for failure in missed:
        on.print(f"[bold red]{escape(failure)}[/]")
    return 1 if missed or any(timing.refusal for timing in timings if timing.implementation in names) else 0


if __name__ == "__main__":
    sys.exit(main())
