"""The compiled CPU kernels (csrc/cpu)."""

from __future__ import annotations

from .. import ops
from .compiled import attention_on

NAME = "cpu"
SPARSE_MASKS = True


def why_unavailable() -> str | None:
    return ops.WHY_NOT_BUILT


attention = attention_on("cpu")
