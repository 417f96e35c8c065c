"""The operators of the compiled module (csrc/torch/library.cpp), registered with fakes and torch.func transforms.

`attention_forward` and `attention_backward` serve fixed and variable length on every device. `Arguments` and
`BackwardArguments` name their arguments. Without a compiled module every operator is None.
"""

from __future__ import annotations

import torch

from .. import fallbacks
from ..loading import NAMESPACE, load_compiled
from . import fakes
from .schema import Arguments, BackwardArguments, MaskTensors

_C, WHY_NOT_BUILT = load_compiled()
if _C is not None and fallbacks.LOGS:
    _C.report_fallbacks_to(fallbacks.write)


def compiled_module():
    """The compiled module. Raises RuntimeError with the reason where there is none."""
    if WHY_NOT_BUILT:
        raise RuntimeError(WHY_NOT_BUILT)
    return _C


def checker():
    """The compiled module where it checks arguments; None without one, and while a graph is traced, whose operators
    check their arguments themselves."""
    return None if WHY_NOT_BUILT or torch.compiler.is_compiling() else _C


def fast_path(*arguments):
    """The result of a call that needs no preparation in Python; None for any other call."""
    module = checker()
    return None if module is None else module.fast_path(*arguments)


def varlen_fast_path(*arguments):
    """`fast_path` of packed sequences."""
    module = checker()
    return None if module is None else module.varlen_fast_path(*arguments)


def kvcache_fast_path(*arguments):
    """`fast_path` over a cache."""
    module = checker()
    return None if module is None else module.kvcache_fast_path(*arguments)


def cuda_is_built() -> bool:
    return not WHY_NOT_BUILT and _C.has_cuda


def _operator(name: str):
    """The operator of that name with its fake; None without a compiled module."""
    if _C is None:
        return None
    torch.library.register_fake(f"{NAMESPACE}::{name}", getattr(fakes, name))
    return getattr(getattr(torch.ops, NAMESPACE), name).default


# csrc/torch/arguments.h, lists.h and cuda_backend.h document arguments and results.
attention_forward = _operator("attention_forward")
attention_backward = _operator("attention_backward")
attention_with_kvcache = _operator("attention_with_kvcache")
compose_attention_with_kvcache = _operator("compose_attention_with_kvcache")
attend_to_gathered_keys = _operator("attend_to_gathered_keys")
build_key_lists = _operator("build_key_lists")
index_key_lists = _operator("index_key_lists")
pack_mask = _operator("pack_mask")
pack_and_list_mask = _operator("pack_and_list_mask")
topk_intervals = _operator("topk_intervals")
topk_lists = _operator("topk_lists")
topk_mask = _operator("topk_mask")

from . import flops, transforms  # noqa: E402, F401  transforms registers itself for the operators above

if _C is not None:
    flops.register()

__all__ = ["Arguments", "BackwardArguments", "MaskTensors"]
