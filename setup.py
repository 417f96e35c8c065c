"""Builds flash_dmattn._C: the CPU kernels everywhere. What the package is called and needs stands in pyproject.toml."""

import os
import shutil
import sys
from pathlib import Path

from setuptools import setup

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError:
    sys.exit(
        "flash_dmattn is built against the installed PyTorch, and there is none: install torch >= 2.9 first, "
        "then run `pip install --no-build-isolation .`"
    )

ROOT = Path(__file__).parent
CPU_SOURCES = [
    "csrc/flash_api.cpp",
    *(f"csrc/cpu/{name}.cpp" for name in ("linalg", "mha_bwd", "mha_fwd", "scores", "work")),
]

# Without -fno-trapping-math a select between two floats keeps a loop from becoming vector instructions; nothing here
# reads floating-point exceptions.
CXX_FLAGS = ["-O3", "-fopenmp", "-fno-trapping-math", "-Wno-unknown-pragmas"]

# How at::vec is told which vector instructions it may use.
CPU_CAPABILITY_FLAGS = {
    "DEFAULT": [],
    "AVX2": ["-mavx2", "-mfma", "-mf16c", "-DCPU_CAPABILITY_AVX2"],
    "AVX512": ["-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mfma", "-mf16c", "-DCPU_CAPABILITY_AVX512"],
}


def cpu_flags() -> list[str]:
    """For this machine's processor, or for FLASH_DMATTN_CPU_CAPABILITY."""
    capability = os.environ.get("FLASH_DMATTN_CPU_CAPABILITY", "")
    if not capability:
        capability = torch.backends.cpu.get_cpu_capability()
        capability = capability if capability in CPU_CAPABILITY_FLAGS else "DEFAULT"
    if capability not in CPU_CAPABILITY_FLAGS:
        sys.exit(f"FLASH_DMATTN_CPU_CAPABILITY must be one of {', '.join(CPU_CAPABILITY_FLAGS)}, got {capability}")
    return [f"-DCPU_CAPABILITY={capability}", *CPU_CAPABILITY_FLAGS[capability]]


def require_compiler() -> None:
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None and shutil.which("g++") is None:
        sys.exit(
            f"flash_dmattn needs a C++17 compiler, and {compiler} was not found: on Debian or Ubuntu, apt install g++"
        )


building = any(command.startswith(("build", "bdist", "develop", "install", "editable")) for command in sys.argv[1:])
if building:
    require_compiler()

setup(
    ext_modules=[
        CppExtension(
            "flash_dmattn._C",
            CPU_SOURCES,
            include_dirs=[str(ROOT / "csrc")],
            extra_compile_args=CXX_FLAGS + cpu_flags(),
            extra_link_args=["-fopenmp"],
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
