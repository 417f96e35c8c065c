"""Writes a project for Hugging Face's kernel-builder: build.toml, flake.nix, torch-ext and the sources, from this tree.

    python scripts/write_hub_kernel.py build/hub
    cd build/hub && git init && git add . && kernel-builder build      # docs/hub.md

Kernels are the CUDA ones, and the CPU kernels behind the same operators; in Python everything but the integrations and
`parallel`. The operators are registered under the extension's name, which differs from build to build, so that several
versions can be loaded at once.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
from pathlib import Path

import generate_kernels

ROOT = Path(__file__).parent.parent
NAME = "flash_dmattn"
VERSION = 0  # that of the Hub: 0 is for kernels whose interface may still change

# The module of pybind11 has no place in an extension that keeps to Python's stable ABI.
LEFT_OUT = ("csrc/torch/module.cpp", "csrc/torch/build_info.h", "csrc/torch/no_cuda.cpp")
PYTHON_LEFT_OUT = ("integrations", "parallel", "info.py", "loading.py", "_C.pyi")
GENERATED = "csrc/generated"

# sm90 holds what runs on 9.0 alone; the rest is built for whatever of this list the builder knows.
CAPABILITIES = {
    "sm80": ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0"),
    "sm90": ("9.0a",),
}
# setup.py's, but for what the builder sets itself.
CUDA_FLAGS = (
    "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-U__CUDA_NO_HALF_OPERATORS__",
)

# (file, what stands there, what stands there in the project)
REGISTRATION = (
    (
        "csrc/torch/library.cpp",
        r"#include <torch/library.h>\n",
        '#include <torch/library.h>\n\n#include "registration.h"\n',
    ),
    ("csrc/torch/library.cpp", r"TORCH_LIBRARY\(flash_dmattn,", "TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME,"),
    ("csrc/torch/library.cpp", r"TORCH_LIBRARY_IMPL\(flash_dmattn,", "TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME,"),
    ("csrc/torch/autograd.cpp", r"TORCH_LIBRARY_IMPL\(flash_dmattn,", "TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME,"),
    ("csrc/torch/operators.h", r'"flash_dmattn::', 'C10_STRINGIZE(TORCH_EXTENSION_NAME) "::'),
)


def copy_sources(folder: Path) -> list[str]:
    """csrc and the generated kernels, in the project; gives their paths there."""
    for path in sorted((ROOT / "csrc").rglob("*.*")):
        name = path.relative_to(ROOT).as_posix()
        if name not in LEFT_OUT:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / name)
    generate_kernels.generate(folder / GENERATED)
    for name, pattern, replacement in REGISTRATION:
        text, count = re.subn(pattern, replacement, (folder / name).read_text())
        if count == 0:
            raise SystemExit(f"{name} no longer has {pattern}")
        (folder / name).write_text(text)
    return sorted(path.relative_to(folder).as_posix() for path in (folder / "csrc").rglob("*.*"))


def copy_package(folder: Path) -> None:
    package = folder / "torch-ext" / NAME
    ignored = shutil.ignore_patterns(*PYTHON_LEFT_OUT, "__pycache__", "*.so", "_C.torch", "py.typed")
    shutil.copytree(ROOT / NAME, package, ignore=ignored)
    shutil.copyfile(ROOT / "hub" / "loading.py", package / "loading.py")
    shutil.copyfile(ROOT / "hub" / "torch_binding.cpp", folder / "torch-ext" / "torch_binding.cpp")


def listed(values) -> str:
    return "[\n" + "".join(f'    "{value}",\n' for value in values) + "]"


def kernel_section(name: str, sources: list[str], headers: list[str], capabilities: tuple[str, ...]) -> str:
    return f"""
[kernel.{name}]
backend = "cuda"
depends = ["torch"]
include = ["csrc", "{GENERATED}"]
cuda-capabilities = {listed(capabilities)}
cuda-flags = {listed(CUDA_FLAGS)}
src = {listed([*sources, *headers])}
"""


def build_toml(sources: list[str]) -> str:
    headers = [name for name in sources if name.endswith((".h", ".cuh"))]
    cpp = [name for name in sources if name.endswith(".cpp")]
    # By file, as generate_kernels.targets_of has it: dispatch for 9.0 is compiled for every architecture.
    sm90 = [name for name in sources if name.endswith("_sm90.cu")]
    sm80 = [name for name in sources if name.endswith(".cu") and name not in sm90]
    return f"""# Written by scripts/write_hub_kernel.py.
[general]
name = "{NAME}"
version = {VERSION}
license = "bsd-3-clause"
backends = ["cuda"]
python-depends = ["einops"]

[torch]
include = ["csrc", "{GENERATED}"]
src = {listed(["torch-ext/torch_binding.cpp", *cpp, *headers])}
{kernel_section("sm80", sm80, headers, CAPABILITIES["sm80"])}{
        kernel_section("sm90", sm90, headers, CAPABILITIES["sm90"])
    }"""


def write(folder: Path) -> None:
    if folder.exists() and os.listdir(folder):
        raise SystemExit(f"{folder} is there and not empty")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "build.toml").write_text(build_toml(copy_sources(folder)))
    copy_package(folder)
    for name in ("hub/flake.nix", "LICENSE", "docs/hub.md"):
        target = "CARD.md" if name.endswith("hub.md") else Path(name).name
        shutil.copyfile(ROOT / name, folder / target)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the project is written; made where it is missing")
    write(parser.parse_args().folder)
