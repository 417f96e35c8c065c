"""Times attention over a sequence that is sharded over GPUs, and counts the bytes that go between them.

    torchrun --nproc-per-node 2 benchmarks/parallel_performance.py --device cuda --check
    torchrun --nproc-per-node 8 benchmarks/parallel_performance.py --device cpu     # bytes and their balance, with gloo

Each workload is done by one rank alone, with the whole sequence and with a rank's share of it, and by all ranks: by
ours, by gathering all keys and values first ("all-gather"), and, where it can do the work, by PyTorch's ring attention
(torch.distributed.tensor.experimental.context_parallel). Times are medians, of the slowest rank.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from problem import DTYPES
from report import (
    REFUSALS,
    add_common,
    argument_parser,
    console,
    describe,
    dtype_of,
    environment,
    parse,
    require_workloads,
    sentence,
    write_json,
)
from rich.markup import escape
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from flash_dmattn import KeyIntervalMask, flash_dmattn_func
from flash_dmattn.parallel import context_parallel_attention, count_traffic, shard

ALONE, SHARE, OURS, ZIGZAG, GATHER, RING = (
    "one rank",
    "one rank, S / R",
    "ours",
    "zigzag",
    "all-gather",
    "PyTorch's ring",
)


@dataclass(frozen=True)
class Workload:
    name: str
    seqlen: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None  # None: dense causal, without a bias
    methods: tuple[str, ...] = (ALONE, SHARE, OURS, GATHER)


DENSE = (ALONE, SHARE, OURS, ZIGZAG, GATHER, RING)
WORKLOADS = {
    "cpu": [
        Workload("S2048 w128 H4/2 D64", 2048, 4, 2, 64, 128),
        Workload("dense causal S1024 H4/2 D64", 1024, 4, 2, 64, methods=DENSE),
    ],
    "cuda": [
        Workload("S262144 w2048 H32/8 D128", 262144, 32, 8, 128, 2048),
        Workload("S1048576 w2048 H32/8 D128", 1048576, 32, 8, 128, 2048, methods=(SHARE, OURS)),
        Workload("dense causal S65536 H32/8 D128", 65536, 32, 8, 128, methods=DENSE),
    ],
}
# What --check asks for, of two ranks.
STRONG = {"S262144 w2048 H32/8 D128": 1.85, "dense causal S65536 H32/8 D128": 1.7}
WEAK = {"S1048576 w2048 H32/8 D128": 0.95}
MOST_BYTES = 1.2  # times the keys and values of a window, their gradients and the bias


@dataclass
class Measured:
    """Of one method: times in seconds, of the slowest rank, and bytes of each rank."""

    workload: str
    method: str
    forward: float | None = None
    both: float | None = None  # forward and backward
    sent: list[int] = field(default_factory=list)  # in a forward and a backward
    received: list[int] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)  # beside the inputs
    budget: int | None = None  # bytes that a rank should send: those of a window, its gradients and the bias
    refusal: str | None = None


@dataclass
class Rows:
    """Whole tensors, alike on every rank; without a window there is no bias."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    dout: Tensor

    def map(self, function: Callable[[str, Tensor], Tensor]) -> Rows:
        return Rows(**{name: x if x is None else function(name, x) for name, x in vars(self).items()})


def make_rows(work: Workload, dtype: torch.dtype, device: str, seed: int) -> Rows:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    rows, keys = ((1, work.seqlen, heads, work.head_dim) for heads in (work.heads, work.kv_heads))
    bias = None if work.window is None else normal(1, work.kv_heads, 1, work.seqlen, dtype=torch.float32)
    return Rows(normal(*rows), normal(*keys), normal(*keys), bias, normal(*rows) / 8)


def own_rows(rows: Rows, layout: str = "contiguous") -> Rows:
    return rows.map(lambda name, x: shard(x, 3 if name == "bias" else 1, layout=layout).contiguous())


# The methods: each gives, from the whole tensors, the rows to differentiate in and the function to time.

Method = Callable[[Workload, Rows], tuple[Rows, Callable[[Rows], Tensor]]]


def options_of(work: Workload) -> dict[str, object]:
    return {"is_causal": True, "window_size": work.window}


def alone(work: Workload, rows: Rows) -> tuple[Rows, Callable[[Rows], Tensor]]:
    return rows, lambda own: flash_dmattn_func(own.query, own.key, own.value, attn_bias=own.bias, **options_of(work))


def share(work: Workload, rows: Rows) -> tuple[Rows, Callable[[Rows], Tensor]]:
    return alone(work, own_rows(rows))


def ours(work: Workload, rows: Rows, layout: str = "contiguous") -> tuple[Rows, Callable[[Rows], Tensor]]:
    def attend(own: Rows) -> Tensor:
        return context_parallel_attention(
            own.query, own.key, own.value, attn_bias=own.bias, layout=layout, **options_of(work)
        )

    return own_rows(rows, layout), attend


def zigzag(work: Workload, rows: Rows) -> tuple[Rows, Callable[[Rows], Tensor]]:
    return ours(work, rows, "zigzag")


