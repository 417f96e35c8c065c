"""Builds flash_dmattn._C: the CPU kernels everywhere, the CUDA kernels where they can be. Name and needs stand in
pyproject.toml.

CUDA kernels are built where PyTorch is a CUDA build, an nvcc of the same CUDA major version is found, and either a
GPU is present or TORCH_CUDA_ARCH_LIST is set. FLASH_DMATTN_HEAD_DIMS ("64,128") and FLASH_DMATTN_DTYPES ("bf16")
narrow them; FLASH_DMATTN_CPU_CAPABILITY (DEFAULT, AVX2, AVX512) chooses another processor than this one.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup

try:
    import torch
    from torch.utils import cpp_extension
    from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension
except ImportError:
    sys.exit(
        "flash_dmattn is built against the installed PyTorch, and there is none: install torch >= 2.9 first, "
        "then run `pip install --no-build-isolation .`"
    )

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "scripts"))
import generate_kernels  # noqa: E402
from flags_by_file import compile_by_file  # noqa: E402

TORCH_SOURCES = [
    f"csrc/torch/{name}.cpp" for name in ("autograd", "checks", "inputs", "library", "lists", "mha", "module")
]
CPU_SOURCES = [
    *TORCH_SOURCES,
    *(
        f"csrc/cpu/{name}.cpp"
        for name in (
            "gather",
            "gather_bwd",
            "index_lists",
            "key_lists",
            "linalg",
            "mha_bwd",
            "mha_fwd",
            "scores",
            "work",
        )
    ),
]
CUDA_SOURCES = [
    "csrc/torch/cuda_backend.cpp",
    *(
        f"csrc/cuda/{name}.cu"
        for name in (
            *("device", "dispatch", "sm80/bwd", "sm80/fwd", "sm90/bwd", "sm90/fwd", "sm90/tensor_map"),
            *(f"masks/{name}" for name in ("bounded_lists", "index_lists", "interval_tiles", "key_lists", "pack_mask")),
            *(f"passes/{name}" for name in ("clear", "convert", "delta")),
            *(f"select/{name}" for name in ("chunked_sequences", "intervals", "key_lists", "short_sequences", "sort")),
        )
    ),
]

# Without -fno-trapping-math a select between two floats keeps a loop from becoming vector instructions; nothing here
# reads floating-point exceptions.
CXX_FLAGS = ["-O3", "-fopenmp", "-fno-trapping-math", "-Wno-unknown-pragmas"]

# PyTorch's build forbids conversions of the half types; the kernels rely on them.
NVCC_FLAGS = [
    "-O3",
    "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-U__CUDA_NO_HALF_OPERATORS__",
]

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
            f"flash_dmattn needs a C++ compiler, and {compiler} was not found: on Debian or Ubuntu, apt install g++"
        )


def nvcc_version() -> str | None:
    """As in "13.0"; None where no nvcc says what it is."""
    if CUDA_HOME is None:
        return None
    try:
        said = subprocess.run([f"{CUDA_HOME}/bin/nvcc", "--version"], capture_output=True, text=True)
    except OSError:
        return None
    release = re.search(r"release (\d+\.\d+)", said.stdout)
    return release and release.group(1)


def why_without_cuda() -> str | None:
    """None where the CUDA kernels are built, else one sentence."""
    if torch.version.cuda is None:
        return "this PyTorch has no CUDA"
    nvcc = nvcc_version()
    if nvcc is None:
        return "nvcc was not found (set CUDA_HOME)"
    wanted = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if not torch.cuda.is_available() and not wanted:
        return "no GPU was found and TORCH_CUDA_ARCH_LIST is not set"
    major, nvcc_major = (version.partition(".")[0] for version in (torch.version.cuda, nvcc))
    if major != nvcc_major:
        reason = (
            f"nvcc is of CUDA {nvcc} and PyTorch {torch.__version__} of CUDA {torch.version.cuda}: "
            f"set CUDA_HOME to a toolkit of CUDA {major}, or install a PyTorch of CUDA {nvcc_major}"
        )
        if wanted:
            sys.exit(f"flash_dmattn: TORCH_CUDA_ARCH_LIST asks for CUDA kernels, but {reason}")
        return reason
    return None


def quoted(name: str, text: str) -> str:
    """The definition of a macro as a string."""
    return f'-D{name}="{text}"'


def extension():
    flags = {"cxx": [*CXX_FLAGS, *cpu_flags(), quoted("FLASH_DMATTN_TORCH_VERSION", torch.__version__)]}
    options = {"include_dirs": [str(ROOT / "csrc")], "extra_compile_args": flags, "extra_link_args": ["-fopenmp"]}
    reason = why_without_cuda()
    if reason is not None:
        print(f"flash_dmattn: building without CUDA kernels: {reason}")
        flags["cxx"].append(quoted("FLASH_DMATTN_WHY_NO_CUDA", reason))
        return CppExtension("flash_dmattn._C", [*CPU_SOURCES, "csrc/torch/no_cuda.cpp"], **options)

    # Chosen here, not by CUDAExtension, so that the module can tell for which it was built.
    targets = cpp_extension._get_cuda_arch_flags()
    codes = sorted(
        {target.rpartition("code=")[2] for target in targets}, key=lambda c: (c.startswith("compute"), len(c), c)
    )
    generated = ROOT / "build" / "kernels"
    kernels = [os.path.relpath(path, ROOT) for path in generate_kernels.generate(generated, codes)]
    options["include_dirs"].append(str(generated))
    architectures = ",".join(codes)
    flags["cxx"] += ["-DFLASH_DMATTN_WITH_CUDA", quoted("FLASH_DMATTN_CUDA_ARCHITECTURES", architectures)]
    flags["nvcc"] = NVCC_FLAGS + targets
    print(f"flash_dmattn: building {len(kernels)} files of CUDA kernels for {architectures}")
    # The files that take longest come first, so that no core is left alone with one: of kernels the last of the list.
    return CUDAExtension("flash_dmattn._C", kernels[::-1] + CUDA_SOURCES + CPU_SOURCES, **options)


class Build(BuildExtension):
    """Gives the kernels of an architecture the targets that they are written for, and says beside the module for which
    PyTorch it was built: flash_dmattn/loading.py."""

    def build_extension(self, ext):
        self.compiler.compile = compile_by_file(self.compiler.compile, generate_kernels.targets_of)
        super().build_extension(ext)

    def run(self):
        super().run()
        for extension in self.extensions:
            Path(self.get_ext_fullpath(extension.name)).with_name("_C.torch").write_text(torch.__version__)


if any(command.startswith(("build", "bdist", "develop", "install", "editable")) for command in sys.argv[1:]):
    require_compiler()

setup(ext_modules=[extension()], cmdclass={"build_ext": Build})
