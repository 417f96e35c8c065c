"""The warning for names of upstream's flash-dmattn that differ here."""

from __future__ import annotations

import sys
import warnings

import torch

OWN = (f"{__package__}.", "importlib.", "_frozen_importlib", "torch.")


def deprecated(old: str, new: str) -> None:
    """Warns at the line that uses `old`: the innermost one outside of this package."""
    if torch.compiler.is_compiling():
        return
    frame = sys._getframe(1)
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith(OWN):
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    place = frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__")
    warnings.warn_explicit(f"{old} is deprecated: use {new}", DeprecationWarning, *place, registry)
