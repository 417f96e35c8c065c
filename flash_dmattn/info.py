"""`python -m flash_dmattn.info` prints the build, the machine and the available backends. With `--device` it prints
"cuda" where the CUDA kernels were built for PyTorch's current GPU, else "cpu"."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import torch

from . import __version__, backends, ops

DTYPES = {"fp16": "float16", "bf16": "bfloat16"}


def parts_of(architecture: str) -> tuple[str, str, str]:
    """Splits nvcc's name of an architecture: sm (machine code) or compute (PTX), the version, and a letter or
    nothing."""
    return re.fullmatch(r"(sm|compute)_(\d+)([a-z]?)", architecture).groups()


def serves(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether code for an architecture, in nvcc's naming, runs on a GPU of a compute capability."""
    kind, version, specific = parts_of(architecture)
    built = divmod(int(version), 10)
    if specific:
        return capability == built
    if kind == "compute":  # the driver compiles PTX for any later GPU
        return capability >= built
    return capability[0] == built[0] and capability >= built


def code_for(architectures: list[str], capability: tuple[int, int]) -> str | None:
    """The architecture whose code the driver loads on a GPU: the latest machine code that runs, else the latest PTX."""

    def preference(architecture: str) -> tuple[bool, int, str]:
        kind, version, specific = parts_of(architecture)
        return kind == "sm", int(version), specific

    return max((name for name in architectures if serves(name, capability)), key=preference, default=None)


def described_architecture(architecture: str) -> str:
    return architecture.replace("compute_", "PTX for compute_")


def cuda_kernels(build: dict[str, str | None]) -> list[tuple[str, str]]:
    if build["why_no_cuda"] is not None:
        return [("CUDA kernels", f"not built: {build['why_no_cuda']}")]
    head_dims = build["head_dims"].split(",")
    return [
        ("CUDA kernels", f"built with CUDA {build['cuda']}"),
        ("  architectures", ", ".join(map(described_architecture, build["cuda_architectures"].split(",")))),
        ("  head dimensions", f"up to {head_dims[-1]}, each served by the next of {', '.join(head_dims)}"),
        ("  dtypes", ", ".join(DTYPES[dtype] for dtype in build["dtypes"].split(","))),
    ]


def built_in() -> list[tuple[str, str]]:
    lines = [("torch", torch.__version__)]
    if ops.WHY_NOT_BUILT:
        return [*lines, ("compiled kernels", f"none: {ops.WHY_NOT_BUILT}")]
    build = ops.compiled_module().build_info()
    if build["torch"] != torch.__version__:
        lines = [("torch", f"{torch.__version__}, built against {build['torch']}")]
    return [*lines, ("CPU kernels", f"built for {build['cpu_capability']}"), *cuda_kernels(build)]


def built_architectures() -> list[str]:
    return ops.compiled_module().build_info()["cuda_architectures"].split(",") if ops.cuda_is_built() else []


def best_device() -> str:
    """The fastest device type on this machine for the compiled kernels."""
    is_served = torch.cuda.is_available() and code_for(built_architectures(), torch.cuda.get_device_capability())
    return "cuda" if is_served else "cpu"


def gpus() -> list[tuple[str, str]]:
    """A line for each GPU: whether code for it was built."""
    architectures = built_architectures()
    lines = []
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        text = f"{torch.cuda.get_device_name(index)}, compute capability {capability[0]}.{capability[1]}"
        best = code_for(architectures, capability)
        if best is not None:
            text += f", runs the kernels for {described_architecture(best)}"
        elif architectures:
            text += ", which the CUDA kernels were not built for: see TORCH_CUDA_ARCH_LIST"
        lines.append((f"GPU {index}", text))
    return lines


def usable() -> list[tuple[str, str]]:
    """A line for each backend, best first."""
    reasons = {name: backends.load(name).why_unavailable() for name in backends.NAMES}
    return [(name, "available" if reason is None else f"no: {reason}") for name, reason in reasons.items()]


def section(title: str, lines: list[tuple[str, str]]) -> str:
    width = 1 + max(len(name) for name, _ in lines)
    return "\n".join([title, *(f"  {name:{width}} {text}" for name, text in lines)])


def report() -> str:
    """The whole report, as text."""
    machine = gpus() or [("GPU", "none that PyTorch sees")]
    return "\n\n".join(
        [
            section(f"flash_dmattn {__version__} in {Path(__file__).parent}", built_in()),
            section("This machine", [("Python", sys.version.split()[0]), *machine]),
            section("Backends", usable()),
        ]
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m flash_dmattn.info", description=__doc__)
    parser.add_argument("--device", action="store_true", help="print only the fastest device type: cuda or cpu")
    print(best_device() if parser.parse_args().device else report())
