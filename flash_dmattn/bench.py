"""`python -m flash_dmattn.bench` times flash_dmattn, SDPA and on a GPU FlexAttention, in less than two minutes.

It prints a table in Markdown, with versions and device, that can be pasted into an issue. Times are medians of whole
calls of the attention, in brackets as multiples of flash_dmattn's; a training step is forward and backward with the
gradient of the bias. "SDPA" computes the same with a float mask, for decoding with torch.topk and a gather; "SDPA, all
keys" has no mask and no bias. Selecting keys is part of the time of flash_dmattn and of decoding by hand; other masks
are made beforehand.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from . import __version__, ops
from .backends import flex
from .info import best_device
from .interface import flash_dmattn_func
from .masks import KeyIntervalMask

OURS, SDPA, SDPA_ALL, FLEX = "flash_dmattn", "SDPA", "SDPA, all keys", "FlexAttention"
COLUMNS = (OURS, SDPA, SDPA_ALL, FLEX)
WARM_UP, MAX_CALLS = 3, 200
LAST_COMPILATION = 75  # seconds after the start: FlexAttention compiles each case for 10 to 20 seconds
BAR = 24


@dataclass(frozen=True)
class Case:
    """One call: its sizes, and what it needs."""

    name: str
    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    window: int | None  # None: a dense bias [B,H,S,S] in place of top-k selection
    backward: bool

    @property
    def sizes(self) -> str:
        heads = f"H{self.heads}" if self.heads == self.kv_heads else f"H{self.heads}/{self.kv_heads}"
        length = f"S{self.seqlen_q}" if self.seqlen_q == self.seqlen_k else f"Sk{self.seqlen_k}"
        window = "" if self.window is None else f" w{self.window}"
        return f"B{self.batch} {heads} {length} D{self.head_dim}{window}"


CASES = {
    "cuda": (
        Case("training step, top-k", 1, 32, 8, 4096, 4096, 128, 512, True),
        Case("prefill, top-k", 1, 32, 8, 8192, 8192, 128, 1024, False),
        Case("decoding, top-k", 8, 32, 8, 1, 32768, 128, 1024, False),
        Case("training step, dense bias", 1, 16, 16, 2048, 2048, 64, None, True),
    ),
    "cpu": (
        Case("training step, top-k", 1, 8, 2, 2048, 2048, 64, 256, True),
        Case("prefill, top-k", 1, 8, 2, 4096, 4096, 64, 256, False),
        Case("decoding, top-k", 4, 8, 2, 1, 16384, 64, 256, False),
        Case("training step, dense bias", 1, 8, 8, 1024, 1024, 64, None, True),
    ),
}


def shrunk(case: Case) -> Case:
    """For --quick: an eighth of the lengths and windows."""
    window = None if case.window is None else max(case.window // 8, 1)
    return replace(case, seqlen_q=max(case.seqlen_q // 8, 1), seqlen_k=case.seqlen_k // 8, window=window)


class Implementations:
    """The calls of a case on random inputs: every implementation computes the same but SDPA_ALL, which has no bias."""

    def __init__(self, case: Case, device: str, dtype: torch.dtype):
        self.case, self.device = case, device
        c = case

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, dtype=dtype).requires_grad_(c.backward)

        self.query = randn(c.batch, c.seqlen_q, c.heads, c.head_dim)
        self.key = randn(c.batch, c.seqlen_k, c.kv_heads, c.head_dim)
        self.value = randn(c.batch, c.seqlen_k, c.kv_heads, c.head_dim)
        self.is_causal = c.window is not None
        self.bias = randn(c.batch, c.kv_heads, *((1,) if c.window is not None else (c.seqlen_q,)), c.seqlen_k)
        self.mask = None if c.window is None else KeyIntervalMask.topk(self.bias.detach(), c.window, c.seqlen_q)
        self.dout = torch.randn_like(self.query)

    def call_of(self, name: str) -> Callable[[], object]:
        """The call whose time is measured. Raises RuntimeError where the peer does not run."""
        forward = {OURS: self.ours, SDPA: self.sdpa, SDPA_ALL: self.sdpa_all, FLEX: self.flex}[name]()
        if not self.case.backward:
            return forward
        leaves = [self.query, self.key, self.value] + ([] if name == SDPA_ALL else [self.bias])
        return lambda: torch.autograd.grad(forward(), leaves, self.dout)

    def ours(self) -> Callable[[], Tensor]:
        options = {"attn_bias": self.bias, "is_causal": self.is_causal, "window_size": self.case.window}
        return lambda: flash_dmattn_func(self.query, self.key, self.value, **options)

    def heads_first(self) -> list[Tensor]:
        return [x.transpose(1, 2) for x in (self.query, self.key, self.value)]

    def expanded(self, tensor: Tensor) -> Tensor:
        """(.., Hkv, ..) as (.., H, ..): SDPA's fast kernels take no mask with GQA."""
        group = self.case.heads // self.case.kv_heads
        return tensor.repeat_interleave(group, dim=1) if group > 1 else tensor

    def sdpa(self) -> Callable[[], Tensor]:
        if self.case.seqlen_q == 1:
            return self.topk_by_hand
        dense = None if self.mask is None else self.expanded(self.mask.to_dense())

        def forward() -> Tensor:
            query, key, value = self.heads_first()
            bias = self.expanded(self.bias)
            bias = bias if dense is None else bias.masked_fill(~dense, -torch.inf)
            out = scaled_dot_product_attention(query, self.expanded(key), self.expanded(value), attn_mask=bias)
            return out.transpose(1, 2)

        return forward

    def topk_by_hand(self) -> Tensor:
        """A decoding step: the keys of largest bias are selected and gathered, then SDPA attends to them."""
        query, key, value = self.heads_first()
        bias, indices = self.bias.topk(self.case.window, dim=-1)
        indices = indices.mT.expand(-1, -1, -1, self.case.head_dim)
        key, value = (self.expanded(x.gather(2, indices)) for x in (key, value))
        return scaled_dot_product_attention(query, key, value, attn_mask=self.expanded(bias)).transpose(1, 2)

    def sdpa_all(self) -> Callable[[], Tensor]:
        options = {
            "is_causal": self.is_causal and self.case.seqlen_q > 1,
            "enable_gqa": self.query.shape != self.key.shape,
        }
        return lambda: scaled_dot_product_attention(*self.heads_first(), **options).transpose(1, 2)

    def flex(self) -> Callable[[], Tensor]:
        if self.device != "cuda":
            raise RuntimeError("needs CUDA")
        if (reason := flex.why_unavailable()) is not None:
            raise RuntimeError(reason)
        block_mask = flex.block_mask_of(self.query, self.key, self.mask, self.is_causal)
        scale = self.case.head_dim**-0.5
        options = {"softmax_scale": scale, "is_causal": False, "softcap": 0.0, "deterministic": False}
        tensors = (self.query, self.key, self.value, None, self.bias)
        return lambda: flex.attention(*tensors, block_mask=block_mask, **options)[0]


