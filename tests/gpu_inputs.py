"""Shared by the GPU tests: marks, memory limits, and random inputs on the GPU, in bfloat16 by default."""

import pytest
import torch
from helpers import inputs, rand_mask

from flash_dmattn import KeyIntervalMask, ops

GIB = 2**30
# The pytestmark of files whose tests need CUDA kernels.
NEEDS_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ops.cuda_is_built(), reason="flash_dmattn was built without CUDA kernels"),
]
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def takes_gpu_memory(gib):
    """Marks a test that allocates so many GiB of GPU memory: it runs alone, and is skipped where less is free.

    A lock (conftest.py) serializes these tests; the group keeps the workers from waiting for the lock.
    """

    def mark(test):
        return pytest.mark.xdist_group("gpu memory")(pytest.mark.gpu_memory(gib)(test))

    return mark


def captured(call):
    """Captures a call in a CUDA graph, after one on another stream. Returns the graph, and the result that each replay
    overwrites."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def runs_hopper_kernels() -> bool:
    """Whether the kernels of csrc/cuda/sm90 were built and the current device runs them."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0) or not ops.cuda_is_built():
        return False
    codes = ops.compiled_module().build_info()["cuda_architectures"].split(",")
    return any(code.startswith("sm_90") for code in codes)


def on_gpu(*args, dtype=torch.bfloat16, **kwargs):
    return inputs(*args, dtype=dtype, device="cuda", **kwargs)


def mask_of(*shape, visible=0.6):
    return rand_mask(*shape, visible=visible, device="cuda")


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").to(dtype)


def intervals(*shape, rows, longest=None):
    """A random KeyIntervalMask: some intervals are empty, some begin before row 0 or end after the last row."""
    start = torch.randint(-10, rows + 10, shape, device="cuda", dtype=torch.int32)
    length = torch.randint(-5, longest or rows, shape, device="cuda", dtype=torch.int32)
    return KeyIntervalMask(start, start + length)
