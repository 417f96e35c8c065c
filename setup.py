"""Builds flash_dmattn._C: the CPU kernels always, the CUDA kernels where possible. Metadata is in pyproject.toml.

CUDA kernels require a CUDA build of PyTorch, an nvcc of the same CUDA major version, and a GPU of compute capability
8.0 or newer (or TORCH_CUDA_ARCH_LIST). FLASH_DMATTN_HEAD_DIMS ("64,128") and FLASH_DMATTN_DTYPES ("bf16") restrict
them. FLASH_DMATTN_CPU_CAPABILITY (DEFAULT, AVX2, AVX512) selects the CPU instruction set; the default is that of the
build machine. FLASH_DMATTN_CXX_FLAGS are further flags of the C++ compiler (scripts/sanitize.py).
"""

import functools
import os
import re
import runpy
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
        "flash_dmattn is built against the installed PyTorch, which was not found: install torch >= 2.9 first, "
        "then run `pip install --no-build-isolation .`"
    )

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "scripts"))
import generate_kernels  # noqa: E402
from flags_by_file import compile_by_file  # noqa: E402

source_hash = runpy.run_path(str(ROOT / "flash_dmattn" / "source_hash.py"))["source_hash"]


def sources(*patterns: str) -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern))


# The PyTorch boundary has one file for a build with CUDA kernels and one for a build without them.
WITH_CUDA, WITHOUT_CUDA = "csrc/torch/cuda_backend.cpp", "csrc/torch/no_cuda.cpp"
CPU_SOURCES = [path for path in sources("csrc/torch/*.cpp", "csrc/cpu/*.cpp") if path not in (WITH_CUDA, WITHOUT_CUDA)]
CUDA_SOURCES = [WITH_CUDA, *sources("csrc/cuda/**/*.cu")]

# -fno-trapping-math allows the compiler to vectorize loops with float selects. No code reads floating-point exceptions.
# -g0: many Pythons compile extensions with -g, which makes the module 30 MB larger.
CXX_FLAGS = ["-O3", "-g0", "-fopenmp", "-fno-trapping-math", "-Wno-unknown-pragmas"]

# PyTorch disables conversions of the half types, which the kernels use.
NVCC_FLAGS = [
    "-O3",
    "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-U__CUDA_NO_HALF_OPERATORS__",
]

# at::vec selects its vector instructions by these macros.
CPU_CAPABILITY_FLAGS = {
    "DEFAULT": [],
    "AVX2": ["-mavx2", "-mfma", "-mf16c", "-DCPU_CAPABILITY_AVX2"],
    "AVX512": ["-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mfma", "-mf16c", "-DCPU_CAPABILITY_AVX512"],
}


def cpu_flags() -> list[str]:
    """Flags for FLASH_DMATTN_CPU_CAPABILITY, by default this machine's instruction set."""
    capability = os.environ.get("FLASH_DMATTN_CPU_CAPABILITY", "")
    if not capability:
        capability = torch.backends.cpu.get_cpu_capability()
        capability = capability if capability in CPU_CAPABILITY_FLAGS else "DEFAULT"
    if capability not in CPU_CAPABILITY_FLAGS:
        sys.exit(f"FLASH_DMATTN_CPU_CAPABILITY must be one of {', '.join(CPU_CAPABILITY_FLAGS)}, got {capability}")
    return [f"-DCPU_CAPABILITY={capability}", *CPU_CAPABILITY_FLAGS[capability]]


def require_compiler() -> None:
    """PyTorch compiles with the command in CXX, such as "ccache g++", or else with c++."""
    command = os.environ.get("CXX", "c++")
    if shutil.which(command.partition(" ")[0]) is None:
        name = f"CXX={command}" if "CXX" in os.environ else command
        sys.exit(
            f"flash_dmattn needs a C++ compiler, and {name} was not found: "
            "set CXX to an installed one, or install g++ (on Debian or Ubuntu, apt install g++)"
        )


def nvcc_version() -> str | None:
    """The version of nvcc, such as "13.0"; None if nvcc was not found."""
    if CUDA_HOME is None:
        return None
    try:
        result = subprocess.run([f"{CUDA_HOME}/bin/nvcc", "--version"], capture_output=True, text=True)
    except OSError:
        return None
    release = re.search(r"release (\d+\.\d+)", result.stdout)
    return release and release.group(1)