def seconds_of(call: Callable[[], object], device: str, budget: float) -> float:
    """The median time of a call, from calls that take about `budget` seconds."""
    for _ in range(WARM_UP):
        call()
    if device != "cuda":
        taken, started = [], time.perf_counter()
        while not taken or (time.perf_counter() - started < budget and len(taken) < MAX_CALLS):
            before = time.perf_counter()
            call()
            taken.append(time.perf_counter() - before)
        return statistics.median(taken)
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    calls = min(max(int(budget / (time.perf_counter() - started)), 1), MAX_CALLS)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
    cache = torch.empty(2**26, dtype=torch.int32, device=device)  # larger than the L2 cache
    for begin, end in events:
        cache.zero_()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) / 1e3


def measured(inputs: Implementations, name: str, budget: float) -> tuple[float | None, str]:
    """Seconds, or None and the reason."""
    try:
        with torch.set_grad_enabled(inputs.case.backward):
            return seconds_of(inputs.call_of(name), inputs.device, budget), ""
    except torch.OutOfMemoryError:
        return None, "out of memory"
    except Exception as error:  # a peer may refuse with any exception
        if name == OURS:
            raise
        return None, (str(error).strip() or type(error).__name__).splitlines()[0]


def show_progress(done: int, total: int, text: str) -> None:
    """A bar on stderr. An empty text removes it."""
    full = BAR * done // total
    bar = f"[{'#' * full}{'.' * (BAR - full)}] {done}/{total} {text}" if text else ""
    sys.stderr.write(f"\r{bar:<79.79}" + ("" if text else "\r"))
    sys.stderr.flush()


