"""The backends by name. Each is a module with

    NAME: str
    SPARSE_MASKS: bool                  whether `mask` is ops.MaskTensors (the compiled backends), or else a bool tensor
    why_unavailable() -> str | None     None where the backend is available, else one sentence with the reason
    attention(query, key, value, mask, bias, relative_bias=None, **options) -> (out, lse)     options: call.Options

The compiled backends also take varlen and cache_seqlens. Inputs have been checked (checks.py): query (B, Sq, H, D), key
and value (B, Sk, Hkv, D) with a contiguous D, a multiple of 8; mask None, MaskTensors, or bool ({B|B/n|1}, {H|Hkv|1},
{Sq|1}, {Sk|1}); bias None or floating in a bool mask's shapes, never constant along the keys; relative_bias float32, or
float64 for a float64 query, ({B|1}, {H|Hkv|1}, 2R + 1) or, of a grid, ({B|1}, {H|Hkv|1}, 2h - 1, 2w - 1). `attention`
returns out (B, Sq, H, D) and lse (B, H, Sq), both differentiable. It raises an error for what it does not support: no
backend falls back to another.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Literal, get_args

# Best first: flash_dmattn_func_auto selects the first available one.
Backend = Literal["cuda", "cpu", "triton", "flex", "reference"]
NAMES = get_args(Backend)


def load(name: str) -> ModuleType:
    """The backend's module, available or not."""
    if name not in NAMES:
        raise ValueError(f"backend must be one of {', '.join(NAMES)}, got {name!r}")
    # A traced graph cannot import, but finds an imported module.
    full_name = f"{__name__}.{name}"
    return sys.modules[full_name] if full_name in sys.modules else importlib.import_module(full_name)


def require(name: str) -> ModuleType:
    """The backend's module. Raises RuntimeError with the reason where it is unavailable."""
    backend = load(name)
    reason = backend.why_unavailable()
    if reason is not None:
        raise RuntimeError(f"the backend '{name}' is not available: {reason}")
    return backend


def is_available(name: str) -> bool:
    return load(name).why_unavailable() is None


def get_available_backends() -> list[str]:
    """The names of the backends that are available on this machine, best first."""
    return [name for name in NAMES if is_available(name)]
