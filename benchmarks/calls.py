"""Whole calls for call_performance.py, as their users write them: ours, and what decoding takes by hand."""

from __future__ import annotations

import contextlib
import inspect
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from performance import Work, float_mask
from problem import Inputs
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

BY_HAND, DENSE = "by hand", "dense"
HOST_CALLS, HOST_BATCHES, HOST_WARM_UP = 50, 60, 100


# Ours


def whole_call(attention: Callable[..., Tensor], inputs: Inputs, **options) -> Work:
    """Where a row sees a window of keys, the call makes that mask itself."""
    problem, mask = inputs.problem, inputs.mask
    if problem.window is not None:
        mask, options = None, options | {"window_size": problem.window}
    tensors = (inputs.query, inputs.key, inputs.value, mask, inputs.bias)
    options = options | {"is_causal": problem.is_causal}
    leaves = [leaf for leaf in inputs.leaves().values() if leaf.requires_grad]
    return Work(lambda: attention(*tensors, **options), leaves)


def captured(call: Callable[[], object], device: str) -> Callable[[], object]:
    """What replays the call as a CUDA graph and returns its results; on the CPU, which has no graphs, the call."""
    if device == "cpu":
        return call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()

    def replay() -> object:
        graph.replay()
        return results

    return replay


def takes_lengths(attention: Callable[..., Tensor]) -> bool:
    return "cache_seqlens" in inspect.signature(attention).parameters