class Gather(torch.autograd.Function):
    """(n, ..) of each rank to (R n, ..); gradients come back summed over the ranks."""

    @staticmethod
    def forward(ctx, part: Tensor) -> Tensor:
        return torch.cat(all_gather(part.contiguous()))

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        parts = [x.contiguous() for x in grad.chunk(dist.get_world_size())]
        part = torch.empty_like(parts[0])
        dist.reduce_scatter(part, parts)
        return part


def all_gather(part: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part)
    return parts


def gather(work: Workload, rows: Rows) -> tuple[Rows, Callable[[Rows], Tensor]]:
    """All keys and values in one go, and the kernels that one GPU has."""
    own = own_rows(rows)
    seqlen = own.query.shape[1]
    seen = (dist.get_rank() + 1) * seqlen

    def whole(part: Tensor, dim: int) -> Tensor:
        return Gather.apply(part.movedim(dim, 0)).movedim(0, dim).narrow(dim, 0, seen)

    def attend(own: Rows) -> Tensor:
        key, value = whole(own.key, 1), whole(own.value, 1)
        if work.window is None:
            return flash_dmattn_func(own.query, key, value, is_causal=True)
        bias = whole(own.bias, 3).contiguous()
        mask = KeyIntervalMask.topk(bias, work.window, seqlen)
        return flash_dmattn_func(own.query, key, value, mask, bias, is_causal=True)

    return own, attend


def gathered_bytes(own: Rows) -> int:
    """What all-gather sends in a forward and a backward."""
    tensors = [x for x in (own.key, own.value, own.bias) if x is not None]
    return 2 * (dist.get_world_size() - 1) * sum(x.nbytes for x in tensors)


@contextlib.contextmanager
def ring(work: Workload, rows: Rows) -> Iterator[tuple[Rows, Callable[[Rows], Tensor]]]:
    """It shards the tensors that it is given, in place, while its context lasts."""
    from torch.distributed.tensor.experimental import context_parallel

    if work.window is not None:
        raise ValueError("it takes neither mask nor bias")
    mesh = init_device_mesh(rows.query.device.type, (dist.get_world_size(),))
    # (B, H, S, D), with keys and values for every head: its ring takes no grouped ones.
    group = work.heads // work.kv_heads
    repeated = rows.map(lambda name, x: x.repeat_interleave(group, 2) if name in ("key", "value") else x)
    parts = [x.transpose(1, 2).contiguous() for x in (repeated.query, repeated.key, repeated.value, repeated.dout)]

    def attend(own: Rows) -> Tensor:
        return F.scaled_dot_product_attention(own.query, own.key, own.value, is_causal=True)

    with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2] * 4, no_restore_buffers=set(parts)):
        query, key, value, dout = parts
        yield Rows(query, key, value, None, dout), attend


METHODS: dict[str, Method] = {ALONE: alone, SHARE: share, OURS: ours, ZIGZAG: zigzag, GATHER: gather, RING: ring}


# Measuring


def measure(work: Workload, method: str, dtype: torch.dtype, device: str, seed: int, samples: int) -> Measured:
    """One method. A rank that refuses takes all others with it, so that none waits for it."""
    result = Measured(work.name, method)
    if method == OURS and work.window is not None:
        keys = 2 * work.window * work.kv_heads * work.head_dim * dtype.itemsize
        size = dist.get_world_size()
        result.budget = 2 * keys + work.seqlen * (size - 1) // size * work.kv_heads * 4
    try:
        made = METHODS[method](work, make_rows(work, dtype, device, seed))
        with made if method == RING else contextlib.nullcontext(made) as (rows, attend):
            rows = rows.map(lambda name, x: x.requires_grad_() if name != "dout" else x)
            forward, both = timed(rows, attend, samples, device)
            sent, received, peak = counted(rows, attend, device)
            if method == GATHER:
                sent = received = gathered_bytes(rows)
    except (*REFUSALS, NotImplementedError) as error:
        result.refusal = sentence(error)
    refusals = [refusal for refusal in of_ranks(result.refusal) if refusal]
    if refusals:
        return replace(result, refusal=refusals[0])
    times = of_ranks((forward, both))
    result.forward, result.both = (max(of_rank) for of_rank in zip(*times))
    result.sent, result.received, result.peak = map(list, zip(*of_ranks((sent, received, peak))))
    return result


def of_ranks(value: object) -> list:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def leaves_of(rows: Rows) -> list[Tensor]:
    return [x for name, x in vars(rows).items() if x is not None and name != "dout"]


