"""Adds the CUDA, PyTorch and C++ ABI versions to a wheel's version, in its name and metadata, as FlashAttention does:

    python scripts/name_wheel.py dist/flash_dmattn-0.1.0-cp312-cp312-linux_x86_64.whl
    dist/flash_dmattn-0.1.0+cu12torch2.11cxx11abiTRUE-cp312-cp312-linux_x86_64.whl

The versions are those of the installed PyTorch, which the wheel was built against; "cpu" means no CUDA.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch


def local_version() -> str:
    cuda = "cpu" if torch.version.cuda is None else "cu" + torch.version.cuda.partition(".")[0]
    release = ".".join(torch.__version__.split(".")[:2])
    return f"{cuda}torch{release}cxx11abi{str(torch.compiled_with_cxx11_abi()).upper()}"


def wheel(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "wheel", *map(str, arguments)], check=True)


def rename(path: Path, local: str) -> Path:
    """Replaces the wheel at `path` by one with the local version. Returns its path."""
    name, version, tags = path.name.split("-", 2)
    if "+" in version:
        raise SystemExit(f"{path.name} has a local version already")
    full = f"{version}+{local}"
    with tempfile.TemporaryDirectory() as folder:
        wheel("unpack", path, "--dest", folder)
        content = Path(folder) / f"{name}-{version}"
        info = (content / f"{name}-{version}.dist-info").rename(content / f"{name}-{full}.dist-info")
        metadata = info / "METADATA"
        text, count = re.subn(r"^Version: .*$", f"Version: {full}", metadata.read_text(), count=1, flags=re.MULTILINE)
        if count != 1:
            raise SystemExit(f"{path.name} has no Version field in its metadata")
        metadata.write_text(text)
        wheel("pack", content, "--dest-dir", path.parent)
    path.unlink()
    return path.with_name(f"{name}-{full}-{tags}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    print(rename(parser.parse_args().wheel, local_version()))
