"""How much memory do forward and backward take at their peak, beyond the inputs?

    python benchmarks/memory.py                                  # causal, key bias with its gradient, 16384 keys
    python benchmarks/memory.py --check                          # exit status 1 above 600 MiB
    python benchmarks/memory.py --seqlen 4096 --backend cpu --backend reference

Each backend runs in a process of its own. Outputs and gradients are counted, the gradient of out is not.
"""

import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from problem import DTYPES, Problem, make_inputs
from report import (
    REFUSALS,
    argument_parser,
    console,
    describe,
    environment,
    parse,
    positive,
    progress,
    sentence,
    write_json,
)
from rich.markup import escape
from rich.table import Table

from flash_dmattn import flash_dmattn_func_auto

LIMIT_MIB = 600
MIB = 2**20
WARM_UP_SEQLEN = 64


def forward_and_backward(backend: str, problem: Problem, dtype: str, device: str, seed: int) -> Callable[[], object]:
    """The call to measure, its inputs made."""
    inputs = make_inputs(problem, DTYPES[dtype], device, seed).requiring_grad()
    attention = flash_dmattn_func_auto(backend)
    return lambda: torch.autograd.grad(inputs.attend(attention)[0], list(inputs.leaves().values()), inputs.dout)


def resident_bytes(entry: str) -> int:
    """VmRSS, what this process has in memory now, or VmHWM, the most that it ever had.

    Not getrusage's ru_maxrss: that begins with the peak of the process which started this one.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        raise RuntimeError("on the CPU peak memory is read from /proc/self/status, which only Linux has")
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return 1024 * int(lines[entry].removesuffix("kB"))


def peak_bytes(backend: str, problem: Problem, dtype: str, device: str, seed: int) -> int:
    """Of a forward and backward, beyond the inputs. To be run in a fresh process."""
    # Loads libraries and starts threads, which would be counted otherwise.
    forward_and_backward(
        backend, replace(problem, seqlen_q=WARM_UP_SEQLEN, seqlen_k=WARM_UP_SEQLEN), dtype, device, seed
    )()
    call = forward_and_backward(backend, problem, dtype, device, seed)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients = call()
        peak = torch.cuda.max_memory_allocated()
    else:
        before = resident_bytes("VmRSS")
        gradients = call()
        peak = resident_bytes("VmHWM")
    del gradients  # kept until here: they are part of the peak
    return peak - before


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
    parser.add_argument("--dtype", choices=DTYPES, help="(default: float32 on the CPU, bfloat16 on CUDA)")
    parser.add_argument("--check", action="store_true", help=f"exit status 1 above {LIMIT_MIB} MiB")
    options = parse(parser, arguments)
    dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    problem = Problem(
        "causal, key bias",
        batch=1,
        heads=options.heads,
        kv_heads=options.heads,
        seqlen_q=options.seqlen,
        seqlen_k=options.seqlen,
        head_dim=options.head_dim,
        is_causal=True,
        bias="B H 1 Sk",
    )

    on, where = console(), environment(options.device)
    shape = f"S={options.seqlen} H={options.heads} D={options.head_dim} {dtype}"
    on.print(f"{problem.name}, {shape}; {describe(where)}", highlight=False)
    names = options.backend or [options.device]
    results = []
    table = Table("backend", "peak beyond the inputs")
    with progress(on) as bar:
        for name in bar.track(names, description="forward + backward"):
            try:
                mib = in_fresh_process(peak_bytes, name, problem, dtype, options.device, options.seed) / MIB
            except REFUSALS as error:
                results.append({"backend": name, "mib": None, "refusal": sentence(error)})
                table.add_row(name, f"refused: {escape(sentence(error))}")
            else:
                results.append({"backend": name, "mib": mib, "refusal": ""})
                table.add_row(name, f"{mib:.0f} MiB")
    on.print(table)

    if options.json:
        write_json(options.json, where, workload=f"{problem.name}, {shape}", seed=options.seed, peaks=results)
    above = [result for result in results if options.check and result["mib"] is not None and result["mib"] > LIMIT_MIB]
    for result in above:
        on.print(f"[bold red]{result['backend']} takes more than {LIMIT_MIB} MiB[/]")
    return 1 if above or any(result["refusal"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
