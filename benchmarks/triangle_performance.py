"""What does triangle attention take with N rows to a pair bias, beside the same work as a plain batch, and others?

    python benchmarks/triangle_performance.py --device cuda --json triangle.json
    python benchmarks/triangle_performance.py --device cuda --check         # exit status 1 where N costs anything
    python benchmarks/triangle_performance.py --device cpu --shrink 8

triangle_attention: q (B, N, H, S, D), a bias (B, 1, H, S, S) with its gradient, and a mask of keys for each row.
plain batch: `flash_dmattn_func` of B N batch elements that all have one bias [1, H, S, S]: what --check compares with.
sdpa: PyTorch's, with bias and mask as one float mask, expanded to every row in the call.
cuequivariance: cuequivariance_torch.triangle_attention, where it is installed.

Times are medians in ms; the memory is the peak of forward and backward beyond inputs, on CUDA.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from performance import BACKWARD, BOTH, FORWARD, Timing, Work, call_for, grouped, in_short, median_on_cuda, time_calls
from problem import DTYPES
from report import argument_parser, console, describe, environment, parse, positive, progress, sentence, write_json
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from flash_dmattn import flash_dmattn_func
from flash_dmattn.integrations.triangle import triangle_attention

OURS, PLAIN, SDPA, CUEQUIVARIANCE = "triangle_attention", "plain batch", "sdpa", "cuequivariance"
AT_MOST = 1.05  # times the plain batch, forward and backward together
MIB = 2**20


@dataclass(frozen=True)
class Workload:
    batch: int
    n: int
    seqlen: int
    heads: int = 4
    head_dim: int = 32

    @property
    def name(self) -> str:
        return f"B{self.batch} N{self.n} H{self.heads} S{self.seqlen} D{self.head_dim}"


WORKLOADS = [
    Workload(1, 384, 384),
    Workload(2, 192, 384),
    Workload(4, 96, 384),
    Workload(1, 512, 512),
    Workload(2, 256, 256),
    Workload(2, 128, 768, heads=8, head_dim=64),
]


@dataclass(frozen=True)
class Inputs:
    query: Tensor  # (B, N, S, H, D) as key, value and dout
    key: Tensor
    value: Tensor
    bias: Tensor  # (B, 1, H, S, S)
    mask: Tensor  # bool (B, N, 1, 1, S)
    dout: Tensor


@dataclass(frozen=True)
class Peak:
    workload: str
    implementation: str
    mib: float | None = None
    refusal: str = ""


def make_inputs(workload: Workload, dtype: torch.dtype, device: str, seed: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    batch, n, seqlen, heads = workload.batch, workload.n, workload.seqlen, workload.heads

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    rows = [make(batch, n, seqlen, heads, workload.head_dim) for _ in range(4)]
    bias = make(batch, 1, heads, seqlen, seqlen).requires_grad_()
    mask = torch.rand(batch, n, 1, 1, seqlen, generator=generator, device=device) < 0.9
    return Inputs(*(x.requires_grad_() for x in rows[:3]), bias, mask, rows[3])


# The implementations: each gives (B, N, S, H, D)


def ours(inputs: Inputs, function: Callable[..., Tensor] = triangle_attention) -> Work:
    leaves = [inputs.query, inputs.key, inputs.value, inputs.bias]

    def forward() -> Tensor:
        query, key, value = (x.transpose(2, 3) for x in leaves[:3])
        return function(query, key, value, inputs.bias, mask=inputs.mask).transpose(2, 3)

    return Work(forward, leaves)


def plain_batch(inputs: Inputs) -> Work:
    bias = inputs.bias.detach()[:1, 0].clone().requires_grad_()
    leaves = [inputs.query, inputs.key, inputs.value, bias]
    mask = inputs.mask.flatten(0, 1)

    def forward() -> Tensor:
        out = flash_dmattn_func(*(x.flatten(0, 1) for x in leaves[:3]), mask, bias)
        return out.view_as(inputs.query)

    return Work(forward, leaves)


def sdpa(inputs: Inputs) -> Work:
    leaves = [inputs.query, inputs.key, inputs.value, inputs.bias]

    def forward() -> Tensor:
        pairs = inputs.bias.masked_fill(~inputs.mask, -torch.inf).flatten(0, 1)
        rows = (x.flatten(0, 1).transpose(1, 2) for x in leaves[:3])
        return F.scaled_dot_product_attention(*rows, pairs).transpose(1, 2).view_as(inputs.query)

    return Work(forward, leaves)


def cuequivariance(inputs: Inputs) -> Work:
    import cuequivariance_torch

    return ours(inputs, cuequivariance_torch.triangle_attention)


IMPLEMENTATIONS = {OURS: ours, PLAIN: plain_batch, SDPA: sdpa, CUEQUIVARIANCE: cuequivariance}


# Measuring


def peak_of(call: Callable[[], object]) -> float:
    """MiB on CUDA of a call that has been made before, beyond what is there."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return (torch.cuda.max_memory_allocated() - before) / MIB


