"""Loads the compiled module, or finds out why it cannot be used."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from types import ModuleType

import torch

from .source_hash import source_hash

NAMESPACE = "flash_dmattn"  # of the operators
INSTALL = "run `pip install --no-build-isolation .` in its source tree"

# setup.py writes a file next to the module. Its two lines are PyTorch's version, which a module that fails to load
# cannot report, and the hash of the sources.
STAMP = Path(__file__).with_name("_C.torch")
ROOT = Path(__file__).parents[1]  # the source tree of an editable installation


def load_compiled() -> tuple[ModuleType | None, str | None]:
    """(module, None), or (None or module, the reason why it is unusable).

    Warns about a build for another PyTorch, and about a build of other sources than those in the tree.
    """
    if importlib.util.find_spec(f"{__package__}._C") is None:
        return None, f"flash_dmattn's compiled module is missing in {ROOT}; {INSTALL}, then leave that tree"
    built_for, built_of = stamp()
    if built_for is not None and not fits(built_for):
        return None, warned(other_torch(built_for))
    try:
        from . import _C
    except ImportError as error:
        if built_for not in (None, torch.__version__):
            return None, warned(f"{other_torch(built_for)} ({error})")
        return None, f"flash_dmattn's compiled module does not load ({error}); {INSTALL}"
    built_for = _C.build_info()["torch"]
    if not fits(built_for):
        return None, warned(other_torch(built_for))
    if built_of is not None and source_hash(ROOT, _C.has_cuda) not in (None, built_of):
        warned(
            f"flash_dmattn's compiled module was not built from the current sources in {ROOT}: "
            "run `pip install --no-build-isolation -e .` there again"
        )
    return _C, _C.why_not_usable()


def stamp() -> tuple[str | None, str | None]:
    """(PyTorch's version, hash of the sources) of the build, None where it is unknown."""
    lines = STAMP.read_text().splitlines() if STAMP.exists() else []
    built_for, built_of = [*lines, None, None][:2]
    return built_for, built_of


def fits(built_for: str) -> bool:
    """Whether the minor versions match: PyTorch changes its C++ interface between these. Ignores +cpu and +cu130."""
    return built_for.split(".")[:2] == torch.__version__.split(".")[:2]


def other_torch(built_for: str) -> str:
    return (
        f"flash_dmattn's compiled module was built for PyTorch {built_for}, and this is PyTorch {torch.__version__}: "
        f"{INSTALL} again"
    )


def warned(reason: str) -> str:
    warnings.warn(reason, stacklevel=2)
    return reason