def clock(device: str) -> float:
    """With the device's work done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(rows: Rows, attend: Callable[[Rows], Tensor], samples: int, device: str) -> tuple[float, float]:
    """Seconds of a forward, and of a forward and a backward: medians of so many, after two that are not counted."""
    taken = []
    for _ in range(samples + 2):
        dist.barrier()
        started = clock(device)
        out = attend(rows)
        between = clock(device)
        torch.autograd.grad(out, leaves_of(rows), rows.dout)
        taken.append((between - started, clock(device) - started))
    return tuple(map(statistics.median, zip(*taken[2:])))


def counted(rows: Rows, attend: Callable[[Rows], Tensor], device: str) -> tuple[int, int, int]:
    """Bytes sent and received in a forward and a backward, and the peak of memory beside the inputs, 0 on the CPU."""
    before = 0
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with count_traffic() as traffic:
        torch.autograd.grad(attend(rows), leaves_of(rows), rows.dout)
        clock(device)
    return traffic.sent, traffic.received, torch.cuda.max_memory_allocated() - before if device == "cuda" else 0


# What it shows


def show(on, results: list[Measured]) -> None:
    table = Table(title=f"{dist.get_world_size()} ranks")
    for column in ("workload", "method"):
        table.add_column(column, no_wrap=True)
    quantities = ("forward, ms", "+ backward, ms", "x one rank", "weak")
    for column in (*quantities, "sent, MiB", "x budget", "most / mean", "peak, GiB"):
        table.add_column(column, justify="right")
    whole, shares = (
        {result.workload: result.both for result in results if result.method == method} for method in (ALONE, SHARE)
    )
    for result in results:
        if result.refusal:
            table.add_row(result.workload, result.method, "-", "-")
            continue
        mean = statistics.mean(result.sent)
        of_one, of_share = whole.get(result.workload), shares.get(result.workload)
        table.add_row(
            *(result.workload, result.method, f"{1e3 * result.forward:.2f}", f"{1e3 * result.both:.2f}"),
            f"{of_one / result.both:.2f}" if of_one else "",
            f"{of_share / result.both:.2f}" if of_share and result.method not in (ALONE, SHARE) else "",
            f"{max(result.sent) / 2**20:.2f}" if mean else "",
            f"{max(result.sent) / result.budget:.2f}" if result.budget else "",
            f"{max(result.sent) / mean:.2f}" if mean else "",
            f"{max(result.peak) / 2**30:.2f}" if max(result.peak) else "",
        )
    on.print(table)
    for result in results:
        if result.refusal:
            on.print(f"{result.workload}, {result.method}: [red]{escape(result.refusal)}[/]")


def failures(results: list[Measured]) -> list[str]:
    """A sentence for each figure that was not reached, or not measured."""
    both = {(result.workload, result.method): result.both for result in results if result.both}
    missed = []

    def require(name: str, least: float, value: float | None, what: str) -> None:
        if value is None or not value >= least:
            got = "not measured" if value is None else f"{value:.2f}"
            missed.append(f"{name}: {what} {got}, at least {least:g} are asked for")

    def speed(name: str, method: str, peer: str) -> float | None:
        ours, theirs = both.get((name, method)), both.get((name, peer))
        return theirs / ours if ours and theirs else None

    names = {result.workload for result in results}
    for name in names & STRONG.keys():
        method = ZIGZAG if name.startswith("dense") else OURS
        require(name, STRONG[name], speed(name, method, ALONE), "times one rank's speed")
        if method == ZIGZAG:
            require(name, 1, speed(name, method, RING), "times the ring's speed")
    for name in names & WEAK.keys():
        require(name, WEAK[name], speed(name, OURS, SHARE), "weak scaling")
    for result in results:
        if result.budget and result.sent:
            require(result.workload, 1 / MOST_BYTES, result.budget / max(*result.sent, 1), "budget over bytes sent")
    return missed


def join() -> None:
    """The processes of torchrun, or this one alone; those that are joined already stay so."""
    if dist.is_initialized():
        return
    if "RANK" in os.environ:
        dist.init_process_group()
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 1 where ours refused, or where --check asks for more."""
    parser = argument_parser(__doc__, backends=None)
    parser.add_argument("--method", action="append", choices=METHODS, help="may be repeated (default: by workload)")
    samples = {"default": 5, "help": "(default: %(default)s)"}
    add_common(parser, dtype={}, workload={}, shrink={}, samples=samples, check={})
    options = parse(parser, arguments)
    works = [work for work in WORKLOADS[options.device] if options.workload in work.name]
    require_workloads(parser, options, works)
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    join()
    dtype = DTYPES[dtype_of(options)]

    results = []
    for work in works:
        work = replace(
            work,
            seqlen=work.seqlen // options.shrink,
            window=work.window and max(work.window // options.shrink, 1),
        )
        for method in options.method or work.methods:
            results.append(measure(work, method, dtype, options.device, options.seed, options.samples))

    status = 0
    if dist.get_rank() == 0:
        on, where = console(), environment(options.device)
        on.print(describe(where), highlight=False)
        show(on, results)
        if options.json:
            content = {"ranks": dist.get_world_size(), "shrink": options.shrink, "seed": options.seed}
            write_json(options.json, where, **content, results=list(map(asdict, results)))
        missed = failures(results) if options.check else []
        for failure in missed:
            on.print(f"[bold red]{escape(failure)}[/]")
        status = 1 if missed or any(result.refusal for result in results if result.method in (OURS, ZIGZAG)) else 0
    return status


if __name__ == "__main__":
    sys.exit(main())
