"""The backends by name. Each is a module with

    NAME: str
    SPARSE_MASKS: bool                  whether `mask` may be a KeyIntervalMask or KeyLists; else it comes in dense form
    why_unavailable() -> str | None     None where it can be used here, else one sentence that says why not
    attention(query, key, value, mask, bias, *, softmax_scale, is_causal, softcap, deterministic) -> (out, lse)

The compiled ones also take varlen and cache_seqlens, and as mask the lists of `selection.select`. Inputs have been
checked (checks.py): query (B, Sq, H, D), key and value (B, Sk, Hkv, D) with a contiguous D, a multiple of 8; mask None,
bool ({B|B/n|1}, {H|Hkv|1}, {Sq|1}, {Sk|1}), a KeyIntervalMask (the kernels then go by tiles) or KeyLists (they gather
the listed keys); bias None or floating in a bool mask's shapes, never constant along the keys. It returns out
(B, Sq, H, D) and lse (B, H, Sq), both differentiable. What it cannot do it refuses with an error: no backend falls back to another.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

# Best first: flash_dmattn_func_auto takes the first that is available.
NAMES = ("cuda", "cpu", "triton", "flex", "reference")


def load(name: str) -> ModuleType:
    """The backend's module, whether or not it can be used here."""
    if name not in NAMES:
        raise ValueError(f"backend must be one of {', '.join(NAMES)}, got {name!r}")
    # What is there already is found where a graph is traced, which cannot import.
    full_name = f"{__name__}.{name}"
    return sys.modules[full_name] if full_name in sys.modules else importlib.import_module(full_name)


def require(name: str) -> ModuleType:
    """The backend's module, or a RuntimeError that says why it cannot be used here."""
    backend = load(name)
    reason = backend.why_unavailable()
    if reason is not None:
        raise RuntimeError(f"the backend '{name}' is not available: {reason}")
    return backend


def is_available(name: str) -> bool:
    return load(name).why_unavailable() is None


def get_available_backends() -> list[str]:
    """The names of the backends that can be used on this machine, best first."""
    return [name for name in NAMES if is_available(name)]
