"""The compiled CUDA kernels (csrc/cuda)."""

from __future__ import annotations

import torch

from .. import ops
from .compiled import attention_on

NAME = "cuda"
SPARSE_MASKS = True
# Put together here, where no graph is traced.
WHY_NO_KERNELS = (
    ops.WHY_NOT_BUILT
    or f"flash_dmattn was built without CUDA kernels: {ops.compiled_module().build_info()['why_no_cuda']}; "
    "see `Install` in README.md"
)


def why_unavailable() -> str | None:
    if not ops.cuda_is_built():
        return WHY_NO_KERNELS
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    return None


attention = attention_on("cuda")
