"""The environment that a figure comes from, and the console."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import flash_dmattn

CHANGES = " + changes"  # after a commit from which tracked files differ


def console(quiet: bool = False) -> Console:
    """As wide as the terminal; written to a file, wide enough for the tables here."""
    return Console(width=None if sys.stdout.isatty() else 140, quiet=quiet)


def progress(on: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=on, transient=True)


def sentence(error: Exception) -> str:
    """The first line of an error's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def in_short(refusal: str) -> str:
    short = {"out of memory": "no memory", "left out": "left out"}
    return next((short[text] for text in short if text in refusal), "refused" if refusal else "")


def environment(device: str) -> dict[str, object]:
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "flash_dmattn": flash_dmattn.__version__,
        "commit": commit(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "triton": version_of("triton"),
        "transformers": version_of("transformers"),
    }


def describe(where: dict[str, object]) -> str:
    """An environment in one line."""
    return (
        f"{where['device']}, {where['threads']} threads, torch {where['torch']}, commit {where['commit'] or 'unknown'}"
    )


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of this source tree, with CHANGES where tracked files differ from it.

    In a copy without its git folder FLASH_DMATTN_COMMIT names the commit; else None.
    """
    if os.environ.get("FLASH_DMATTN_COMMIT"):
        return os.environ["FLASH_DMATTN_COMMIT"]

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        head, changes = git("rev-parse", "--short", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + CHANGES if changes else head