def measure(
    workload: Workload, names: list[str], dtype: str, device: str, seed: int, samples: int
) -> tuple[list[Timing], list[Peak]]:
    inputs = make_inputs(workload, DTYPES[dtype], device, seed)
    clock, refused = (median_on_cuda, (Exception,)) if device == "cuda" else (None, (Exception,))
    timings = []
    for quantity in (FORWARD, BACKWARD, BOTH):
        makers = {name: partial(made, quantity, name, inputs) for name in names}
        timings += time_calls((workload.name, dtype, quantity), makers, samples, clock, refused=refused)
    peaks = []
    for name in names if device == "cuda" else ():
        try:
            peaks.append(Peak(workload.name, name, peak_of(made(BOTH, name, inputs))))
        except Exception as error:
            peaks.append(Peak(workload.name, name, refusal=sentence(error)))
    return timings, peaks


def made(quantity: str, name: str, inputs: Inputs) -> Callable[[], object]:
    return call_for(quantity, IMPLEMENTATIONS[name](inputs), inputs.dout)


def missed(timings: list[Timing]) -> list[str]:
    """A sentence for each workload whose rows cost more than those of a plain batch, or were not measured."""
    sentences = []
    for (workload, _, quantity), group in grouped(timings).items():
        taken = [group[name].seconds if name in group else None for name in (OURS, PLAIN)]
        if quantity == BOTH and (None in taken or taken[0] > AT_MOST * taken[1]):
            times = "unknown" if None in taken else f"{taken[0] / taken[1]:.3f}"
            sentences.append(f"{workload}: {times} x the time of a plain batch, at most {AT_MOST} are asked for")
    return sentences


# What is shown


def table(timings: list[Timing], peaks: list[Peak], names: list[str]) -> Table:
    table = Table("workload", "dtype", "medians of")
    for name in names:
        table.add_column(f"{name} [ms]".replace("[", r"\["), justify="right", max_width=18)
    for key, group in grouped(timings).items():
        cells = (
            in_short(group[name].refusal) if group[name].seconds is None else f"{1e3 * group[name].seconds:.3f}"
            for name in names
        )
        table.add_row(*map(escape, key), *cells)
    for workload in dict.fromkeys(peak.workload for peak in peaks):
        group = {peak.implementation: peak for peak in peaks if peak.workload == workload}
        cells = (in_short(group[n].refusal) if group[n].mib is None else f"{group[n].mib:.0f} MiB" for n in names)
        table.add_row(escape(workload), "", "peak memory", *cells)
    return table


def shrunk(workload: Workload, by: int) -> Workload:
    return replace(workload, n=max(1, workload.n // by), seqlen=max(1, workload.seqlen // by))


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 1 where ours failed, or where --check asks for more."""
    parser = argument_parser(__doc__, backends=None)
    parser.add_argument("--implementation", action="append", choices=IMPLEMENTATIONS, help="(default: all)")
    parser.add_argument("--dtype", choices=DTYPES, help="(default: bfloat16; float32 on the CPU)")
    parser.add_argument("--workload", default="", metavar="TEXT", help="only the workloads whose name has this in it")
    parser.add_argument("--shrink", type=positive, default=1, metavar="N", help="divide N and S")
    parser.add_argument("--threads", type=positive, default=2, help="of the CPU (default: %(default)s)")
    parser.add_argument("--samples", type=positive, default=7, help="taken on the CPU (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help=f"exit status 1 above {AT_MOST} x a plain batch's time")
    options = parse(parser, arguments)
    workloads = [workload for workload in WORKLOADS if options.workload in workload.name]
    if not workloads:
        parser.error(f"--workload: no workload has {options.workload!r} in its name")
    names = options.implementation or list(IMPLEMENTATIONS)
    dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    torch.set_num_threads(options.threads)

    on, where = console(), environment(options.device)
    on.print(describe(where), highlight=False)
    timings: list[Timing] = []
    peaks: list[Peak] = []
    with progress(on) as bar:
        for workload in bar.track([shrunk(workload, options.shrink) for workload in workloads]):
            taken, held = measure(workload, names, dtype, options.device, options.seed, options.samples)
            timings += taken
            peaks += held
    on.print(table(timings, peaks, names))
    for name, refusal in dict.fromkeys((x.implementation, x.refusal) for x in (*timings, *peaks) if x.refusal):
        on.print(f"[yellow]{name}[/]: {escape(refusal)}")
    if options.json:
        content = {"timings": list(map(asdict, timings)), "peaks": list(map(asdict, peaks))}
        write_json(options.json, where, shrink=options.shrink, seed=options.seed, **content)
    failures = missed(timings) if options.check else []
    for failure in failures:
        on.print(f"[bold red]{escape(failure)}[/]")
    return 1 if failures or any(timing.refusal for timing in timings if timing.implementation == OURS) else 0


if __name__ == "__main__":
    sys.exit(main())
