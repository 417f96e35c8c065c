"""What it costs to go by the causal top-w mask, or by indices: what long_context.py and the two that compare with peers
share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from performance import (
    BACKWARD,
    BOTH,
    FORWARD,
    Timing,
    Work,
    call_for,
    flex_attention,
    medians,
    size,
    table,
    time_workload,
)
from problem import DTYPES, Inputs, Problem, make_inputs
from report import REFUSALS
from rich.console import Console
from rich.markup import escape
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flash_dmattn import KeyIntervalMask, KeyLists, flash_dmattn_func_auto
from flash_dmattn.masks import SPARSE

TOPK, LISTS = "topk", "key lists"  # making the mask of a bias, and the lists of keys of a mask
GIB = 2**30
FLEX_PAIRS = 2**31


def top_w(name: str, seqlen: int, window: int, heads: int, kv_heads: int, head_dim: int, **options) -> Problem:
    """Every row sees, of the keys up to its own, the `window` of largest bias; each key/value head has its own bias."""
    sizes = {"batch": 1, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    lengths = {"seqlen_q": seqlen, "seqlen_k": seqlen}
    mask = {"is_causal": True, "bias": "B Hkv 1 Sk", "window": window, "as_intervals": True}
    return Problem(name, **(sizes | lengths | mask | options))


@dataclass(frozen=True)
class Indexed(Problem):
    """The same with the keys named by indices: of each `tile_rows` query rows those that the last of them sees."""

    tile_rows: int = 1
    at_random: bool = False  # any `window` keys instead: neighbours have none in common but by chance

    def indices(self, mask: KeyIntervalMask) -> Tensor:
        """int32 (1, heads of the mask, rows, window), -1 for none."""
        rows = torch.arange(self.seqlen_q, device=mask.device).split(self.tile_rows)
        last = torch.stack([tile[-1] for tile in rows])
        return torch.stack([self._of_head(*interval, last) for interval in mask.intervals[:, 0].unbind(1)])[None]

    def _of_head(self, start: Tensor, end: Tensor, rows: Tensor) -> Tensor:
        def of_some(row: Tensor) -> Tensor:
            seen = (start <= row[:, None]) & (row[:, None] < end)
            scores = torch.rand(seen.shape, device=seen.device) if self.at_random else seen.byte()
            best = scores.topk(self.window, sorted=False)
            return best.indices.int().masked_fill(best.values == 0, -1)

        return torch.cat(list(map(of_some, rows.split(1024))))  # a bool for each pair may not fit


def indexed(name: str, seqlen: int, window: int, *sizes: int, tile_rows: int, at_random: bool = False) -> Indexed:
    return Indexed(**vars(top_w(name, seqlen, window, *sizes)), tile_rows=tile_rows, at_random=at_random)


def add_sparse_argument(parser) -> None:
    parser.add_argument("--sparse", choices=SPARSE, default="auto", help="ours goes by (default: %(default)s)")


def ours(backend: str, sparse: str, inputs: Inputs) -> Work:
    """Lists of keys are built in the call, from the mask. A single row is given lists made beforehand."""
    if inputs.problem.seqlen_q == 1 and sparse != "tiles":
        inputs = replace(inputs, mask=KeyLists.build(inputs.bool_mask(), 1))
    attention = flash_dmattn_func_auto(backend)
    return Work(lambda: inputs.attend(attention, sparse=sparse)[0], list(inputs.leaves().values()))


def by_indices(backend: str, inputs: Inputs) -> Work:
    """Lists of keys are built in the call, from indices made beforehand."""
    attention, make_lists = flash_dmattn_func_auto(backend), lists_of_indices(inputs)

    def forward() -> Tensor:
        return replace(inputs, mask=make_lists()).attend(attention)[0]

    return Work(forward, list(inputs.leaves().values()))


def lists_of_indices(inputs: Inputs) -> Callable[[], KeyLists]:
    problem = inputs.problem
    indices, lengths = problem.indices(inputs.mask), (problem.seqlen_q, problem.seqlen_k)
    return lambda: KeyLists.from_indices(indices, *lengths, problem.is_causal, tile_rows=problem.tile_rows)


def flex(inputs: Inputs) -> Work:
    if inputs.problem.seqlen_q * inputs.problem.seqlen_k > FLEX_PAIRS:
        raise ValueError("left out: FlexAttention looks at every pair of rows and keys to find its blocks")
    return flex_attention(inputs)


def cudnn(inputs: Inputs) -> Work:
    return by_cudnn(inputs, is_causal=inputs.problem.seqlen_q > 1)


def cudnn_of_window(inputs: Inputs) -> Work:
    first = {name: getattr(inputs, name)[:, : inputs.problem.window].detach() for name in ("key", "value")}
    needs_grad = inputs.query.requires_grad
    return by_cudnn(
        replace(inputs, **{name: x.requires_grad_(needs_grad) for name, x in first.items()}), is_causal=False
    )


def by_cudnn(inputs: Inputs, is_causal: bool) -> Work:
    problem, leaves = inputs.problem, [inputs.query, inputs.key, inputs.value]
    options = {"is_causal": is_causal, "enable_gqa": problem.kv_heads < problem.heads}

    def forward() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(*(leaf.transpose(1, 2) for leaf in leaves), **options).transpose(1, 2)

    return Work(forward, leaves)


# Measuring


@dataclass(frozen=True)
class Memory:
    """Of a forward and backward on CUDA."""

    workload: str
    dtype: str
    implementation: str
    peak: int  # bytes in use at the worst moment, the inputs among them
    tensors: int  # bytes of query, key, value, out and their gradients

    @property
    def ratio(self) -> float:
        return self.peak / self.tensors


def measure(
    problem: Problem, dtype: str, builders: dict[str, Callable[[Inputs], Work]], seed: int, samples: int, device: str
) -> tuple[list[Timing], list[Memory]]:
    """Times of every implementation, and of what the first does before its attention; its memory on CUDA."""
    first, build = next(iter(builders.items()))
    is_trained = problem.seqlen_q > 1
    quantities = [FORWARD, BACKWARD] if is_trained else [FORWARD]
    timings = time_preparation(problem, dtype, first, seed, samples, device)
    memories = []
    if device == "cuda" and is_trained:
        memories += peak_memory(problem, dtype, first, build, seed)
    timings += time_workload(problem, dtype, quantities, builders, seed, samples, device)
    return timings, memories


def time_preparation(
    problem: Problem, dtype: str, implementation: str, seed: int, samples: int, device: str
) -> list[Timing]:
    inputs = make_inputs(problem, DTYPES[dtype], device, seed)
    if isinstance(problem, Indexed):
        calls = {LISTS: lists_of_indices(inputs)}
    else:
        calls = {
            TOPK: lambda: KeyIntervalMask.topk(inputs.bias, problem.window, problem.seqlen_q),
            LISTS: lambda: KeyLists.build(inputs.mask, problem.seqlen_q, is_causal=problem.is_causal),
        }
    seconds = medians(calls, samples, device)
    return [Timing(problem.name, dtype, quantity, implementation, seconds[quantity]) for quantity in calls]


def peak_memory(
    problem: Problem, dtype: str, implementation: str, build: Callable[[Inputs], Work], seed: int
) -> list[Memory]:
    """One figure; none where the implementation refuses, which its times show too."""
    before = torch.cuda.memory_allocated()
    inputs = make_inputs(problem, DTYPES[dtype], "cuda", seed).requiring_grad()
    torch.cuda.reset_peak_memory_stats()
    try:
        call_for(BOTH, build(inputs), inputs.dout)()
    except REFUSALS:
        return []
    peak = torch.cuda.max_memory_allocated() - before
    tensors = 2 * sum(map(size, (inputs.query, inputs.key, inputs.value, inputs.dout)))
    return [Memory(problem.name, dtype, implementation, peak, tensors)]


# What is shown


def show(on: Console, timings: list[Timing], memories: list[Memory], names: list[str], peers: list[str]) -> None:
    on.print(table(timings, names, peers))
    for memory in memories:
        on.print(
            f"{memory.workload}, {memory.dtype}: forward and backward of {memory.implementation} need "
            f"{memory.peak / GIB:.2f} GiB at their peak, {memory.ratio:.2f} x what query, key, value, out and their "
            f"gradients take",
            highlight=False,
        )
    for name, refusal in dict.fromkeys((timing.implementation, timing.refusal) for timing in timings if timing.refusal):
        on.print(f"[yellow]{name}[/]: {escape(refusal)}")
