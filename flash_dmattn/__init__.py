"""Dynamic-mask attention: exact attention with model-generated masks and additive biases, with gradients for query,
key, value and the bias."""

import importlib
from typing import TYPE_CHECKING

from . import relative as relative
from .backends import get_available_backends, is_available
from .interface import (
    flash_dmattn_func,
    flash_dmattn_func_auto,
    flash_dmattn_kvpacked_func,
    flash_dmattn_qkvpacked_func,
    flash_dmattn_varlen_func,
    flash_dmattn_varlen_kvpacked_func,
    flash_dmattn_varlen_qkvpacked_func,
    flash_dmattn_with_kvcache,
)
from .masks import KeyIntervalMask, KeyLists, create_mask
from .merge import merge_attention
from .padding import pad_input, unpad_input

__version__ = "0.1.0"

_AVAILABLE = {"CUDA_AVAILABLE": "cuda", "TRITON_AVAILABLE": "triton", "FLEX_AVAILABLE": "flex"}
_MODULES = ("integrations", "parallel", "visualize")  # imported on access
# Names of upstream's flash-dmattn, deprecated, and their modules.
_UPSTREAM = {"triton_dmattn_func": "flash_dmattn_triton", "flex_dmattn_func": "flash_dmattn_flex"}

if TYPE_CHECKING:
    from . import integrations as integrations
    from . import parallel as parallel
    from . import visualize as visualize
    from .flash_dmattn_flex import flex_dmattn_func as flex_dmattn_func
    from .flash_dmattn_triton import triton_dmattn_func as triton_dmattn_func

    CUDA_AVAILABLE: bool
    TRITON_AVAILABLE: bool
    FLEX_AVAILABLE: bool
else:

    def __getattr__(name):
        # Evaluated on access: it imports Triton and FlexAttention.
        if name in _AVAILABLE:
            return is_available(_AVAILABLE[name])
        if name in _MODULES:
            return importlib.import_module(f".{name}", __name__)
        if name in _UPSTREAM:
            return getattr(importlib.import_module(f".{_UPSTREAM[name]}", __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *_AVAILABLE, *_MODULES})


__all__ = [
    "CUDA_AVAILABLE",
    "FLEX_AVAILABLE",
    "TRITON_AVAILABLE",
    "KeyIntervalMask",
    "KeyLists",
    "create_mask",
    "flash_dmattn_func",
    "flash_dmattn_func_auto",
    "flash_dmattn_kvpacked_func",
    "flash_dmattn_qkvpacked_func",
    "flash_dmattn_varlen_func",
    "flash_dmattn_varlen_kvpacked_func",
    "flash_dmattn_varlen_qkvpacked_func",
    "flash_dmattn_with_kvcache",
    "get_available_backends",
    "merge_attention",
    "pad_input",
    "unpad_input",
]
