"""What does a whole call cost? Selection and the host's part in it, not the attention alone.

    python benchmarks/call_performance.py --device cuda --json calls.json
    python benchmarks/call_performance.py --device cuda --check       # exit status 1 where it is slower than asked for
    python benchmarks/call_performance.py --part decode --part host   # only these
    python benchmarks/call_performance.py --device cpu

Ours is flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True, window_size=w) as a user writes it: keys are selected
and lists made in the call. "auto", "tiles" and "lists" are what is said as `sparse`; "graph" is auto, captured as a
CUDA graph; "cache" is a graph that was captured once for a preallocated cache, and is told by a tensor how much of it
is filled: all, or a quarter.

prefill: cudnn is cuDNN's attention to all keys up to a row's own, without mask and bias. flex is FlexAttention with
    the same mask and bias; its block mask is made beforehand.
decode: one row. "by hand" is torch.topk of the bias, a gather of keys and values, and SDPA with the bias as its mask;
    "dense" is SDPA to all keys, without a bias. Both are the fastest of several ways, of which the JSON has each.
host: the time until a small call returns, beside SDPA in its own layout, whose mask is made beforehand.
selection: making the mask of a bias, and its lists of keys, as CUDA graphs; "calls" is both without a graph.

Times are medians, on CUDA with a cold L2 cache. What fails or has no memory says so in its place; the rest goes on.
"""

import gc
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from calls import (
    BY_HAND,
    DENSE,
    ROW_KERNELS,
    TAKES,
    by_hand,
    captured,
    dense,
    from_cache,
    host_seconds,
    sdpa,
    takes_lengths,
    whole_call,
)
from performance import (
    BOTH,
    FORWARD,
    Timing,
    call_for,
    grouped,
    in_short,
    limit_of,
    make_call,
    median_on_cuda,
    shown,
    shrunk,
    square,
    time_calls,
)
from problem import DTYPES, Inputs, Problem, make_inputs
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
    sentence,
    write_json,
)
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from sparse import LISTS, TOPK, cudnn, flex, top_w
from torch import Tensor

from flash_dmattn import KeyIntervalMask, KeyLists, flash_dmattn_func, flash_dmattn_func_auto
from flash_dmattn.masks import SPARSE

PREFILL, DECODE, HOST, SELECTION = PARTS = ("prefill", "decode", "host", "selection")
AUTO, GRAPH, CACHE, QUARTER = "auto", "graph", "cache", "cache, a quarter"
BY_HAND_GRAPH = f"{BY_HAND}, graph"
OURS, SDPA = "ours", "sdpa"
BOTH_STEPS, CALLS = "both", "calls"
GPU_TIME, HOST_TIME = "GPU time", "host time"
PEERS = ("cudnn", "flex", BY_HAND, DENSE, SDPA)


# The workloads


def one_row(batch: int, seqlen: int, window: int, *heads: int) -> Problem:
    return top_w(f"B{batch} Sk{seqlen} w{window}", seqlen, window, *heads, batch=batch, seqlen_q=1)


def rows(seqlen: int, window: int, *heads: int) -> Problem:
    return top_w(f"S{seqlen} w{window}", seqlen, window, *heads)


def selected(seqlen: int, window: int) -> Problem:
    return top_w(f"8 heads, S{seqlen} w{window}", seqlen, window, 8, 8, 8)


@dataclass(frozen=True)
class Small:
    """A small call and what it is differentiated in."""

    problem: Problem
    trained: tuple[str, ...] = ()


def small(name: str, trained: tuple[str, ...] = (), **options) -> Small:
    return Small(square(name, 1, 8, 128, 64, **options), trained)


