"""The list of CUDA kernels, and what the compiler says of them."""

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def generator(monkeypatch):
    monkeypatch.delenv("FLASH_DMATTN_HEAD_DIMS", raising=False)
    monkeypatch.delenv("FLASH_DMATTN_DTYPES", raising=False)
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import generate_kernels

    return generate_kernels


def names(generator, folder):
    return [path.name for path in generator.generate(folder)]


# The list


def test_a_full_build(generator, tmp_path):
    everything = itertools.product(generator.GROUPS, generator.HEAD_DIMS, generator.DTYPES)
    expected = [
        f"{group.direction}_hdim{head_dim}_{dtype}{'_causal' * group.causal}_{group.architecture}.cu"
        for group, head_dim, dtype in everything
    ]
    assert names(generator, tmp_path) == expected
    assert {"fwd_hdim32_fp16_sm80.cu", "fwd_hdim128_bf16_causal_sm80.cu", "bwd_hdim256_bf16_sm80.cu"} <= set(expected)
    for architecture in generator.ARCHITECTURES:
        assert 0 < sum(name.endswith(f"_{architecture}.cu") for name in expected) < 50
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*expected, "kernels.h"])


def test_a_narrowed_build(generator, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASH_DMATTN_HEAD_DIMS", "128, 64")
    monkeypatch.setenv("FLASH_DMATTN_DTYPES", "bf16")
    assert names(generator, tmp_path) == [
        *("fwd_hdim64_bf16_sm80.cu", "fwd_hdim128_bf16_sm80.cu"),
        *("fwd_hdim64_bf16_causal_sm80.cu", "fwd_hdim128_bf16_causal_sm80.cu"),
        *("bwd_hdim64_bf16_sm80.cu", "bwd_hdim128_bf16_sm80.cu"),
        *("gather_hdim64_bf16_sm80.cu", "gather_hdim128_bf16_sm80.cu"),
    ]
    header = (tmp_path / "kernels.h").read_text()
    assert '#define FLASH_DMATTN_HEAD_DIMS "64,128"\n' in header and '#define FLASH_DMATTN_DTYPES "bf16"\n' in header
    assert "#define FLASH_DMATTN_SM80_KERNELS(X) X(bfloat16_t, 64) X(bfloat16_t, 128)\n" in header


def test_the_command_line(tmp_path):
    def run(*arguments):
        command = [sys.executable, ROOT / "scripts" / "generate_kernels.py", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    assert run("--help").stdout.startswith("usage: generate_kernels.py [-h] folder")
    assert run().returncode == 2
    assert list(tmp_path.iterdir()) == []
    assert run("kernels").stdout.split()[0] == "kernels/fwd_hdim32_fp16_sm80.cu"
    assert (tmp_path / "kernels" / "kernels.h").exists()


def test_flags_by_file(generator, monkeypatch):
    from flags_by_file import compile_by_file

    hopper = ["-gencode=arch=compute_90a,code=sm_90a"]
    monkeypatch.setitem(generator.ARCHITECTURES, "sm90", hopper)
    calls = []

    def compile_files(sources, output_dir=None, extra_postargs=None):
        calls.append((sources, extra_postargs))
        return [f"{output_dir}/{Path(source).stem}.o" for source in sources]

    usual = {
        "cxx": ["-O3"],
        "nvcc": ["-O3", "-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=sm_90"],
    }
    sources = ["a.cpp", "fwd_hdim64_bf16_sm80.cu", "fwd_hdim64_bf16_sm90.cu", "dispatch.cu", "bwd_hdim64_bf16_sm90.cu"]
    objects = compile_by_file(compile_files, generator.targets_of)(sources, output_dir="out", extra_postargs=usual)
    assert sorted(objects) == sorted(f"out/{Path(source).stem}.o" for source in sources)
    assert calls == [
        (["a.cpp", "fwd_hdim64_bf16_sm80.cu", "dispatch.cu"], usual),
        (["fwd_hdim64_bf16_sm90.cu", "bwd_hdim64_bf16_sm90.cu"], {"cxx": ["-O3"], "nvcc": ["-O3", *hopper]}),
    ]


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (
            "FLASH_DMATTN_HEAD_DIMS",
            "64,80",
            "FLASH_DMATTN_HEAD_DIMS names 80; it accepts 32, 64, 96, 128, 192, 256",
        ),
        ("FLASH_DMATTN_DTYPES", "fp32", "FLASH_DMATTN_DTYPES names fp32; it accepts fp16, bf16"),
    ],
)
def test_what_cannot_be_built_is_refused(generator, tmp_path, monkeypatch, variable, value, message):
    monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit) as refusal:
        generator.generate(tmp_path)
    assert str(refusal.value) == message


def test_what_is_unchanged_is_not_compiled_again(generator, tmp_path):
    files = [*generator.generate(tmp_path), tmp_path / "kernels.h"]
    for path in files:
        os.utime(path, (0, 0))
    generator.generate(tmp_path)
    assert all(path.stat().st_mtime == 0 for path in files)


# The compiler's report


def test_kernels_know_no_torch():
    for path in (ROOT / "csrc" / "cuda").rglob("*.*"):
        assert not re.search(r"#include\s*<(torch|ATen|c10)/", path.read_text()), path


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    installed = sorted(Path("/usr/local").glob("cuda*/bin/nvcc"), reverse=True)
    candidates = [f"{home}/bin/nvcc" if home else None, "nvcc", *map(str, installed)]
    return next(filter(None, (shutil.which(candidate) for candidate in candidates if candidate)), None)


