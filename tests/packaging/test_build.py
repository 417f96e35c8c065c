"""The sdist and the wheel: contents, requirements, build without CUDA."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import flash_dmattn
from flash_dmattn import ops
from flash_dmattn.source_hash import source_hash

ROOT = Path(__file__).parents[2]
pytest.importorskip("build.env")  # the folder build/ of a checkout is found as a package, too


def run(*command, **environment):
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    # Build from a copy: the build writes into the tree, where another worker may do the same.
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "*.so", "_C.torch")
    tree = shutil.copytree(ROOT, folder / "tree", ignore=ignored)
    done = run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(folder), str(tree))
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,) = folder.glob(f"flash_dmattn-{flash_dmattn.__version__}.tar.gz")
    return archive


def test_the_sdist_holds_everything_that_is_tracked(sdist):
    with tarfile.open(sdist) as archive:
        shipped = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    folders = ("csrc", "flash_dmattn", "scripts", "benchmarks", "examples", "docs", "tests")
    listed = run("git", "ls-files", *folders)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    suffixes = {".py", ".pyi", ".typed", ".h", ".cpp", ".cu", ".cuh", ".md", ".json", ".svg"}
    wanted = {name for name in listed.stdout.split() if Path(name).suffix in suffixes}
    wanted |= {"CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "README.md", "SECURITY.md"}
    assert wanted | {"Makefile", "pyproject.toml", "setup.py"} <= shipped


def test_pytorch_and_einops_alone_are_needed_at_run_time(sdist):
    with tarfile.open(sdist) as archive:
        (name,) = (name for name in archive.getnames() if name.count("/") == 1 and name.endswith("/PKG-INFO"))
        lines = archive.extractfile(name).read().decode().splitlines()
    needs = [line for line in lines if line.startswith("Requires-Dist: ") and "extra ==" not in line]
    assert needs == ["Requires-Dist: torch>=2.9", "Requires-Dist: einops>=0.8"]


@pytest.mark.long
def test_the_sdist_builds_a_wheel_that_works(sdist, tmp_path):
    """Builds and installs a wheel with the CPU kernels from the sdist, outside the source tree."""
    done = run(
        *(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", str(tmp_path), str(sdist)),
        MAX_JOBS=str(max(2, len(os.sched_getaffinity(0)))),
        CUDA_VISIBLE_DEVICES="",
        TORCH_CUDA_ARCH_LIST="",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob(f"flash_dmattn-{flash_dmattn.__version__}-*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    stamp = (site / "flash_dmattn" / "_C.torch").read_text()
    assert stamp == f"{torch.__version__}\n{source_hash(ROOT, with_cuda=False)}\n"
    assert all((site / "flash_dmattn" / name).exists() for name in ("py.typed", "_C.pyi"))
    program = (
        "import flash_dmattn, torch; x = torch.randn(1, 5, 2, 8, requires_grad=True);"
        "flash_dmattn.flash_dmattn_func(x, x, x).sum().backward();"
        "print(flash_dmattn.__file__, x.grad.isfinite().all())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == [str(site / "flash_dmattn" / "__init__.py"), "tensor(True)"], done.stderr


def test_the_module_has_no_debug_info():
    """Which would be 95 % of a build for the CPU. Sanitized builds need it."""
    if ops.WHY_NOT_BUILT or "-g" in os.environ.get("FLASH_DMATTN_CXX_FLAGS", "").split():
        pytest.skip("no module, or a sanitized one")
    has_debug_info = b".debug_info" in Path(ops.compiled_module().__file__).read_bytes()
    assert not has_debug_info


def test_an_unknown_processor_is_refused():
    done = run(sys.executable, "setup.py", "--version", FLASH_DMATTN_CPU_CAPABILITY="MMX")
    assert done.returncode != 0
    assert "FLASH_DMATTN_CPU_CAPABILITY must be one of DEFAULT, AVX2, AVX512, got MMX" in done.stderr


@pytest.mark.parametrize(
    ("compiler", "named"),
    [("no-such-clang++", "CXX=no-such-clang++"), ("no-such-ccache g++", "CXX=no-such-ccache g++"), (None, "c++")],
)
def test_a_missing_compiler_is_one_sentence(tmp_path, compiler, named):
    """Even where g++ is in PATH: PyTorch would compile with the missing one."""
    gxx = tmp_path / "g++"
    gxx.write_text("#!/bin/sh\n")
    gxx.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "CXX"} | {"PATH": str(tmp_path)}
    if compiler is not None:
        environment["CXX"] = compiler
    command = [sys.executable, "setup.py", "build_ext", "--help"]  # --help: compiles nothing
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1:] == [
        f"flash_dmattn needs a C++ compiler, and {named} was not found: "
        "set CXX to an installed one, or install g++ (on Debian or Ubuntu, apt install g++)"
    ]


@pytest.mark.parametrize("compiler", [None, "g++", "env g++"])
def test_a_compiler_in_path_serves(compiler):
    environment = {} if compiler is None else {"CXX": compiler}
    done = run(sys.executable, "setup.py", "build_ext", "--help", **environment)
    assert done.returncode == 0, done.stderr


def setup_with_nvcc(tmp_path, says, **environment):
    """setup.py beside a PyTorch of CUDA 13.0 that sees a GPU, and an nvcc that says this; None: there is none."""
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    if says is not None:
        nvcc.write_text(f"#!/bin/sh\necho '{says}'\n")
        nvcc.chmod(0o755)
    program = (
        "import os, runpy, sys, torch; from torch.utils import cpp_extension;"
        "cpp_extension.CUDA_HOME = os.environ['CUDA_HOME'];"
        "torch.version.cuda = '13.0'; torch.cuda.is_available = lambda: True;"
        "sys.argv = ['setup.py', '--version']; runpy.run_path('setup.py', run_name='__main__')"
    )
    return run(sys.executable, "-c", program, CUDA_HOME=str(tmp_path), **{"TORCH_CUDA_ARCH_LIST": "", **environment})


NVCC_12 = "Cuda compilation tools, release 12.8, V12.8.93"
MISMATCH = (
    f"nvcc has CUDA 12.8 and PyTorch {torch.__version__} has CUDA 13.0: "
    "set CUDA_HOME to a CUDA 13 toolkit, or install PyTorch for CUDA 12\n"
)


def test_an_nvcc_of_another_major_version_leaves_the_cpu_kernels(tmp_path):
    done = setup_with_nvcc(tmp_path, NVCC_12)
    assert done.returncode == 0, done.stderr
    assert f"flash_dmattn: building without CUDA kernels: {MISMATCH}" in done.stdout


def test_an_nvcc_of_another_major_version_is_an_error_where_cuda_is_asked_for(tmp_path):
    done = setup_with_nvcc(tmp_path, NVCC_12, TORCH_CUDA_ARCH_LIST="9.0")
    assert done.returncode != 0
    assert f"TORCH_CUDA_ARCH_LIST is set, but {MISMATCH}" in done.stderr


@pytest.mark.parametrize("says", [None, "", "not a version"])
def test_an_nvcc_that_does_not_say_what_it_is(tmp_path, says):
    done = setup_with_nvcc(tmp_path, says)
    assert done.returncode == 0, done.stderr
    assert "building without CUDA kernels: nvcc was not found (set CUDA_HOME)" in done.stdout


@pytest.mark.parametrize("targets, code", [("7.5;9.0", 0), ("7.5", 1)])
def test_targets_below_8_0_are_not_built(tmp_path, targets, code):
    nvcc = "Cuda compilation tools, release 13.0, V13.0.48"
    done = setup_with_nvcc(tmp_path, nvcc, TORCH_CUDA_ARCH_LIST=targets)
    assert (done.returncode != 0) == code, done.stderr
    if code == 0:
        assert "files of CUDA kernels for sm_90a\n" in done.stdout
    else:
        assert "TORCH_CUDA_ARCH_LIST is set, but the CUDA kernels need compute capability 8.0 or newer" in done.stderr


def test_an_nvcc_of_another_minor_version_serves(tmp_path):
    done = setup_with_nvcc(tmp_path, "Cuda compilation tools, release 13.2, V13.2.1", TORCH_CUDA_ARCH_LIST="9.0")
    assert done.returncode == 0, done.stderr
    assert "files of CUDA kernels for sm_90" in done.stdout