QKV = ("query", "key", "value")
PLAIN, MASKED, WINDOW = "forward", "forward, bool mask and dense bias", "forward, key bias and window_size"
PLAIN_BOTH, BIAS, DBIAS = "forward + backward", "forward + backward, dense bias", "forward + backward with dbias"
DENSE_BIAS, KEY_BIAS = {"bias": "B H Sq Sk"}, {"bias": "B H 1 Sk"}
SMALL_CALLS = [
    small(PLAIN),
    small(MASKED, mask="B H Sq Sk", **DENSE_BIAS),
    small(WINDOW, window=32, as_intervals=True, is_causal=True, **KEY_BIAS),
    small(PLAIN_BOTH, QKV),
    small(BIAS, QKV, **DENSE_BIAS),
    small(DBIAS, (*QKV, "bias"), **DENSE_BIAS),
]
LENGTHS = [(1024, 256), (2048, 512), (4096, 1024), (8192, 1024), (16384, 2048), (32768, 2048), (131072, 2048)]
WORKLOADS = {
    "cpu": {
        PREFILL: [rows(2048, 256, 8, 2, 64)],
        DECODE: [one_row(batch, 8192, 512, 8, 2, 64) for batch in (1, 4)],
        HOST: SMALL_CALLS,
        SELECTION: [selected(8192, 512)],
    },
    "cuda": {
        PREFILL: [rows(*sizes, 32, 8, 128) for sizes in LENGTHS],
        DECODE: [one_row(n, *sizes, 32, 8, 128) for sizes in ((8192, 1024), (131072, 2048)) for n in (1, 8, 32)],
        HOST: SMALL_CALLS,
        SELECTION: [selected(seqlen, 2048) for seqlen in (8192, 32768, 131072)],
    },
}


# What --check asks for


@dataclass(frozen=True)
class Demand:
    part: str
    workload: str
    quantity: str
    name: str
    at_most: float
    peer: str | None = None  # at most so many times as long as it; None: seconds


DEMANDS = [
    Demand(PREFILL, "S2048 w512", FORWARD, AUTO, 2.0, "cudnn"),
    Demand(PREFILL, "S4096 w1024", FORWARD, AUTO, 1.3, "cudnn"),
    Demand(PREFILL, "S8192 w1024", FORWARD, AUTO, 0.75, "cudnn"),
    Demand(DECODE, "B8 Sk131072 w2048", FORWARD, AUTO, 0.4, BY_HAND),
    Demand(DECODE, "B1 Sk131072 w2048", FORWARD, AUTO, 0.6, BY_HAND),
    Demand(DECODE, "B1 Sk131072 w2048", FORWARD, AUTO, 1.0, DENSE),
    Demand(DECODE, "B32 Sk8192 w1024", FORWARD, AUTO, 0.45, DENSE),
    Demand(HOST, PLAIN, HOST_TIME, OURS, 2.0, SDPA),
    Demand(HOST, MASKED, HOST_TIME, OURS, 3.0, SDPA),
    Demand(HOST, BIAS, HOST_TIME, OURS, 1.5, SDPA),
    Demand(HOST, DBIAS, HOST_TIME, OURS, 1.5, SDPA),
    Demand(HOST, WINDOW, HOST_TIME, OURS, 100e-6),
    Demand(SELECTION, "8 heads, S8192 w2048", GPU_TIME, BOTH_STEPS, 0.06e-3),
    Demand(SELECTION, "8 heads, S32768 w2048", GPU_TIME, BOTH_STEPS, 0.12e-3),
    Demand(SELECTION, "8 heads, S131072 w2048", GPU_TIME, BOTH_STEPS, 0.35e-3),
]
AUTO_AT_MOST = 1.1  # times the fastest of SPARSE

Group = dict[str, Timing]  # of one workload and quantity, by implementation


def fastest(timings: list[Timing]) -> Timing | None:
    """Where none was timed, the first, which says why."""
    timed = [timing for timing in timings if timing.seconds is not None]
    return min(timed, key=lambda timing: timing.seconds) if timed else next(iter(timings), None)


def named(group: Group, name: str) -> Timing | None:
    """An implementation's timing; of one that goes several ways, "name: way", the fastest."""
    return fastest([timing for key, timing in group.items() if key == name or key.startswith(f"{name}: ")])


def best_sparse(group: Group) -> Timing | None:
    return fastest([group[sparse] for sparse in SPARSE if sparse in group])


def seconds_of(timing: Timing | None) -> float:
    return math.nan if timing is None or timing.seconds is None else timing.seconds


def times(group: Group, name: str, peer: str) -> float:
    """How many times as long it takes as the peer; NaN where one of them is not known."""
    return seconds_of(named(group, name)) / seconds_of(named(group, peer))