NVCC = find_nvcc()
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="nvcc was not found in CUDA_HOME, PATH or /usr/local")


def compiled(source, to, *options):
    done = subprocess.run(
        [NVCC, "-std=c++17", "-I", ROOT / "csrc", *options, source, "-o", to], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


# Local memory of a kernel, in bytes a thread, spilled registers included. Kernels that use all registers keep a few
# values there; an array that went there would be hundreds of bytes.
MOST_LOCAL_MEMORY = {"fwd": 0, "bwd": 96, "gather": 64}


@needs_nvcc
@pytest.mark.parametrize("direction", MOST_LOCAL_MEMORY)
def test_a_kernel_compiles_without_spills(generator, tmp_path, monkeypatch, direction):
    """For two architectures, with no other headers than CUDA's."""
    monkeypatch.setenv("FLASH_DMATTN_HEAD_DIMS", "64")
    monkeypatch.setenv("FLASH_DMATTN_DTYPES", "bf16")
    generator.generate(tmp_path)
    targets = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in (80, 90)]
    source = tmp_path / f"{direction}_hdim64_bf16_sm80.cu"
    says = compiled(source, tmp_path / "kernel.o", "-O3", *targets, "--threads=2", "-Xptxas=-v", "-c")
    entry = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'.*?(\d+) bytes stack frame", re.DOTALL)
    report = entry.findall(says)
    assert {target for _, target, _ in report} == {"sm_80", "sm_90"}
    assert not [kernel for kernel in report if int(kernel[2]) > MOST_LOCAL_MEMORY[direction]]


SHARED_MEMORY = """
#include <algorithm>
#include <cstdio>

#include "cuda/sm80/gather_bwd_launch.cuh"
#include "cuda/sm80/gather_fwd_launch.cuh"

using namespace flash_dmattn;
using namespace flash_dmattn::cuda;
using namespace flash_dmattn::cuda::sm80;

template <typename... Kernels>
size_t smallest() {  // the launch takes it where no other fits
    return std::min({sizeof(typename Kernels::SharedMemory)...});
}

template <int kHeadDim>
size_t forward() {
    return std::max(smallest<FwdKernel<half_t, BiasKind::kDense, true, FwdTile<kHeadDim, FwdTileKind::kUsual>>,
                             FwdKernel<half_t, BiasKind::kDense, false, FwdTile<kHeadDim, FwdTileKind::kFew>>,
                             FwdKernel<half_t, BiasKind::kDense, false, FwdTile<kHeadDim, FwdTileKind::kDecode>>>(),
                    smallest<GatherFwdKernel<half_t, BiasKind::kDense, FwdTile<kHeadDim, FwdTileKind::kUsual, true>>,
                             GatherFwdKernel<half_t, BiasKind::kDense, FwdTile<kHeadDim, FwdTileKind::kFew>>,
                             GatherFwdKernel<half_t, BiasKind::kDense, FwdTile<kHeadDim, FwdTileKind::kDecode>>>());
}

template <typename... Memories>
size_t largest() {
    return std::max({sizeof(Memories)...});
}

template <int kHeadDim, bool kIsSmall>
size_t backward() {
    using Tile = BwdTile<kHeadDim, half_t, kIsSmall>;
    using DbiasTile = BwdTile<kHeadDim, half_t, kIsSmall, BwdPass::kDbias>;
    using GatherTile = BwdTile<kHeadDim, half_t, kIsSmall, BwdPass::kGather>;
    return largest<BwdSmem<Tile, BiasKind::kKey>, BwdSmem<Tile, BiasKind::kDense>, BwdDbiasSmem<DbiasTile>,
                   typename GatherBwd<GatherTile, BiasKind::kKey>::SharedMemory,
                   typename GatherBwd<GatherTile, BiasKind::kDense>::SharedMemory>();
}

template <int kHeadDim>
void print() {
    std::printf("%d %zu %zu %zu\\n", kHeadDim, forward<kHeadDim>(), backward<kHeadDim, true>(),
                backward<kHeadDim, false>());
}

int main() {
    print<32>(), print<64>(), print<96>(), print<128>(), print<192>(), print<256>();
    require_shared_memory("the backward", 256, 200, 200);
    try {
        require_shared_memory("the backward", 256, 140 * 1024 - 5, 99 * 1024);
    } catch (const std::runtime_error& error) {
        std::printf("%s", error.what());
    }
}
"""
# Bytes that a block may have, by compute capability.
AVAILABLE = {"8.0": 163 * 1024, "8.6": 99 * 1024, "9.0": 227 * 1024}


@needs_nvcc
def test_the_tiles_fit_shared_memory(tmp_path):
    """As README.md's table of compute capabilities says."""
    source = tmp_path / "sizes.cu"
    source.write_text(SHARED_MEMORY)
    compiled(source, tmp_path / "sizes")
    *lines, refusal = subprocess.run([tmp_path / "sizes"], capture_output=True, text=True).stdout.splitlines()
    sizes = {int(head_dim): map(int, rest) for head_dim, *rest in map(str.split, lines)}
    assert list(sizes) == [32, 64, 96, 128, 192, 256]
    for head_dim, (forward, small_backward, backward) in sizes.items():
        assert forward <= AVAILABLE["8.6"]
        assert small_backward <= AVAILABLE["8.6" if head_dim <= 128 else "8.0"]
        assert backward <= AVAILABLE["9.0"]
    assert refusal == (
        "the backward of head dimension 256 needs 140 KiB of shared memory a block, this GPU has 99: "
        "see 'What runs where' in README.md"
    )
