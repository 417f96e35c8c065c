"""How much memory do forward and backward take at their peak, beyond the inputs?

    python benchmarks/memory.py                                  # causal, key bias with its gradient, 16384 keys
    python benchmarks/memory.py --check                          # exit status 1 above 600 MiB
    python benchmarks/memory.py --mask                           # with a bool mask of every pair, too
    python benchmarks/memory.py --seqlen 4096 --backend cpu --backend reference

Each backend runs in a process of its own. Outputs and gradients are counted, the gradient of out is not. What comes on
top of them is shown for each element of (B, Sq, H, D), and beside it the mask at one bit a pair.
"""

import contextlib
import multiprocessing
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from problem import DTYPES, Inputs, Problem, make_inputs
from report import (
    REFUSALS,
    add_common,
    argument_parser,
    console,
    describe,
    dtype_of,
    environment,
    parse,
    positive,
    progress,
    sentence,
    write_json,
)
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from flash_dmattn import flash_dmattn_func_auto

LIMIT_MIB = 600
MIB = 2**20
WARM_UP_SEQLEN = 64


@dataclass(frozen=True)
class Peak:
    backend: str
    workload: str
    mib: float | None = None  # at the peak of forward and backward, beyond the inputs
    extra_mib: float | None = None  # beyond outputs and gradients, too
    elements: int = 0  # B * Sq * H * D
    mask_bits: int = 0
    refusal: str = ""  # why there is no figure


def forward_and_backward(backend: str, inputs: Inputs) -> Callable[[], object]:
    """The call to measure."""
    attention = flash_dmattn_func_auto(backend)
    return lambda: torch.autograd.grad(inputs.attend(attention)[0], list(inputs.leaves().values()), inputs.dout)


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def resident_bytes(entry: str) -> int:
    """VmRSS, what this process has in memory now, or VmHWM, the most that it ever had.

    Not getrusage's ru_maxrss: that begins with the peak of the process which started this one.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        raise RuntimeError("on the CPU peak memory is read from /proc/self/status, which only Linux has")
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return 1024 * int(lines[entry].removesuffix("kB"))


def forget_peak() -> None:
    """Lets VmHWM begin anew, where the system allows it: making the inputs took memory, too."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def measure(backend: str, problem: Problem, dtype: str, device: str, seed: int) -> Peak:
    """To be run in a fresh process."""
    # Loads libraries and starts threads, which would be counted otherwise.
    little = replace(problem, seqlen_q=WARM_UP_SEQLEN, seqlen_k=WARM_UP_SEQLEN)
    forward_and_backward(backend, make_inputs(little, DTYPES[dtype], device, seed).requiring_grad())()
    inputs = make_inputs(problem, DTYPES[dtype], device, seed).requiring_grad()
    call = forward_and_backward(backend, inputs)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients = call()
        peak = torch.cuda.max_memory_allocated()
    else:
        forget_peak()
        before = resident_bytes("VmRSS")
        gradients = call()
        peak = resident_bytes("VmHWM")
    del gradients  # kept until here: they are part of the peak
    results = inputs.query.nbytes + inputs.dlse.nbytes + nbytes(inputs.leaves().values())  # out, lse, gradients
    mask_bits = 0 if inputs.mask is None else inputs.mask.numel()
    mib, extra_mib = (peak - before) / MIB, (peak - before - results) / MIB
    return Peak(backend, problem.name, mib, extra_mib, inputs.query.numel(), mask_bits)


def workloads(seqlen: int, heads: int, head_dim: int, with_mask: bool) -> list[Problem]:
    sizes = {"heads": heads, "kv_heads": heads, "seqlen_q": seqlen, "seqlen_k": seqlen, "head_dim": head_dim}
    problem = Problem("causal, key bias", batch=1, **sizes, is_causal=True, bias="B H 1 Sk")
    masked = replace(problem, name="mask [B,H,S,S], causal, key bias", mask="B H Sq Sk")
    return [problem, masked] if with_mask else [problem]


def in_fresh_process(function: Callable, *arguments: object):
    """What the function returns or raises; a process that was killed is a RuntimeError."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 1 where a backend gave no figure, or one above what --check allows."""
    parser = argument_parser(__doc__, backends="the device's kernels")
    parser.add_argument("--seqlen", type=positive, default=16384, help="rows and keys (default: %(default)s)")
    parser.add_argument("--heads", type=positive, default=4, help="(default: %(default)s)")
    parser.add_argument("--head-dim", type=positive, default=64, help="(default: %(default)s)")
    add_common(parser, dtype={}, check={"help": f"exit status 1 above {LIMIT_MIB} MiB"})
    parser.add_argument("--mask", action="store_true", help="measure with a bool mask of every pair, too")
    options = parse(parser, arguments)
    dtype = dtype_of(options)
    problems = workloads(options.seqlen, options.heads, options.head_dim, options.mask)

    on, where = console(), environment(options.device)
    shape = f"B=1 S={options.seqlen} H={options.heads} D={options.head_dim} {dtype}"
    on.print(f"{shape}; {describe(where)}", highlight=False)
    runs = [(name, problem) for problem in problems for name in options.backend or [options.device]]
    peaks = []
    with progress(on) as bar:
        for name, problem in bar.track(runs, description="forward + backward"):
            try:
                peaks.append(in_fresh_process(measure, name, problem, dtype, options.device, options.seed))
            except REFUSALS as error:
                peaks.append(Peak(name, problem.name, refusal=sentence(error)))
    on.print(table(peaks))

    if options.json:
        write_json(options.json, where, shape=shape, seed=options.seed, peaks=list(map(asdict, peaks)))
    above = [peak for peak in peaks if options.check and peak.mib is not None and peak.mib > LIMIT_MIB]
    for peak in above:
        on.print(f"[bold red]{peak.backend} takes more than {LIMIT_MIB} MiB[/]")
    return 1 if above or any(peak.refusal for peak in peaks) else 0


def table(peaks: list[Peak]) -> Table:
    table = Table("workload", "backend", "peak beyond the inputs", "beyond outputs and gradients, too")
    table.add_column("that, a B S H D element", justify="right")
    table.add_column("mask at a bit a pair", justify="right")
    for peak in peaks:
        if peak.refusal:
            table.add_row(escape(peak.workload), peak.backend, f"refused: {escape(peak.refusal)}")
            continue
        per_element = f"{peak.extra_mib * MIB / peak.elements:.1f} bytes"
        mask = f"{peak.mask_bits / 8 / MIB:.0f} MiB" if peak.mask_bits else ""
        figures = (f"{peak.mib:.0f} MiB", f"{peak.extra_mib:.0f} MiB", per_element, mask)
        table.add_row(escape(peak.workload), peak.backend, *figures)
    return table


if __name__ == "__main__":
    sys.exit(main())