def missed(part: str, workloads: list[str], timings: list[Timing]) -> Iterator[str]:
    """A sentence for each figure that was not reached, or not measured."""
    groups = {(workload, quantity): group for (workload, _, quantity), group in grouped(timings).items()}
    for demand in DEMANDS:
        if demand.part != part or demand.workload not in workloads:
            continue
        group = groups.get((demand.workload, demand.quantity), {})
        if demand.peer is None:
            taken = seconds_of(named(group, demand.name))
            got, asked = (f"{1e3 * seconds:.3f} ms" for seconds in (taken, demand.at_most))
        else:
            taken = times(group, demand.name, demand.peer)
            got, asked = f"{taken:.2f} x the time of {demand.peer}", f"{demand.at_most:g}"
        if not taken <= demand.at_most:
            yield f"{part}, {demand.workload}, {demand.quantity}: {got}, at most {asked} are asked for"
    for (workload, quantity), group in groups.items():
        if part in (PREFILL, DECODE):
            best = best_sparse(group)
            taken = seconds_of(group.get(AUTO)) / seconds_of(best)
            if not taken <= AUTO_AT_MOST:
                name = "the fastest" if best is None else best.implementation
                yield f"{part}, {workload}, {quantity}: auto takes {taken:.2f} x the time of {name}"


# Measuring


@dataclass(frozen=True)
class Setting:
    device: str
    dtype: str
    attention: Callable[..., Tensor]
    samples: int
    seed: int

    def inputs(self, problem: Problem) -> Inputs:
        return make_inputs(problem, DTYPES[self.dtype], self.device, self.seed)

    def time(self, name: str, quantity: str, makers: dict[str, Callable], limit: float | None = None) -> list[Timing]:
        clock = median_on_cuda if self.device == "cuda" else None
        return time_calls((name, self.dtype, quantity), makers, self.samples, clock, limit, refused=(Exception,))


def prefill(problem: Problem, setting: Setting) -> list[Timing]:
    torch.compiler.reset()
    inputs, timings = setting.inputs(problem), []
    builders = {sparse: partial(whole_call, setting.attention, sparse=sparse) for sparse in SPARSE}
    if setting.device == "cuda":
        builders |= {"cudnn": cudnn, "flex": flex}
    for quantity, given in ((FORWARD, inputs), (BOTH, inputs.requiring_grad())):
        makers = {name: partial(make_call, quantity, build, given) for name, build in builders.items()}
        limit = limit_of(quantity, inputs, mask_is_given=False)
        timings += setting.time(problem.name, quantity, makers, limit)
    return timings


def decode(problem: Problem, setting: Setting) -> list[Timing]:
    inputs, attention, device = setting.inputs(problem), setting.attention, setting.device
    time = partial(setting.time, problem.name, FORWARD)
    limit = limit_of(FORWARD, inputs, mask_is_given=False)
    inputs = replace(inputs, mask=None)  # that of the window has been counted, and takes memory

    calls = {sparse: whole_call(attention, inputs, sparse=sparse).forward for sparse in SPARSE}
    makers = {sparse: partial(lambda call: call, call) for sparse, call in calls.items()}
    if device == "cuda":
        makers[GRAPH] = partial(captured, calls[AUTO], device)
    with_lengths = takes_lengths(attention)
    if with_lengths:
        makers[CACHE] = partial(from_cache, attention, inputs, 1, device)
    timings = time(makers, limit)
    if with_lengths:
        timings += time({QUARTER: partial(from_cache, attention, inputs, 4, device)})

    ways = {}  # by hand: the kernel and the call of each
    for kernel in ROW_KERNELS[device]:
        taken = {taking: partial(by_hand, inputs, taking, kernel) for taking in TAKES if BY_HAND in kernel.uses}
        makers = {f"{BY_HAND}: {taking}, {kernel.name}": make for taking, make in taken.items()}
        ways |= {name: (kernel, make) for name, make in makers.items()}
        if DENSE in kernel.uses:
            makers[f"{DENSE}: {kernel.name}"] = partial(dense, inputs, kernel)
        with kernel.chosen():
            timings += time(makers, limit)
    if device == "cuda":
        kernel, make = ways[fastest([timing for timing in timings if timing.implementation in ways]).implementation]
        with kernel.chosen():
            timings += time({BY_HAND_GRAPH: lambda: captured(make(), device)}, limit)
    return timings


