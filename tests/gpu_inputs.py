"""What the tests of the GPU share: its memory, and random inputs there, in bfloat16 unless a test says otherwise."""

import pytest
import torch
from helpers import inputs

from flash_dmattn import KeyIntervalMask, ops

GIB = 2**30


def takes_gpu_memory(gib):
    """Marks a test that takes so much memory: one at a time, skipped where there is less (conftest.py).

    The group keeps other workers from waiting for their turn; what lets one at a time go is a lock.
    """

    def mark(test):
        return pytest.mark.xdist_group("gpu memory")(pytest.mark.gpu_memory(gib)(test))

    return mark


def runs_hopper_kernels() -> bool:
    """Whether the kernels of csrc/cuda/sm90 were built and the current device runs them."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0) or not ops.cuda_is_built():
        return False
    codes = ops.compiled_module().build_info()["cuda_architectures"].split(",")
    return any(code.startswith("sm_90") for code in codes)


def on_gpu(*args, dtype=torch.bfloat16, **kwargs):
    return inputs(*args, dtype=dtype, device="cuda", **kwargs)


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").to(dtype)


def intervals(*shape, rows, longest=None):
    """Random ones: some empty, some that begin before the first row or end behind the last."""
    start = torch.randint(-10, rows + 10, shape, device="cuda", dtype=torch.int32)
    length = torch.randint(-5, longest or rows, shape, device="cuda", dtype=torch.int32)
    return KeyIntervalMask(start, start + length)
