"""Writes a project for Hugging Face's kernel-builder: build.toml, flake.nix, torch-ext and the sources.

    python scripts/write_hub_kernel.py build/hub
    cd build/hub && git init && git add . && kernel-builder build      # docs/hub.md

The project contains the CUDA and CPU kernels, and the Python package without `integrations` and `parallel`. The
operators are registered under the extension's name, which differs between builds, so that several versions can be
loaded at once.
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
VERSION = 0  # the Hub's version; 0: the interface may still change

# The extension uses Python's stable ABI, which excludes pybind11.
EXCLUDED = ("csrc/torch/module.cpp", "csrc/torch/build_info.h", "csrc/torch/no_cuda.cpp")
EXCLUDED_PYTHON = ("integrations", "parallel", "info.py", "loading.py", "_C.pyi")
GENERATED = "csrc/generated"

# sm90 files run on 9.0 only. The builder skips capabilities that it does not support.
CAPABILITIES = {
    "sm80": ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0"),
    "sm90": ("9.0a",),
}
# The flags of setup.py without those that the builder sets.
CUDA_FLAGS = (
    "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-U__CUDA_NO_HALF_OPERATORS__",
)

# (file, pattern, replacement in the project)
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
    """Copies csrc and generates the kernels. Returns all paths relative to the project."""
    for path in sorted((ROOT / "csrc").rglob("*.*")):
        name = path.relative_to(ROOT).as_posix()
        if name not in EXCLUDED:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / name)
    generate_kernels.generate(folder / GENERATED)
    for name, pattern, replacement in REGISTRATION:
        text, count = re.subn(pattern, replacement, (folder / name).read_text())
        if count == 0:
            raise SystemExit(f"{name} does not contain {pattern}")
        (folder / name).write_text(text)
    return sorted(path.relative_to(folder).as_posix() for path in (folder / "csrc").rglob("*.*"))


def copy_package(folder: Path) -> None:
    package = folder / "torch-ext" / NAME
    ignored = shutil.ignore_patterns(*EXCLUDED_PYTHON, "__pycache__", "*.so", "_C.torch", "py.typed")
    shutil.copytree(ROOT / NAME, package, ignore=ignored)
    shutil.copyfile(ROOT / "hub" / "loading.py", package / "loading.py")
    shutil.copyfile(ROOT / "hub" / "torch_binding.cpp", folder / "torch-ext" / "torch_binding.cpp")


def toml_list(values) -> str:
    return "[\n" + "".join(f'    "{value}",\n' for value in values) + "]"


def kernel_section(name: str, sources: list[str], headers: list[str], capabilities: tuple[str, ...]) -> str:
    return f"""
[kernel.{name}]
backend = "cuda"
depends = ["torch"]
include = ["csrc", "{GENERATED}"]
cuda-capabilities = {toml_list(capabilities)}
cuda-flags = {toml_list(CUDA_FLAGS)}
src = {toml_list([*sources, *headers])}
"""


def build_toml(sources: list[str]) -> str:
    headers = [name for name in sources if name.endswith((".h", ".cuh"))]
    cpp = [name for name in sources if name.endswith(".cpp")]
    # As generate_kernels.targets_of: sm90's dispatch is compiled for every architecture.
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
src = {toml_list(["torch-ext/torch_binding.cpp", *cpp, *headers])}
{kernel_section("sm80", sm80, headers, CAPABILITIES["sm80"])}{
        kernel_section("sm90", sm90, headers, CAPABILITIES["sm90"])
    }"""


def write(folder: Path) -> None:
    if folder.exists() and os.listdir(folder):
        raise SystemExit(f"{folder} exists and is not empty")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "build.toml").write_text(build_toml(copy_sources(folder)))
    copy_package(folder)
    for name in ("hub/flake.nix", "LICENSE", "docs/hub.md"):
        target = "CARD.md" if name.endswith("hub.md") else Path(name).name
        shutil.copyfile(ROOT / name, folder / target)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="output folder, created if missing")
    write(parser.parse_args().folder)