def why_without_cuda() -> str | None:
    """The reason why the CUDA kernels are not built; None if they are."""
    if torch.version.cuda is None:
        return "this PyTorch has no CUDA"
    nvcc = nvcc_version()
    if nvcc is None:
        return "nvcc was not found (set CUDA_HOME)"
    arch_list = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if not torch.cuda.is_available() and not arch_list:
        return "no GPU was found and TORCH_CUDA_ARCH_LIST is not set"
    major, nvcc_major = (version.partition(".")[0] for version in (torch.version.cuda, nvcc))
    if major != nvcc_major:
        reason = (
            f"nvcc has CUDA {nvcc} and PyTorch {torch.__version__} has CUDA {torch.version.cuda}: "
            f"set CUDA_HOME to a CUDA {major} toolkit, or install PyTorch for CUDA {nvcc_major}"
        )
    elif not cuda_targets():
        reason = "the CUDA kernels need compute capability 8.0 or newer"
    else:
        return None
    if arch_list:
        sys.exit(f"flash_dmattn: TORCH_CUDA_ARCH_LIST is set, but {reason}")
    return reason


@functools.cache
def cuda_targets() -> list[str]:
    """nvcc's -gencode flags, without those for compute capabilities below 8.0.

    Computed here instead of by CUDAExtension, so that the module can report its architectures. Code for sm_90a runs on
    the same GPUs as code for sm_90, and a build for it alone compiles all files with the same flags.
    """
    sm90 = {"-gencode=arch=compute_90,code=sm_90": generate_kernels.SM90A}
    targets = dict.fromkeys(sm90.get(target, target) for target in cpp_extension._get_cuda_arch_flags())
    return [target for target in targets if int(re.search(r"code=\w+_(\d+)", target).group(1)) >= 80]


def compression_flag(nvcc: str) -> str:
    """nvcc's flag that compresses the device code, which makes the module about four times smaller."""
    major, minor = map(int, nvcc.split("."))
    return "--compress-mode=size" if (major, minor) >= (12, 8) else "-Xfatbin=-compress-all"


def quoted(name: str, text: str) -> str:
    """Defines a macro as a string literal."""
    return f'-D{name}="{text}"'


def extension():
    more = os.environ.get("FLASH_DMATTN_CXX_FLAGS", "").split()
    flags = {"cxx": [*CXX_FLAGS, *cpu_flags(), *more, quoted("FLASH_DMATTN_TORCH_VERSION", torch.__version__)]}
    options = {"include_dirs": [str(ROOT / "csrc")], "extra_compile_args": flags, "extra_link_args": ["-fopenmp"]}
    reason = why_without_cuda()
    if reason is not None:
        print(f"flash_dmattn: building without CUDA kernels: {reason}")
        flags["cxx"].append(quoted("FLASH_DMATTN_WHY_NO_CUDA", reason))
        return CppExtension("flash_dmattn._C", [*CPU_SOURCES, WITHOUT_CUDA], **options)

    targets = cuda_targets()
    codes = sorted(
        {target.rpartition("code=")[2] for target in targets}, key=lambda c: (c.startswith("compute"), len(c), c)
    )
    generated = ROOT / "build" / "kernels"
    kernels = [os.path.relpath(path, ROOT) for path in generate_kernels.generate(generated, codes)]
    options["include_dirs"].append(str(generated))
    architectures = ",".join(codes)
    flags["cxx"] += ["-DFLASH_DMATTN_WITH_CUDA", quoted("FLASH_DMATTN_CUDA_ARCHITECTURES", architectures)]
    flags["nvcc"] = [*NVCC_FLAGS, compression_flag(nvcc_version()), *targets]
    print(f"flash_dmattn: building {len(kernels)} files of CUDA kernels for {architectures}")
    # In the order of compilation. Files with PyTorch's headers take as long as the slowest kernels.
    return CUDAExtension("flash_dmattn._C", [*CPU_SOURCES, *CUDA_SOURCES, *kernels], **options)


class Build(BuildExtension):
    """Compiles each kernel for its own architectures, in the order of the sources, and writes the stamp that loading.py
    reads."""

    def build_extension(self, ext):
        self.compiler.compile = compile_by_file(self.compiler.compile, generate_kernels.targets_of, ext.sources)
        super().build_extension(ext)

    def run(self):
        (extension,) = self.extensions
        built_of = source_hash(ROOT, WITH_CUDA in extension.sources)  # before the build, which takes minutes
        super().run()
        stamp = Path(self.get_ext_fullpath(extension.name)).with_name("_C.torch")
        stamp.write_text(f"{torch.__version__}\n{built_of}\n")


if any(command.startswith(("build", "bdist", "develop", "install", "editable")) for command in sys.argv[1:]):
    require_compiler()

setup(ext_modules=[extension()], cmdclass={"build_ext": Build})