def host(case: Small, setting: Setting) -> list[Timing]:
    problem, device = case.problem, setting.device
    inputs = setting.inputs(problem)
    for name in case.trained:
        inputs.leaves()[name].requires_grad_()
    quantity = BOTH if case.trained else FORWARD
    makers = {
        OURS: lambda: call_for(quantity, whole_call(setting.attention, inputs), inputs.dout),
        SDPA: lambda: call_for(quantity, sdpa(inputs), inputs.dout.transpose(1, 2).contiguous()),
    }
    key = (problem.name, setting.dtype, HOST_TIME)
    return time_calls(key, makers, setting.samples, partial(host_seconds, device=device), refused=(Exception,))


def selection(problem: Problem, setting: Setting) -> list[Timing]:
    inputs = setting.inputs(problem)
    seqlen = problem.seqlen_q

    def topk() -> KeyIntervalMask:
        return KeyIntervalMask.topk(inputs.bias, problem.window, seqlen)

    def lists(mask: KeyIntervalMask) -> KeyLists:
        return KeyLists.build(mask, seqlen, is_causal=True)

    calls = {BOTH_STEPS: lambda: lists(topk()), TOPK: topk, LISTS: lambda: lists(inputs.mask)}
    makers = {name: partial(captured, call, setting.device) for name, call in calls.items()}
    return setting.time(problem.name, GPU_TIME, makers | {CALLS: lambda: calls[BOTH_STEPS]})


# What is shown


@dataclass(frozen=True)
class Part:
    measure: Callable[..., list[Timing]]
    columns: tuple[str, ...]  # implementations, ours first
    ratios: tuple[tuple[str, str], ...] = ()
    unit: str = "ms"


SHOWN = {
    PREFILL: Part(prefill, (*SPARSE, "cudnn", "flex"), ((AUTO, "cudnn"), (AUTO, "flex"))),
    DECODE: Part(
        decode,
        (*SPARSE, GRAPH, CACHE, QUARTER, BY_HAND, BY_HAND_GRAPH, DENSE),
        ((AUTO, BY_HAND), (AUTO, DENSE), (GRAPH, BY_HAND_GRAPH)),
    ),
    HOST: Part(host, (OURS, SDPA), ((OURS, SDPA),), "us"),
    SELECTION: Part(selection, (BOTH_STEPS, TOPK, LISTS, CALLS)),
}
UNITS = {"ms": (1e3, "{:.3f}"), "us": (1e6, "{:.1f}")}


def table(name: str, timings: list[Timing]) -> Table:
    part, groups = SHOWN[name], grouped(timings)
    columns = [column for column in part.columns if any(named(group, column) for group in groups.values())]
    ratios = [pair for pair in part.ratios if set(pair) <= set(columns)]
    has_best, has_limit = AUTO in columns, any(timing.fraction_of_limit for timing in timings)
    quantities = dict.fromkeys(quantity for _, _, quantity in groups if quantity)
    several = len(quantities) > 1
    header = f"{name}, {part.unit}" if several else ", ".join([name, *quantities, part.unit])
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column(header, no_wrap=True)
    if several:
        table.add_column("medians of", no_wrap=True)
    for header in (
        *columns,
        *(["best"] if has_best else []),
        *(f"{one} / {peer}" for one, peer in ratios),
        *([f"{AUTO}, of the H200's limit"] if has_limit else []),
    ):
        table.add_column(header, justify="right", max_width=9)
    scale, form = UNITS[part.unit]
    for (workload, _, quantity), group in groups.items():
        cells = [cell(named(group, column), form, scale) for column in columns]
        if has_best:
            best = best_sparse(group)
            cells.append("" if best is None or best.seconds is None else best.implementation)
        cells += [shown(None if math.isnan(x := times(group, *pair)) else x, "{:.2f}") for pair in ratios]
        if has_limit:
            cells.append(shown(group[AUTO].fraction_of_limit if AUTO in group else None, "{:.0%}"))
        labels = (workload, quantity) if several else (workload,)
        table.add_row(*map(escape, (*labels, *cells)))
    return table


def cell(timing: Timing | None, form: str, scale: float) -> str:
    return "" if timing is None else shown(timing.seconds, form, scale) or in_short(timing.refusal)


