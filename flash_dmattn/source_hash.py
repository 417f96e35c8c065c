"""A hash of the sources of the compiled module. setup.py runs this file alone, so it imports nothing of the package."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

SUFFIXES = (".h", ".cpp", ".cuh", ".cu")
SETUP = ("setup.py",)
CUDA_SETUP = ("setup.py", "scripts/flags_by_file.py", "scripts/generate_kernels.py")


def source_hash(root: Path, with_cuda: bool) -> str | None:
    """The hash of what a build in `root` reads, with or without the CUDA kernels; None if `root` is no source tree."""
    paths = []
    for folder, folders, files in os.walk(root / "csrc"):
        if not with_cuda and "cuda" in folders:
            folders.remove("cuda")
        paths += [os.path.join(folder, name) for name in files if name.endswith(SUFFIXES)]
    setup = [os.path.join(root, name) for name in (CUDA_SETUP if with_cuda else SETUP)]
    if not paths or not all(map(os.path.exists, setup)):
        return None
    digest = hashlib.sha256()
    for path in sorted(paths) + setup:
        with open(path, "rb") as file:
            content = file.read()
        digest.update(f"{os.path.relpath(path, root)} {len(content)}\n".encode() + content)
    return digest.hexdigest()