def version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def cpu_name() -> str:
    try:
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    except OSError:
        names = []
    return names[0].partition(": ")[2] if names else platform.processor() or platform.machine()


def described(device: str, dtype: torch.dtype) -> str:
    """Device and versions."""
    build = ops.compiled_module().build_info()
    where = f"{cpu_name()}, {torch.get_num_threads()} threads, built for {build['cpu_capability']}"
    if device == "cuda":
        where = f"{torch.cuda.get_device_name()}, built for {build['cuda_architectures']}, CUDA {torch.version.cuda}"
    versions = f"flash_dmattn {__version__}, torch {torch.__version__}, triton {version_of('triton')}"
    versions += f", cuDNN {torch.backends.cudnn.version()}" if device == "cuda" else ""
    name = str(dtype).removeprefix("torch.")
    return f"{where}; {name}; {versions}, Python {platform.python_version()}, {platform.system()}"


def three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def table(rows: list[tuple[Case, dict[str, tuple[float | None, str]]]], where: str) -> str:
    """In Markdown: ms, and how often as long as flash_dmattn."""
    lines = [f"| median time in ms | {' | '.join(COLUMNS)} |", "| --- |" + " ---: |" * len(COLUMNS)]
    notes = []
    for case, results in rows:
        ours = results[OURS][0]
        cells = []
        for name in COLUMNS:
            seconds, refusal = results[name]
            if seconds is None:
                cells.append("-")
                note = f"{name}: {refusal}"
                notes += [note] if note not in notes else []
                continue
            ratio = "" if name == OURS or ours is None else f" ({seconds / ours:.2f} x)"
            cells.append(f"{three_digits(1e3 * seconds)}{ratio}")
        lines.append(f"| {case.name}: {case.sizes} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", where, *notes])


def run(device: str, dtype: torch.dtype, quick: bool) -> str:
    """The table of all cases."""
    cases = [shrunk(case) if quick else case for case in CASES[device]]
    budget = 0.05 if quick else 1.0
    total, done, rows = len(cases) * len(COLUMNS), 0, []
    started = time.perf_counter()
    for case in cases:
        inputs, results = Implementations(case, device, dtype), {}
        for name in COLUMNS:
            show_progress(done, total, f"{case.name}: {name}")
            if name == FLEX and time.perf_counter() - started > LAST_COMPILATION:
                results[name] = None, f"left out after {LAST_COMPILATION} s"
            else:
                results[name] = measured(inputs, name, budget)
            done += 1
        rows.append((case, results))
        del inputs
        if device == "cuda":
            torch.cuda.empty_cache()
    show_progress(done, total, "")
    return table(rows, described(device, dtype))


def main(arguments: list[str] | None = None) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m flash_dmattn.bench", description=__doc__, formatter_class=form)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where the CUDA kernels run, else cpu")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], help="default: bfloat16, on the CPU float32"
    )
    parser.add_argument("--quick", action="store_true", help="an eighth of the lengths, in a few seconds: a trial")
    options = parser.parse_args(arguments)
    device = options.device or best_device()
    if device == "cuda" and best_device() != "cuda":
        parser.error("--device cuda: the CUDA kernels do not run here, see python -m flash_dmattn.info")
    if device == "cuda" and options.dtype == "float32":
        parser.error("--dtype float32: the CUDA kernels take float16 and bfloat16")
    dtype = getattr(torch, options.dtype or ("bfloat16" if device == "cuda" else "float32"))
    torch.manual_seed(0)
    print(run(device, dtype, options.quick))
    return 0


if __name__ == "__main__":
    sys.exit(main())
