"""The compiled CUDA kernels (csrc/cuda)."""

from __future__ import annotations

import torch

from .. import ops
from .compiled import attention_on

NAME = "cuda"
SPARSE_MASKS = True
# Read at import, where no graph is traced.
WHY_NO_CUDA = None if ops.WHY_NOT_BUILT else ops.compiled_module().build_info()["why_no_cuda"]


def why_unavailable() -> str | None:
    if ops.WHY_NOT_BUILT:
        return ops.WHY_NOT_BUILT
    if WHY_NO_CUDA is not None:
        return f"flash_dmattn was built without CUDA kernels: {WHY_NO_CUDA}; see docs/install.md"
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    return None


attention = attention_on("cuda")
