"""Loads the compiled module, or finds out why it cannot be used."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from types import ModuleType

import torch

NAMESPACE = "flash_dmattn"  # of the operators

# setup.py writes it beside the module: a module that does not load cannot report its PyTorch version.
STAMP = Path(__file__).with_name("_C.torch")


def load_compiled() -> tuple[ModuleType | None, str | None]:
    """(module, None), or (None or module, the reason why it is unusable). Warns about a build for another PyTorch."""
    if importlib.util.find_spec(f"{__package__}._C") is None:
        return None, "flash_dmattn's compiled module is missing; run `pip install .` in its source tree"
    built_for = STAMP.read_text().strip() if STAMP.exists() else None
    if built_for is not None and not fits(built_for):
        return None, warned(other_torch(built_for))
    try:
        from . import _C
    except ImportError as error:
        if built_for not in (None, torch.__version__):
            return None, warned(f"{other_torch(built_for)} ({error})")
        return None, f"flash_dmattn's compiled module does not load ({error}); run `pip install .` in its source tree"
    built_for = _C.build_info()["torch"]
    if not fits(built_for):
        return None, warned(other_torch(built_for))
    return _C, _C.why_not_usable()


def fits(built_for: str) -> bool:
    """Whether the minor versions match: PyTorch changes its C++ interface between these. Ignores +cpu and +cu130."""
    return built_for.split(".")[:2] == torch.__version__.split(".")[:2]


def other_torch(built_for: str) -> str:
    return (
        f"flash_dmattn's compiled module was built for PyTorch {built_for}, and this is PyTorch {torch.__version__}: "
        "run `pip install --no-build-isolation .` in its source tree again"
    )


def warned(reason: str) -> str:
    warnings.warn(reason, stacklevel=2)
    return reason
