"""Builds the CPU kernels for each instruction set of this machine and tests every build: `make test-capabilities`.

PyTorch and MKL are limited to the instruction set of the build, so a machine with AVX-512 tests what an older one runs,
apart from an MKL on AMD, which selects its kernels by the processor. Each build is tested with 1, 2 and 16 threads. The
builds are in build/capabilities; the installed module stays as it is.

    python scripts/check_capabilities.py --capabilities AVX2 --threads 16 -- -k test_lengths
"""

import argparse
import itertools
import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
# Each with the instruction set that limits MKL.
CAPABILITIES = {"DEFAULT": "SSE4_2", "AVX2": "AVX2", "AVX512": "AVX512"}
THREADS = [1, 2, 16]
TESTS = ["conformance", *(f"host/test_{name}.py" for name in ("cpu_kernels", "key_indices", "key_lists", "semantics"))]
# All tests of the files of tests/host; of the conformance suite what depends on the width of a vector and on a BLAS.
SAMPLE = (
    "test_cpu_kernels or test_key_indices or test_key_lists or test_semantics or cpu and (test_determinism or "
    "(float32 or bfloat16) and (test_head_dims or test_head_groups or test_several_blocks and (bool or intervals)))"
)


def supported() -> list[str]:
    """The instruction sets of this machine that PyTorch has kernels for."""
    names, best = list(CAPABILITIES), torch.backends.cpu.get_cpu_capability()
    return names[: names.index(best) + 1] if best in names else names[:1]


def build(capability: str) -> Path:
    """Builds the package for an instruction set; returns the folder that holds it."""
    base = ROOT / "build" / "capabilities" / capability
    environment = os.environ | {"FLASH_DMATTN_CPU_CAPABILITY": capability}
    subprocess.run([sys.executable, "setup.py", "build", "--build-base", base], cwd=ROOT, env=environment, check=True)
    return next(base.glob("lib.*"))


def run_tests(package: Path, capability: str, threads: int, arguments: list[str]) -> bool:
    """Whether the tests pass on the package in this folder."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")} | {
        "PYTHONPATH": str(package),
        "ATEN_CPU_CAPABILITY": capability.lower(),
        "MKL_ENABLE_INSTRUCTIONS": CAPABILITIES[capability],
        "OMP_NUM_THREADS": str(threads),
    }
    tests = ROOT / "tests"  # the working directory too: from the root, Python would import the package there
    described = "from flash_dmattn import ops; print(ops._C.__file__, ops._C.build_info()['cpu_capability'])"
    description = subprocess.check_output([sys.executable, "-c", described], cwd=tests, env=environment, text=True)
    if description.split() != [str(next((package / "flash_dmattn").glob("_C*.so"))), capability]:
        sys.exit(f"the module of {package} was to be tested, and Python imports {description}")
    print(f"{capability}, {threads} threads", flush=True)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *(arguments or ["-k", SAMPLE]), *TESTS]
    return subprocess.run(command, cwd=tests, env=environment).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capabilities", nargs="+", choices=CAPABILITIES, default=supported())
    parser.add_argument("--threads", nargs="+", type=int, default=THREADS)
    parser.add_argument("arguments", nargs="*", help="arguments of pytest after --, in place of -k with a sample")
    options = parser.parse_args()
    packages = {capability: build(capability) for capability in options.capabilities}
    failed = [
        f"{capability} with {threads} threads"
        for capability, threads in itertools.product(packages, options.threads)
        if not run_tests(packages[capability], capability, threads, options.arguments)
    ]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
