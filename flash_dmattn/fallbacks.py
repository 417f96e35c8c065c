"""FLASH_DMATTN_LOG=1 in the environment reports where a call falls back, each kind and reason once (docs/logging.md).

The logger "flash_dmattn" gets them as warnings: what Python decides by `report`, what the compiled module decides
(csrc/fallback_log.h) by `write`.
"""

from __future__ import annotations

import logging
import os

import torch

logger = logging.getLogger("flash_dmattn")
LOGS = os.environ.get("FLASH_DMATTN_LOG") == "1"
_logged: set[tuple[str, str]] = set()


def enabled() -> bool:
    """Whether to report. Never while a graph is traced, where logging would break it."""
    return LOGS and not torch.compiler.is_compiling()


def report(kind: str, text: str) -> None:
    """Call it where `enabled()`. kind: what falls back; text: the reason, and what to change, without sizes: each is
    reported once."""
    if (kind, text) not in _logged:
        _logged.add((kind, text))
        write(kind, text)


def write(kind: str, text: str) -> None:
    logger.warning("flash_dmattn: %s: %s", kind, text)


def report_bias_copy() -> None:
    if enabled():
        text = "its keys are not contiguous: make them the innermost dimension, as projection(x).permute(...) is not"
        report("copy of a bias", text)
