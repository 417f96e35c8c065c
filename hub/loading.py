"""The operators of an extension that kernel-builder made, in the place of a compiled module: written over
flash_dmattn/loading.py in the kernel for the Hub.

Such an extension keeps to Python's stable ABI, which pybind11's functions do not. What the library asks of them is
here: the operators check every argument themselves, as they do in graphs that are traced.
"""

from __future__ import annotations

import torch

from ._ops import add_op_namespace_prefix

NAMESPACE = add_op_namespace_prefix("").removesuffix("::")  # of the operators, another for every build


class Extension:
    """What is asked of the compiled module."""

    has_cuda = True

    @staticmethod
    def build_info() -> dict:
        return {"torch": torch.__version__, "why_no_cuda": None}

    @staticmethod
    def fast_path(*arguments) -> None:
        """Every call goes the way of Python."""

    @staticmethod
    def check_fixed(query, key, value, *others) -> None:
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")

    check_varlen = check_fixed

    @staticmethod
    def check_kernels(*arguments) -> None:
        """Left to the operators, as what follows."""

    check_packed = check_kv = check_cu_seqlens = check_kernels


def load_compiled() -> tuple[type[Extension], None]:
    return Extension, None
