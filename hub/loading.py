"""Replaces flash_dmattn/loading.py in the kernel for the Hub: the operators of an extension built by kernel-builder.

Such an extension uses Python's stable ABI, which excludes pybind11's functions. This module stands in for the functions
that the library calls. The operators check all arguments themselves, as they do in traced graphs.
"""

from __future__ import annotations

import torch

from ._ops import add_op_namespace_prefix

NAMESPACE = add_op_namespace_prefix("").removesuffix("::")  # of the operators; every build has its own


class Extension:
    """The interface of the compiled module."""

    has_cuda = True

    @staticmethod
    def build_info() -> dict:
        return {"torch": torch.__version__, "why_no_cuda": None}

    @staticmethod
    def fast_path(*arguments) -> None:
        """No fast path: every call is dispatched in Python."""

    @staticmethod
    def check_fixed(query, key, value, *others) -> None:
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")

    check_varlen = check_fixed

    @staticmethod
    def check_kernels(*arguments) -> None:
        """The operators perform this check and those below."""

    check_packed = check_kv = check_cu_seqlens = check_kernels


def load_compiled() -> tuple[type[Extension], None]:
    return Extension, None
