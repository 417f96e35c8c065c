"""Attention over a sequence that is sharded over ranks, and the bytes that go between them.

    torchrun --nproc-per-node 2 benchmarks/run.py parallel --device cuda --check
    torchrun --nproc-per-node 8 benchmarks/run.py parallel --device cpu     # bytes and their balance, with gloo

Each workload runs on one rank alone, with the whole sequence and with a rank's share of it, and on all ranks: by
flash_dmattn, by gathering all keys and values first ("all-gather"), and, where it supports the workload, by PyTorch's
ring attention (torch.distributed.tensor.experimental.context_parallel). Times are medians, of the slowest rank.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from frame import Demand, Setting, Suite
from peers import OURS
from problem import DTYPES
from report import sentence
from rows import BOTH, FORWARD, Row
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention

from flash_dmattn import KeyIntervalMask, flash_dmattn_func
from flash_dmattn.parallel import context_parallel_attention, count_traffic, shard

ALONE, SHARE, ZIGZAG = "one rank", "one rank, S / ranks", f"{OURS}, zigzag"
GATHER, RING = "all-gather", "PyTorch's ring attention"


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
        Workload("top-k mask, B1 H4/2 S2048 D64 w128", 2048, 4, 2, 64, 128),
        Workload("dense causal, B1 H4/2 S1024 D64", 1024, 4, 2, 64, methods=DENSE),
    ],
    "cuda": [
        Workload("top-k mask, B1 H32/8 S262144 D128 w2048", 262144, 32, 8, 128, 2048),
        Workload("top-k mask, B1 H32/8 S1048576 D128 w2048", 1048576, 32, 8, 128, 2048, methods=(SHARE, OURS)),
        Workload("dense causal, B1 H32/8 S65536 D128", 65536, 32, 8, 128, methods=DENSE),
    ],
}
# The time of two ranks is compared with one rank that has all rows and with one that has its share; the bytes that they
# send are compared with those of one window.
STRONG, WEAK, DENSE_CAUSAL = (WORKLOADS["cuda"][i].name for i in range(3))
MAX_BYTES = Demand("top-k mask", BOTH, 1.2, figure="sent_over_budget")
DEMANDS = {
    "cpu": [MAX_BYTES],
    "cuda": [
        MAX_BYTES,
        Demand(STRONG, BOTH, 1 / 1.85, (ALONE,)),
        Demand(WEAK, BOTH, 1 / 0.95, (SHARE,)),
        Demand(DENSE_CAUSAL, BOTH, 1 / 1.7, (ALONE,), implementation=ZIGZAG),
        Demand(DENSE_CAUSAL, BOTH, 1, (RING,), implementation=ZIGZAG),
    ],
}


@dataclass
class Rows:
    """Whole tensors, equal on every rank; without a window there is no bias."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    dout: Tensor

    def map(self, function: Callable[[str, Tensor], Tensor]) -> Rows:
        return Rows(**{name: x if x is None else function(name, x) for name, x in vars(self).items()})


def make_rows(workload: Workload, dtype: torch.dtype, device: str, seed: int) -> Rows:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    rows, keys = ((1, workload.seqlen, heads, workload.head_dim) for heads in (workload.heads, workload.kv_heads))
    bias = None if workload.window is None else normal(1, workload.kv_heads, 1, workload.seqlen, dtype=torch.float32)
    return Rows(normal(*rows), normal(*keys), normal(*keys), bias, normal(*rows) / 8)


def own_rows(rows: Rows, layout: str = "contiguous") -> Rows:
    return rows.map(lambda name, x: shard(x, 3 if name == "bias" else 1, layout=layout).contiguous())


# The methods: from the whole tensors, each returns the rows that get gradients and the function to time.

Method = Callable[[Workload, Rows], tuple[Rows, Callable[[Rows], Tensor]]]


def options_of(workload: Workload) -> dict[str, object]:
    return {"is_causal": True, "window_size": workload.window}


def alone(workload: Workload, rows: Rows) -> tuple[Rows, Callable[[Rows], Tensor]]:
    options = options_of(workload)
    return rows, lambda own: flash_dmattn_func(own.query, own.key, own.value, attn_bias=own.bias, **options)


def share(workload: Workload, rows: Rows) -> tuple[Rows, Callable[[Rows], Tensor]]:
    return alone(workload, own_rows(rows))


def ours(workload: Workload, rows: Rows, layout: str = "contiguous") -> tuple[Rows, Callable[[Rows], Tensor]]:
    def attend(own: Rows) -> Tensor:
        return context_parallel_attention(
            own.query, own.key, own.value, attn_bias=own.bias, layout=layout, **options_of(workload)
        )

    return own_rows(rows, layout), attend


def zigzag(workload: Workload, rows: Rows) -> tuple[Rows, Callable[[Rows], Tensor]]:
    return ours(workload, rows, "zigzag")


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


