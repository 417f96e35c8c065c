"""Peak memory of forward and backward, beyond the inputs and the gradient of out.

Each measurement runs in a process of its own. "extra" leaves out the outputs and gradients too. The mask of the second
workload has one bool per score, which the call packs to bits.
"""

import contextlib
import multiprocessing
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from frame import MIB, Demand, Setting, Suite, positive
from problem import Inputs, Problem, named
from report import sentence
from rows import BOTH, Row
from torch import Tensor

from flash_dmattn import flash_dmattn_func_auto

LIMIT_MIB = 600
WARM_UP_SEQLEN = 64


def forward_and_backward(backend: str, inputs: Inputs) -> Callable[[], object]:
    """The call to measure."""
    attention = flash_dmattn_func_auto(backend)
    return lambda: torch.autograd.grad(inputs.attend(attention)[0], list(inputs.leaves().values()), inputs.dout)


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def resident_bytes(entry: str) -> int:
    """VmRSS, the memory of this process now, or VmHWM, its peak.

    Not getrusage's ru_maxrss: that begins with the peak of the process which started this one.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        raise RuntimeError("on the CPU peak memory is read from /proc/self/status, which only Linux has")
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return 1024 * int(lines[entry].removesuffix("kB"))


def forget_peak() -> None:
    """Restarts VmHWM, where the system allows it: making the inputs took memory too."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_of(backend: str, problem: Problem, setting: Setting) -> dict[str, float]:
    """The figures, measured in a fresh process."""
    # Loads libraries and starts threads, which would be counted otherwise.
    little = replace(problem, seqlen_q=WARM_UP_SEQLEN, seqlen_k=WARM_UP_SEQLEN)
    forward_and_backward(backend, setting.inputs(little).requiring_grad())()
    inputs = setting.inputs(problem).requiring_grad()
    call = forward_and_backward(backend, inputs)
    if setting.device == "cuda":
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
    extra = peak - before - results
    per_element = extra / inputs.query.numel()
    return {"peak_bytes": peak - before, "extra_bytes": extra, "extra_bytes_per_element": per_element}


def in_fresh_process(function: Callable, *arguments: object):
    """The function's result or exception; a process that was killed is a RuntimeError."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def measure(problem: Problem, setting: Setting) -> list[Row]:
    rows = []
    for name, backend in setting.own.items():
        try:
            rows.append(setting.row(problem.name, BOTH, name, **in_fresh_process(peak_of, backend, problem, setting)))
        except Exception as error:
            rows.append(setting.row(problem.name, BOTH, name, refusal=sentence(error)))
    return rows


def add_arguments(parser) -> None:
    parser.add_argument("--seqlen", type=positive, default=16384, help="rows and keys (default: %(default)s)")
    parser.add_argument("--heads", type=positive, default=4, help="(default: %(default)s)")
    parser.add_argument("--head-dim", type=positive, default=64, help="(default: %(default)s)")


def sized(options, problems: list[Problem]) -> list[Problem]:
    sizes = {"heads": options.heads, "kv_heads": options.heads, "head_dim": options.head_dim}
    lengths = {"seqlen_q": options.seqlen, "seqlen_k": options.seqlen}
    return [named(problem.name, replace(problem, **sizes, **lengths)) for problem in problems]


KEY_BIAS = Problem("causal, key bias", 1, 4, 4, 16384, 16384, 64, is_causal=True, bias="B H 1 Sk")
MASKED = replace(KEY_BIAS, name="bool mask [B,H,S,S], causal, key bias", mask="B H Sq Sk")
DEMANDS = [Demand("", BOTH, LIMIT_MIB * MIB, figure="peak_bytes")]
SUITES = {
    "memory": Suite(
        "memory",
        __doc__,
        dict.fromkeys(("cpu", "cuda"), [KEY_BIAS, MASKED]),
        measure,
        demands=dict.fromkeys(("cpu", "cuda"), DEMANDS),
        threads=None,
        has_backends=True,
        arguments=add_arguments,
        choose=sized,
    )
}
