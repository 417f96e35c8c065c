"""How fast are small calls on the CPU? Ours against SDPA on the same work: short sequences, decoding, image windows.

    python benchmarks/small_performance.py --json small.json
    python benchmarks/small_performance.py --check                          # exit status 1 where ours is too slow
    python benchmarks/small_performance.py --workload decode --threads 2 --dtype bfloat16

SDPA has its tensors in the layout that is its own, (B, H, S, D), and grouped heads as such. Both take turns, in batches
of a few milliseconds; times are the least of all batches, and the speed is the median of SDPA's time over ours, batch
by batch: what else the machine does slows both alike.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from calls import sdpa, whole_call
from performance import BOTH, FORWARD, call_for, square
from problem import DTYPES, Problem, make_inputs
from report import (
    add_common,
    argument_parser,
    console,
    describe,
    environment,
    parse,
    progress,
    require_workloads,
    write_json,
)
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from flash_dmattn import flash_dmattn_func, flash_dmattn_func_auto

FORWARD_ONLY, WITH_BACKWARD = (FORWARD,), (FORWARD, BOTH)


@dataclass(frozen=True)
class Small:
    problem: Problem
    quantities: tuple[str, ...] = FORWARD_ONLY
    at_least: float = 0.8  # of SDPA's speed, where --check asks


def few_rows(name: str, batch: int, heads: int, kv_heads: int, rows: int, keys: int, head_dim: int) -> Small:
    return Small(square(name, batch, heads, rows, head_dim, kv_heads=kv_heads, seqlen_k=keys))


WORKLOADS = [
    Small(square("host time, B1 H1 S16 D16", 1, 1, 16, 16), WITH_BACKWARD, at_least=0.5),
    few_rows("decode, B8 H8 Sq1 Sk2048 D64", 8, 8, 8, 1, 2048, 64),
    few_rows("decode, B1 H32/8 Sq1 Sk4096 D128", 1, 32, 8, 1, 4096, 128),
    few_rows("decode, B1 H8 Sq1 Sk512 D64", 1, 8, 8, 1, 512, 64),
    few_rows("decode, B1 H8 Sq8 Sk2048 D64", 1, 8, 8, 8, 2048, 64),
    Small(square("windows, B256 H4 S49 D32, bias [1,H,S,S]", 256, 4, 49, 32, bias="1 H Sq Sk"), WITH_BACKWARD),
    Small(square("short, B1 H8 S128 D64", 1, 8, 128, 64), WITH_BACKWARD),
]


@dataclass(frozen=True)
class Comparison:
    workload: str
    dtype: str
    quantity: str
    threads: int
    ours: float  # seconds
    sdpa: float
    speed: float  # SDPA's time over ours
    at_least: float


def compare(calls: list[Callable[[], object]], samples: int, batch_seconds: float) -> tuple[float, float, float]:
    """The least seconds of two calls, and the median of the second's over the first's."""

    def seconds(call: Callable[[], object], times: int) -> float:
        started = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - started) / times

    for call in calls:
        call()
    times = [max(1, int(batch_seconds / seconds(call, 3))) for call in calls]
    batches = [[seconds(call, n) for call, n in zip(calls, times)] for _ in range(samples)]
    first, second = map(min, zip(*batches))
    return first, second, statistics.median(b / a for a, b in batches)


def measure(small: Small, dtype: str, threads: int, attention: Callable, samples: int, seed: int) -> list[Comparison]:
    torch.set_num_threads(threads)
    inputs, found = make_inputs(small.problem, DTYPES[dtype], "cpu", seed), []
    for quantity in small.quantities:
        given = inputs if quantity == FORWARD else inputs.requiring_grad()
        calls = [
            call_for(quantity, whole_call(attention, given), given.dout),
            call_for(quantity, sdpa(given), given.dout.transpose(1, 2).contiguous()),
        ]
        figures = compare(calls, samples, batch_seconds=0.01)
        found.append(Comparison(small.problem.name, dtype, quantity, threads, *figures, small.at_least))
    return found


def table(found: list[Comparison]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for header in ("workload", "dtype", "quantity"):
        table.add_column(header, no_wrap=True)
    for header in ("threads", "ours, us", "sdpa, us", "sdpa / ours", "asked for"):
        table.add_column(header, justify="right")
    for one in found:
        figures = (f"{1e6 * one.ours:.1f}", f"{1e6 * one.sdpa:.1f}", f"{one.speed:.2f}", f"{one.at_least:g}")
        table.add_row(*map(escape, (one.workload, one.dtype, one.quantity, str(one.threads), *figures)))
    return table


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 1 where --check asks for more."""
    parser = argument_parser(__doc__, backends="the CPU kernels, as flash_dmattn_func finds them")
    add_common(
        parser,
        dtype={"action": "append", "help": "may be repeated (default: float32, bfloat16)"},
        workload={},
        threads={"action": "append", "default": None, "help": "may be repeated (default: 2 and 1)"},
        samples={"default": 25, "help": "batches of each (default: %(default)s)"},
        check={},
    )
    options = parse(parser, arguments)
    if options.device == "cuda":
        parser.error("--device cuda: small calls there are a part of call_performance.py")
    if len(options.backend or ()) > 1:
        parser.error("--backend: one at a time")
    work = [small for small in WORKLOADS if options.workload in small.problem.name]
    require_workloads(parser, options, work)
    attention = flash_dmattn_func_auto(options.backend[0]) if options.backend else flash_dmattn_func
    all_threads = options.threads or [2, 1]
    cases = [
        (small, dtype, threads)
        for threads in all_threads
        for small in work
        for dtype in options.dtype or ["float32", "bfloat16"]
    ]
    torch.set_num_threads(max(all_threads))
    on, where, found = console(), environment("cpu"), []
    on.print(describe(where), highlight=False)
    with progress(on) as bar:
        task = bar.add_task("", total=len(cases))
        for small, dtype, threads in cases:
            bar.update(task, description=small.problem.name)
            found += measure(small, dtype, threads, attention, options.samples, options.seed)
            bar.advance(task)
    on.print(table(found))
    missed = [one for one in found if options.check and not one.speed >= one.at_least]
    failures = [
        f"{one.workload}, {one.dtype}, {one.quantity}, {one.threads} threads: {one.speed:.2f} x the speed of SDPA, "
        f"{one.at_least:g} is asked for"
        for one in missed
    ]
    for failure in failures:
        on.print(f"[bold red]{escape(failure)}[/]")
    if options.json:
        about = {"backend": options.backend, "seed": options.seed, "samples": options.samples}
        write_json(options.json, where, **about, comparisons=list(map(asdict, found)), missed=failures)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