def gather(workload: Workload, rows: Rows) -> tuple[Rows, Callable[[Rows], Tensor]]:
    """All keys and values in one all-gather, and the kernels of one GPU."""
    own = own_rows(rows)
    seqlen = own.query.shape[1]
    seen = (dist.get_rank() + 1) * seqlen

    def whole(part: Tensor, dim: int) -> Tensor:
        return Gather.apply(part.movedim(dim, 0)).movedim(0, dim).narrow(dim, 0, seen)

    def attend(own: Rows) -> Tensor:
        key, value = whole(own.key, 1), whole(own.value, 1)
        if workload.window is None:
            return flash_dmattn_func(own.query, key, value, is_causal=True)
        bias = whole(own.bias, 3).contiguous()
        mask = KeyIntervalMask.topk(bias, workload.window, seqlen)
        return flash_dmattn_func(own.query, key, value, mask, bias, is_causal=True)

    return own, attend


def gathered_bytes(own: Rows) -> int:
    """The bytes that all-gather sends in a forward and a backward."""
    tensors = [x for x in (own.key, own.value, own.bias) if x is not None]
    return 2 * (dist.get_world_size() - 1) * sum(x.nbytes for x in tensors)


@contextlib.contextmanager
def ring(workload: Workload, rows: Rows) -> Iterator[tuple[Rows, Callable[[Rows], Tensor]]]:
    """Shards its tensors in place while the context lasts."""
    from torch.distributed.tensor.experimental import context_parallel

    if workload.window is not None:
        raise ValueError("it takes neither mask nor bias")
    mesh = init_device_mesh(rows.query.device.type, (dist.get_world_size(),))
    # (B, H, S, D), with keys and values for every head: its ring takes no grouped ones.
    group = workload.heads // workload.kv_heads
    repeated = rows.map(lambda name, x: x.repeat_interleave(group, 2) if name in ("key", "value") else x)
    parts = [x.transpose(1, 2).contiguous() for x in (repeated.query, repeated.key, repeated.value, repeated.dout)]

    def attend(own: Rows) -> Tensor:
        return scaled_dot_product_attention(own.query, own.key, own.value, is_causal=True)

    with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2] * 4, no_restore_buffers=set(parts)):
        query, key, value, dout = parts
        yield Rows(query, key, value, None, dout), attend


METHODS: dict[str, Method] = {ALONE: alone, SHARE: share, OURS: ours, ZIGZAG: zigzag, GATHER: gather, RING: ring}


# Measuring


def measure(workload: Workload, setting: Setting) -> list[Row]:
    return [row for method in setting.selected or workload.methods for row in measured(workload, method, setting)]


def measured(workload: Workload, method: str, setting: Setting) -> list[Row]:
    """One method. Where one rank refuses, all stop, so that none waits for it."""
    dtype, device, refusal = DTYPES[setting.dtype], setting.device, None
    try:
        made = METHODS[method](workload, make_rows(workload, dtype, device, setting.seed))
        with made if method == RING else contextlib.nullcontext(made) as (rows, attend):
            rows = rows.map(lambda name, x: x.requires_grad_() if name != "dout" else x)
            forward, both = timed(rows, attend, setting.samples, device)
            sent, received, peak = counted(rows, attend, device)
            if method == GATHER:
                sent = received = gathered_bytes(rows)
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        refusal = sentence(error)
    refusals = [text for text in of_ranks(refusal) if text]
    if refusals:
        return [setting.row(workload.name, BOTH, method, refusal=refusals[0])]
    forward, both = (max(of_rank) for of_rank in zip(*of_ranks((forward, both))))
    sent, received, peak = map(list, zip(*of_ranks((sent, received, peak))))
    traffic = {"sent_bytes": sent, "received_bytes": received, "ranks": dist.get_world_size()}
    if device == "cuda":
        traffic["peak_bytes"] = peak
    if method == OURS and workload.window is not None:
        traffic["sent_over_budget"] = max(sent) / budget_of(workload, dtype)
    return [
        setting.row(workload.name, FORWARD, method, seconds=forward),
        setting.row(workload.name, BOTH, method, seconds=both, **traffic),
    ]


def budget_of(workload: Workload, dtype: torch.dtype) -> int:
    """The bytes that a rank should send: keys and values of one window, their gradients, and the bias."""
    keys = 2 * workload.window * workload.kv_heads * workload.head_dim * dtype.itemsize
    size = dist.get_world_size()
    return 2 * keys + workload.seqlen * (size - 1) // size * workload.kv_heads * 4


def of_ranks(value: object) -> list:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def leaves_of(rows: Rows) -> list[Tensor]:
    return [x for name, x in vars(rows).items() if x is not None and name != "dout"]


def clock(device: str) -> float:
    """The time when the device has finished."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(rows: Rows, attend: Callable[[Rows], Tensor], samples: int, device: str) -> tuple[float, float]:
    """Median seconds of a forward, and of a forward and a backward, after two that are not counted."""
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


def join(options) -> bool:
    """Joins the processes of torchrun, or this one alone, unless they are joined; rank 0 prints and writes."""
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if not dist.is_initialized():
        if "RANK" in os.environ:
            dist.init_process_group()
        else:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.get_rank() == 0


SUITES = {
    "parallel": Suite(
        "parallel", __doc__, WORKLOADS, measure, tuple(METHODS), DEMANDS, samples=5, threads=None, start=join
    )
}
