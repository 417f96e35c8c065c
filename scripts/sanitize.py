"""Builds the CPU extension with sanitizers, separately from the usual build, and runs tests under them.

    python scripts/sanitize.py                                      # AddressSanitizer and UndefinedBehaviorSanitizer
    python scripts/sanitize.py thread                               # ThreadSanitizer
    python scripts/sanitize.py address tests/host/test_varlen.py -k causal

Arguments after the mode go to pytest and replace TESTS. The first report ends the run. Needs GCC.
FLASH_DMATTN_CPU_CAPABILITY selects the instruction set, as in any build.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMPILER = os.environ.get("CXX", "c++")
# The CPU kernels, the lists and the operators with random and with wrong arguments.
TESTS = [
    *("tests/host/test_properties.py", "tests/host/test_operator_inputs.py", "tests/host/test_key_lists.py"),
    *("tests/host/test_key_indices.py", "tests/host/test_cpu_few_rows.py", "tests/host/test_cpu_kernels.py"),
    *("tests/host/test_interval_masks.py", "tests/host/test_varlen.py", "tests/host/test_shared_batches.py"),
]
MODES = {
    "address": {
        # vptr needs the type information of PyTorch's classes, which its libraries do not export.
        "flags": ["-fsanitize=address,undefined", "-fno-sanitize=vptr", "-D_GLIBCXX_ASSERTIONS"],
        "libraries": ["libasan.so", "libubsan.so", "libstdc++.so"],  # libstdc++ for the interceptor of exceptions
        # Python and PyTorch free little at exit, and some tests ask for more memory than there is.
        "environment": {
            "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0:allocator_may_return_null=1",
            "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        },
    },
    "thread": {
        "flags": ["-fsanitize=thread"],
        "libraries": ["libtsan.so", "libstdc++.so"],
        "openmp": "scripts/tsan_openmp.cpp",
        # PyTorch's own libraries are not instrumented.
        "environment": {"TSAN_OPTIONS": "halt_on_error=1:ignore_noninstrumented_modules=1", "MKL_NUM_THREADS": "1"},
    },
}


def run(command: list[str], folder: Path, **environment: str) -> int:
    return subprocess.run(command, cwd=folder, env={**os.environ, **environment}).returncode


def build(settings: dict, folder: Path) -> list[str]:
    """Builds a copy of the package in `folder`. Returns the libraries to preload."""
    flags = ["-O1", "-g", "-fno-omit-frame-pointer", *settings["flags"]]
    command = [sys.executable, "setup.py", "build", "--build-lib", str(folder), "--build-temp", str(folder / "objects")]
    environment = {"CXX": COMPILER, "FLASH_DMATTN_CXX_FLAGS": " ".join(flags), "LDFLAGS": " ".join(flags)}
    if run(command, ROOT, CUDA_VISIBLE_DEVICES="", TORCH_CUDA_ARCH_LIST="", **environment):
        sys.exit("the build failed")
    libraries = [library(name) for name in settings["libraries"]]
    if "openmp" in settings:
        libraries.append(str(folder / "openmp.so"))
        shared = [COMPILER, "-std=c++17", "-shared", "-fPIC", "-fopenmp", *flags]
        subprocess.run([*shared, str(ROOT / settings["openmp"]), "-o", libraries[-1]], check=True)
    return libraries


def library(name: str) -> str:
    found = subprocess.run([COMPILER, f"-print-file-name={name}"], capture_output=True, text=True)
    return found.stdout.strip()


def main(mode: str = "address", *arguments: str) -> int:
    if mode not in MODES:
        sys.exit(f"the mode must be one of {', '.join(MODES)}, got {mode}")
    settings, folder = MODES[mode], ROOT / "build" / f"sanitize-{mode}"
    environment = {
        "LD_PRELOAD": ":".join(build(settings, folder)),
        "PYTHONPATH": str(folder),
        "OMP_WAIT_POLICY": "passive",  # slow threads that spin would take the processors from each other
        **settings["environment"],
    }
    # From the build's folder, so that Python imports the package there and not the one in the tree.
    paths = [
        str(ROOT / argument) if (ROOT / argument.partition("::")[0]).exists() else argument
        for argument in arguments or TESTS
    ]
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    return run([*pytest, "--rootdir", str(ROOT), *paths], folder, **environment)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
