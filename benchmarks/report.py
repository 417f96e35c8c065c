"""What the scripts here share around their work: arguments, where they run, progress, and the JSON they write."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from problem import DTYPES
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import flash_dmattn
from flash_dmattn.backends import NAMES, require

# How a backend says that it cannot do what was asked; running out of memory is a RuntimeError, too.
REFUSALS = (TypeError, ValueError, RuntimeError)


def argument_parser(description: str, backends: str | None) -> argparse.ArgumentParser:
    """With the arguments that every script has; `backends` says which are taken by default, None leaves it out."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=here, help="(default: %(default)s)")
    if backends is not None:
        parser.add_argument("--backend", action="append", choices=NAMES, help=f"may be repeated (default: {backends})")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs (default: %(default)s)")
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="write everything there")
    return parser


def add_common(parser: argparse.ArgumentParser, **options: dict[str, object]) -> None:
    """Options that several scripts have, by their names; of each what this script says otherwise than COMMON."""
    for name, differing in options.items():
        parser.add_argument(f"--{name}", **COMMON[name] | differing)


def dtype_of(options: argparse.Namespace) -> str:
    return options.dtype or ("float32" if options.device == "cpu" else "bfloat16")


def require_workloads(parser: argparse.ArgumentParser, options: argparse.Namespace, found: Collection) -> None:
    if not found:
        parser.error(f"--workload: no workload has {options.workload!r} in its name")


def file_to_write(path: str) -> Path:
    """An argument that names a file: found out to be impossible before the work, not after it."""
    if not Path(path).absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {Path(path).parent}")
    return Path(path)


def positive(number: str) -> int:
    if int(number) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return int(number)


COMMON = {
    "dtype": {"choices": DTYPES, "help": "(default: bfloat16; float32 on the CPU)"},
    "workload": {"default": "", "metavar": "TEXT", "help": "only the workloads whose name has this in it"},
    "shrink": {"type": positive, "default": 1, "metavar": "N", "help": "divide lengths and windows"},
    "threads": {"type": positive, "default": 2, "help": "of the CPU (default: %(default)s)"},
    "samples": {"type": positive, "default": 3, "help": "taken on the CPU (default: %(default)s)"},
    "check": {"action": "store_true", "help": "exit status 1 where ours is slower than was asked for"},
}


def parse(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """The arguments, their device and backends known to be there."""
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this PyTorch finds no CUDA device")
    for name in getattr(options, "backend", None) or ():
        try:
            require(name)
        except RuntimeError as error:
            parser.error(str(error))
    return options


def console() -> Console:
    """As wide as the terminal; written to a file, wide enough for the tables here."""
    return Console(width=None if sys.stdout.isatty() else 140)


def progress(on: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=on, transient=True)


def sentence(error: Exception) -> str:
    """The first line of an error's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def environment(device: str) -> dict[str, object]:
    """Where these figures come from."""
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
    """The commit of this source tree, with "+ changes" where tracked files differ from it.

    Where the tree is a copy without its git folder, FLASH_DMATTN_COMMIT can name it; None where nothing does.
    """
    if os.environ.get("FLASH_DMATTN_COMMIT"):
        return os.environ["FLASH_DMATTN_COMMIT"]
    git = ["git", "--no-optional-locks", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        status = [*git, "status", "--porcelain", "--untracked-files=no"]
        changes = subprocess.run(status, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head} + changes" if changes else head


def write_json(path: Path, where: dict[str, object], **content: object) -> None:
    path.write_text(json.dumps(finite({"environment": where, **content}), indent=2, allow_nan=False) + "\n")


def finite(value: object) -> object:
    """`value` with "inf" and "nan" for the numbers that JSON cannot write."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