def from_cache(attention: Callable[..., Tensor], inputs: Inputs, divisor: int, device: str) -> Callable[[], object]:
    """One graph for a preallocated cache that fills up, to be timed where a part of it, 1 / divisor, is filled.

    Its results are compared with those of calls that are given no more than the filled part.
    """
    problem = inputs.problem
    lengths = torch.full((problem.batch,), problem.seqlen_k, dtype=torch.int32, device=device)
    replay = captured(whole_call(attention, inputs, cache_seqlens=lengths).forward, device)
    for part in (8, 3, 1):
        length = max(1, problem.seqlen_k // part)
        lengths.fill_(length)
        expected = whole_call(attention, filled(inputs, length)).forward()
        torch.testing.assert_close(replay(), expected, rtol=2e-2, atol=1e-3)
    lengths.fill_(max(1, problem.seqlen_k // divisor))
    return replay


def filled(inputs: Inputs, length: int) -> Inputs:
    """The first keys of a cache."""
    key, value = (cache[:, :length] for cache in (inputs.key, inputs.value))
    return replace(inputs, key=key, value=value, bias=inputs.bias[..., :length])


# By hand: a single row attends to the keys of largest bias, or to all


@dataclass(frozen=True)
class RowKernel:
    """How a single row of all heads goes through SDPA."""

    name: str
    backend: SDPBackend | None  # None: PyTorch chooses
    is_grouped: bool = False  # SDPA is told of groups of heads; else the heads of a group become rows
    uses: tuple[str, ...] = (BY_HAND, DENSE)

    def chosen(self) -> contextlib.AbstractContextManager:
        """To be entered around the timing, so that the calls do not pay for it."""
        return contextlib.nullcontext() if self.backend is None else sdpa_kernel(self.backend)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        """query (B, 1, H, D), key and value (B, Hkv, Sk, D), bias (B, Hkv, 1, Sk); gives (B, 1, H, D)"""
        batch, _, heads, head_dim = query.shape
        group = heads // key.shape[1]
        if self.is_grouped:
            mask = None if bias is None else bias.repeat_interleave(group, dim=1)
            out = scaled_dot_product_attention(query.transpose(1, 2), key, value, mask, enable_gqa=group > 1)
            return out.transpose(1, 2)
        rows = query.view(batch, key.shape[1], group, head_dim)
        mask = None if bias is None else bias.expand(-1, -1, group, -1)
        return scaled_dot_product_attention(rows, key, value, mask).reshape(query.shape)


ROW_KERNELS = {
    "cpu": [RowKernel("rows", None), RowKernel("groups", None, is_grouped=True)],
    "cuda": [
        RowKernel("flash", SDPBackend.FLASH_ATTENTION, uses=(DENSE,)),  # it takes no bias
        RowKernel("flash groups", SDPBackend.FLASH_ATTENTION, is_grouped=True, uses=(DENSE,)),
        RowKernel("efficient", SDPBackend.EFFICIENT_ATTENTION),
        RowKernel("math", SDPBackend.MATH, uses=(BY_HAND,)),  # it copies keys and values to float32
        RowKernel("cudnn", SDPBackend.CUDNN_ATTENTION),
        RowKernel("cudnn groups", SDPBackend.CUDNN_ATTENTION, is_grouped=True),
    ],
}


def gather(inputs: Inputs) -> Callable[[Tensor], list[Tensor]]:
    """From indices of keys (B, Hkv, w) to those keys and values, each (B, Hkv, w, D)."""
    caches = [cache.transpose(1, 2) for cache in (inputs.key, inputs.value)]

    def take(keys: Tensor) -> list[Tensor]:
        index = keys[..., None].expand(-1, -1, -1, caches[0].shape[-1])
        return [cache.gather(2, index) for cache in caches]

    return take


def index_select(inputs: Inputs) -> Callable[[Tensor], list[Tensor]]:
    """As `gather` does it, from rows of D numbers."""
    batch, seqlen, kv_heads, head_dim = inputs.key.shape
    caches = [cache.view(-1, head_dim) for cache in (inputs.key, inputs.value)]
    element = torch.arange(batch, device=inputs.key.device)[:, None, None] * (seqlen * kv_heads)
    first = element + torch.arange(kv_heads, device=inputs.key.device)[:, None]

    def take(keys: Tensor) -> list[Tensor]:
        rows = torch.add(first, keys, alpha=kv_heads)
        return [cache.index_select(0, rows.flatten()).view(*keys.shape, head_dim) for cache in caches]

    return take


TAKES = {"gather": gather, "index_select": index_select}


def by_hand(inputs: Inputs, taking: str, kernel: RowKernel) -> Callable[[], Tensor]:
    """The keys of largest bias, gathered, their bias added to the scores."""
    problem, take = inputs.problem, TAKES[taking](inputs)
    window = min(problem.window, problem.seqlen_k)

    def forward() -> Tensor:
        bias, keys = inputs.bias[:, :, 0].topk(window, dim=-1, sorted=False)
        key, value = take(keys)
        return kernel.attend(inputs.query, key, value, bias[:, :, None])

    return forward


def dense(inputs: Inputs, kernel: RowKernel) -> Callable[[], Tensor]:
    """All keys, without a bias."""
    return lambda: kernel.attend(inputs.query, inputs.key.transpose(1, 2), inputs.value.transpose(1, 2), None)


# The host


def sdpa(inputs: Inputs) -> Work:
    """In the layout (B, H, S, D) that is its own; without mask and bias beside a window, of which it knows nothing."""
    problem = inputs.problem
    tensors = [inputs.query, inputs.key, inputs.value]
    leaves = [x.detach().transpose(1, 2).contiguous().requires_grad_(x.requires_grad) for x in tensors]
    if problem.window is None and inputs.bias is not None:
        leaves.append(float_mask(inputs).contiguous().requires_grad_(inputs.bias.requires_grad))
    options = {"is_causal": problem.is_causal and len(leaves) == 3, "enable_gqa": problem.kv_heads < problem.heads}
    return Work(
        lambda: scaled_dot_product_attention(*leaves, **options),
        [leaf for leaf in leaves if leaf.requires_grad],
    )


def host_seconds(call: Callable[[], object], device: str) -> float:
    """Until a call returns: the median of batches, short enough for the launches not to wait in a full queue."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    batches = HOST_BATCHES if device == "cuda" else 3
    for _ in range(HOST_WARM_UP if device == "cuda" else 1):
        call()
    taken = []
    for _ in range(batches):
        wait()
        started = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        taken.append((time.perf_counter() - started) / HOST_CALLS)
    wait()
    return statistics.median(taken)