def show(on: Console, name: str, timings: list[Timing]) -> None:
    on.print(table(name, timings))
    for (workload, _, _), group in grouped(timings).items():
        ways = [named(group, peer) for peer in (BY_HAND, DENSE)]
        fastest_ways = "; ".join(way.implementation for way in ways if way is not None and way.seconds is not None)
        if fastest_ways:
            on.print(f"{workload}, fastest {escape(fastest_ways)}", highlight=False)
    refusals: dict[tuple[str, str], list[str]] = {}
    for timing in timings:
        if timing.refusal:
            refusals.setdefault((timing.implementation, timing.refusal), []).append(timing.workload)
    for (implementation, refusal), workloads in refusals.items():
        everywhere = {timing.workload for timing in timings} == set(workloads)
        places = "everywhere" if everywhere else ", ".join(dict.fromkeys(workloads))
        on.print(f"[yellow]{escape(implementation)}[/], {escape(places)}: {escape(refusal)}")


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 1 where ours failed, or where --check asks for more."""
    parser = argument_parser(__doc__, backends="the device's kernels, as flash_dmattn_func finds them")
    parser.add_argument("--part", action="append", choices=PARTS, help="may be repeated (default: all)")
    add_common(
        parser,
        dtype={},
        workload={},
        shrink={"help": "divide lengths and windows, but of small calls"},
        threads={},
        samples={},
        check={"help": "exit status 1 where a call is slower than was asked for"},
    )
    options = parse(parser, arguments)
    if len(options.backend or ()) > 1:
        parser.error("--backend: one at a time")
    if options.check and (options.device == "cpu" or options.shrink > 1):
        parser.error("--check asks for what was measured on CUDA, without --shrink")
    work = chosen(options)
    require_workloads(parser, options, work)
    torch.set_num_threads(options.threads)

    attention = flash_dmattn_func_auto(options.backend[0]) if options.backend else flash_dmattn_func
    setting = Setting(options.device, dtype_of(options), attention, options.samples, options.seed)
    on, where = console(), environment(options.device)
    on.print(describe(where), highlight=False)
    if DECODE in work and not takes_lengths(attention):
        on.print("flash_dmattn_func has no cache_seqlens: its rows are left out", highlight=False)
    results: dict[str, list[Timing]] = {part: [] for part in work}
    failures: list[str] = []

    def write() -> None:
        if options.json:
            parts = {part: list(map(asdict, timings)) for part, timings in results.items()}
            about = {"backend": options.backend, "shrink": options.shrink, "seed": options.seed}
            write_json(options.json, where, **about, parts=parts, missed=failures)

    with progress(on) as bar:
        task = bar.add_task("", total=sum(map(len, work.values())))
        for part, workloads in work.items():
            for workload in workloads:
                name = name_of(workload)
                bar.update(task, description=f"{part}, {name}")
                results[part] += measured(part, workload, setting)
                write()  # what there is, should the rest not come to its end
                bar.advance(task)

    for part, timings in results.items():
        show(on, part, timings)
        if options.check:
            failures += missed(part, list(map(name_of, work[part])), timings)
    write()
    for failure in failures:
        on.print(f"[bold red]{escape(failure)}[/]")
    ours = [timing for timings in results.values() for timing in timings if not timing.implementation.startswith(PEERS)]
    return 1 if failures or any(timing.refusal for timing in ours) else 0


def name_of(workload: Problem | Small) -> str:
    return workload.problem.name if isinstance(workload, Small) else workload.name


def chosen(options) -> dict[str, list[Problem | Small]]:
    """By part; no part that nothing is left of."""
    work = {}
    for part in dict.fromkeys(options.part or PARTS):
        workloads = [workload for workload in WORKLOADS[options.device][part] if options.workload in name_of(workload)]
        if part != HOST:
            workloads = [shrunk(problem, options.shrink) for problem in workloads]
        if workloads:
            work[part] = workloads
    return work


def measured(part: str, workload: Problem | Small, setting: Setting) -> list[Timing]:
    """Its timings, or one that says why there are none."""
    try:
        gc.collect()
        if setting.device == "cuda":
            torch.cuda.empty_cache()
        return SHOWN[part].measure(workload, setting)
    except Exception as error:
        return [Timing(name_of(workload), setting.dtype, "", SHOWN[part].columns[0], refusal=sentence(error))]


if __name__ == "__main__":
    sys.exit(main())
