"""The list of generated CUDA kernels, and the compiler's report of registers, local memory and serialized wgmma."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import generate_kernels
import pytest
from disassembly import Instruction, disassembled, find_cuobjdump, inner_loops

ROOT = Path(__file__).parents[2]


@pytest.fixture
def generator(monkeypatch):
    monkeypatch.delenv("FLASH_DMATTN_HEAD_DIMS", raising=False)
    monkeypatch.delenv("FLASH_DMATTN_DTYPES", raising=False)
    return generate_kernels


def names(generator, folder):
    return [path.name for path in generator.generate(folder)]


# The list


def test_a_full_build(generator, tmp_path):
    expected = [
        f"{group.direction}_hdim{head_dim}_{dtype}_{group.architecture}.cu"
        for group in generator.GROUPS
        for head_dim in group.head_dims
        for dtype in generator.DTYPES
    ]
    assert names(generator, tmp_path) == expected
    assert {"fwd_hdim32_fp16_sm80.cu", "fwd_hdim128_bf16_sm80.cu", "bwd_hdim256_bf16_sm80.cu"} <= set(expected)
    assert {"fwd_hdim256_bf16_sm90.cu", "bwd_hdim128_fp16_sm90.cu"} <= set(expected)
    for architecture in generator.ARCHITECTURES:
        assert 0 < sum(name.endswith(f"_{architecture}.cu") for name in expected) < 60
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*expected, "kernels.h"])


def test_a_narrowed_build(generator, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASH_DMATTN_HEAD_DIMS", "256, 64")
    monkeypatch.setenv("FLASH_DMATTN_DTYPES", "bf16")
    assert names(generator, tmp_path) == [
        *("fwd_hdim64_bf16_sm90.cu", "fwd_hdim256_bf16_sm90.cu"),
        *("gather_hdim64_bf16_sm80.cu", "gather_hdim256_bf16_sm80.cu"),
        *("bwd_hdim64_bf16_sm80.cu", "bwd_hdim256_bf16_sm80.cu"),
        *("fwd_hdim64_bf16_sm80.cu", "fwd_hdim256_bf16_sm80.cu"),
        *("bwd_hdim64_bf16_sm90.cu", "bwd_hdim256_bf16_sm90.cu"),
        *("sparse_bwd_hdim64_bf16_sm90.cu", "sparse_bwd_hdim256_bf16_sm90.cu"),
        *("decode_hdim64_bf16_sm90.cu", "decode_hdim256_bf16_sm90.cu"),
        "short_bwd_hdim64_bf16_sm80.cu",
    ]
    header = (tmp_path / "kernels.h").read_text()
    assert '#define FLASH_DMATTN_HEAD_DIMS "64,256"\n' in header and '#define FLASH_DMATTN_DTYPES "bf16"\n' in header
    both = "X(bfloat16_t, 64) X(bfloat16_t, 256)"
    built = {"SM80_FWD": both, "SM80_BWD": both, "SM90_FWD": both, "SM90_BWD": both, "SM80_GATHER": both}
    built["SM90_SPARSE_BWD"] = built["SM90_DECODE"] = both
    built["SM80_SHORT_BWD"] = "X(bfloat16_t, 64)"
    assert dict(re.findall(r"#define FLASH_DMATTN_(\w+)_KERNELS\(X\) (.*)", header)) == built


@pytest.mark.parametrize(
    ("codes", "is_for_hopper"),
    [(["sm_80"], False), (["sm_80", "sm_120", "compute_90"], False), (["sm_80", "sm_90"], True), (["sm_90a"], True)],
)
def test_sm90_kernels_are_generated_for_sm90_builds_only(generator, tmp_path, codes, is_for_hopper):
    files = [path.name for path in generator.generate(tmp_path, codes)]
    assert any(name.endswith("_sm90.cu") for name in files) == is_for_hopper
    short = 2  # head dimensions of short_bwd
    assert sum(name.endswith("_sm80.cu") for name in files) == (3 * len(generator.HEAD_DIMS) + short) * len(
        generator.DTYPES
    )
    header = (tmp_path / "kernels.h").read_text()
    for direction, smallest in {"FWD": 32, "BWD": 32, "SPARSE_BWD": 64, "DECODE": 32}.items():
        entries = re.search(rf"#define FLASH_DMATTN_SM90_{direction}_KERNELS\(X\)(.*)", header).group(1)
        built = f" X(half_t, {smallest}) X(bfloat16_t, {smallest})"
        assert entries.startswith(built) if is_for_hopper else entries == ""


def test_the_command_line(tmp_path):
    def run(*arguments):
        command = [sys.executable, ROOT / "scripts" / "generate_kernels.py", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    assert run("--help").stdout.startswith("usage: generate_kernels.py [-h] [--codes CODES] folder")
    assert run().returncode == 2
    assert list(tmp_path.iterdir()) == []
    assert run("kernels").stdout.split()[0] == "kernels/fwd_hdim32_fp16_sm90.cu"
    assert (tmp_path / "kernels" / "kernels.h").exists()
    assert "_sm90.cu" not in run("of_ampere", "--codes", "sm_80,sm_86").stdout


def test_flags_by_file(generator):
    from flags_by_file import compile_by_file

    hopper = ["-gencode=arch=compute_90a,code=sm_90a"]
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

    calls.clear()
    usual["nvcc"] = ["-O3", *hopper]
    order = [sources[3], sources[1]]
    compile_by_file(compile_files, generator.targets_of, order)(sources, extra_postargs=usual)
    assert calls == [([*order, sources[0], sources[2], sources[4]], usual)]


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
def test_unknown_head_dims_and_dtypes_are_refused(generator, tmp_path, monkeypatch, variable, value, message):
    monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit) as refusal:
        generator.generate(tmp_path)
    assert str(refusal.value) == message


def test_unchanged_files_are_not_rewritten(generator, tmp_path):
    files = [*generator.generate(tmp_path), tmp_path / "kernels.h"]
    for path in files:
        os.utime(path, (0, 0))
    generator.generate(tmp_path)
    assert all(path.stat().st_mtime == 0 for path in files)


# The compiler's report


def test_kernels_do_not_include_torch():
    for path in (ROOT / "csrc" / "cuda").rglob("*.*"):
        assert not re.search(r"#include\s*<(torch|ATen|c10)/", path.read_text()), path


def test_every_kernel_waits_for_the_previous_one():
    """launch() starts the CTAs of a kernel before the previous kernel of the stream has finished."""
    launched_alone = {"decode_kernel", "probe_kernel"}
    for path in (ROOT / "csrc" / "cuda").rglob("*.cu*"):
        text = path.read_text()
        assert "<<<" not in text, path
        kernels = re.findall(r"__global__.*?(\w+_kernel)\([^{]*\{(.*?);", text, re.DOTALL)
        assert len(kernels) == text.count("__global__"), path
        for name, first_statement in kernels:
            assert name in launched_alone or first_statement.strip() == "grid_dependency_sync()", (path, name)


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


# Local memory of a kernel in bytes per thread, register spills included. Kernels that use all registers keep a few
# values there; a spilled array would be hundreds of bytes.
MAX_LOCAL_MEMORY = {"fwd": 0, "bwd": 112, "gather": 64}


def local_memory(says):
    """[(kernel, target, bytes per thread)] from the report of ptxas."""
    entry = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'.*?(\d+) bytes stack frame", re.DOTALL)
    return [(kernel, target, int(size)) for kernel, target, size in entry.findall(says)]


@needs_nvcc
@pytest.mark.long
@pytest.mark.parametrize("direction", MAX_LOCAL_MEMORY)
def test_a_kernel_compiles_without_spills(generator, tmp_path, monkeypatch, direction):
    """Compiles for two architectures, with no headers but CUDA's."""
    monkeypatch.setenv("FLASH_DMATTN_HEAD_DIMS", "64")
    monkeypatch.setenv("FLASH_DMATTN_DTYPES", "bf16")
    generator.generate(tmp_path)
    targets = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in ("80", "90a")]
    source = tmp_path / f"{direction}_hdim64_bf16_sm80.cu"
    says = compiled(source, tmp_path / "kernel.o", "-O3", *targets, "--threads=2", "-Xptxas=-v", "-c")
    report = local_memory(says)
    assert {target for _, target, _ in report} == {"sm_80", "sm_90a"}
    assert not [kernel for kernel in report if kernel[2] > MAX_LOCAL_MEMORY[direction]]


# One head dimension for each kind of sm90 block.
HOPPER_KERNELS = [
    ("fwd", 64),
    ("fwd", 96),
    ("fwd", 128),
    ("fwd", 256),
    ("bwd", 64),
    ("bwd", 128),
    ("bwd", 256),
    ("pair_bias", 32),
    ("sparse_bwd", 64),
    ("sparse_bwd", 128),
    ("sparse_bwd", 192),
    ("sparse_bwd", 256),
]
# ptxas ignores setmaxnreg, or serializes wgmma.
SERIALIZED = re.compile(r"\(C75(?:08|1[0-5])\).*")
# Bytes per thread. The producer deallocates its registers and spills what it needs once per block.
MAX_LOCAL_MEMORY_ON_HOPPER = 320
# Local loads and stores in the GEMM loop: where accumulators use all registers, addresses are reloaded. A spilled
# accumulator would add dozens.
MAX_LOCAL_MEMORY_OF_DECODING = 32
MAX_LOCAL_ACCESSES = {"fwd": 20, "bwd": 40, "pair_bias": 16, "sparse_bwd": 40}


@needs_nvcc
@pytest.mark.long
@pytest.mark.parametrize(("direction", "head_dim"), HOPPER_KERNELS)
def test_an_sm90_kernel_compiles_without_spills_in_its_gemm_loop(generator, tmp_path, monkeypatch, direction, head_dim):
    monkeypatch.setenv("FLASH_DMATTN_HEAD_DIMS", str(head_dim))
    monkeypatch.setenv("FLASH_DMATTN_DTYPES", "bf16")
    generator.generate(tmp_path)
    source, cubin = tmp_path / f"{direction}_hdim{head_dim}_bf16_sm90.cu", tmp_path / "kernel.cubin"
    says = compiled(source, cubin, "-O3", *generator.targets_of(source), "-Xptxas=-v", "-cubin")
    assert SERIALIZED.findall(says) == []
    report = local_memory(says)
    assert {target for _, target, _ in report} == {"sm_90a"}
    assert not [kernel for kernel in report if kernel[2] > MAX_LOCAL_MEMORY_ON_HOPPER]

    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        return  # ptxas does not report where the spills are
    loops_of = {name: inner_loops(code, "HGMMA") for name, code in disassembled(cuobjdump, cubin).items()}
    loops_of = {name: loops for name, loops in loops_of.items() if loops}
    # Dense kernels: no bias, key bias, dense bias; the forward has the first two over key lists as well. The backward
    # over lists: the first two for groups, and up to head dimension 128 per head. Pair bias: forward, dQ, dK and dV.
    assert len(loops_of) >= {"fwd": 5, "sparse_bwd": 4 if head_dim <= 128 else 2}.get(direction, 3)
    for name, loops in loops_of.items():
        for loop in loops:
            accesses = [x for x in loop if x.name in ("LDL", "STL")]
            assert len(accesses) <= MAX_LOCAL_ACCESSES[direction], (name, accesses)


@needs_nvcc
@pytest.mark.long
@pytest.mark.parametrize("head_dim", [128, 256])
def test_the_decoding_kernel_compiles_without_spilled_accumulators(generator, tmp_path, monkeypatch, head_dim):
    monkeypatch.setenv("FLASH_DMATTN_HEAD_DIMS", str(head_dim))
    monkeypatch.setenv("FLASH_DMATTN_DTYPES", "bf16")
    generator.generate(tmp_path)
    source = tmp_path / f"decode_hdim{head_dim}_bf16_sm90.cu"
    says = compiled(source, tmp_path / "kernel.cubin", "-O3", *generator.targets_of(source), "-Xptxas=-v", "-cubin")
    report = local_memory(says)
    assert len(report) == (4 if head_dim <= 128 else 2)  # with 8 and with 16 warps, each general and plain
    assert not [kernel for kernel in report if kernel[2] > MAX_LOCAL_MEMORY_OF_DECODING]


def test_inner_loops_finds_the_gemm_loops():
    """An outer GEMM loop around a waiting loop, a GEMM loop that branches out and back, and a loop without a GEMM."""
    code = """
        00 MOV
        10 HGMMA
        20 SYNCS
        30 @!P0 BRA 0x20
        40 LDL
        50 HGMMA
        60 @P1 BRA 0xb0
        70 @P0 BRA 0x40
        80 MOV
        90 @P2 BRA 0x10
        a0 EXIT
        b0 STL
        c0 BRA 0x70
    """
    instructions = []
    for address, text in re.findall(r"^ +(\w+) (.*)$", code, flags=re.MULTILINE):
        predicated = text.startswith("@")
        instructions.append(Instruction(int(address, 16), predicated, text.split(" ", 1)[1] if predicated else text))
    (loop,) = inner_loops(instructions, "HGMMA")
    assert [hex(x.address) for x in loop] == ["0x40", "0x50", "0x60", "0x70", "0xb0", "0xc0"]
    assert inner_loops(instructions, "EXIT") == []


SHARED_MEMORY = """
#include <algorithm>
#include <cstdio>

#include "cuda/sm80/gather/bwd_launch.cuh"
#include "cuda/sm80/gather/fwd_launch.cuh"

using namespace flash_dmattn;
using namespace flash_dmattn::cuda;
using namespace flash_dmattn::cuda::sm80;

template <typename... Kernels>
size_t smallest() {  // the launch takes it where no other fits
    return std::min({sizeof(typename Kernels::SharedStorage)...});
}

template <int kHeadDim, FwdTileKind kKind>
using Forward = FwdKernel<half_t, BiasKind::kDense, FwdKernelTraits<kHeadDim, kKind>>;
template <int kHeadDim, FwdTileKind kKind>
using GatherForward = GatherFwdKernel<half_t, BiasKind::kDense, FwdKernelTraits<kHeadDim, kKind, true>>;

template <template <int, FwdTileKind> typename Kernel, int kHeadDim>
size_t smallest_of_kinds() {
    return smallest<Kernel<kHeadDim, FwdTileKind::kPrefill>, Kernel<kHeadDim, FwdTileKind::kSmall>,
                    Kernel<kHeadDim, FwdTileKind::kDecode>>();
}

template <int kHeadDim>
size_t forward() {
    return std::max(smallest_of_kinds<Forward, kHeadDim>(), smallest_of_kinds<GatherForward, kHeadDim>());
}

template <typename... Memories>
size_t largest() {
    return std::max({sizeof(Memories)...});
}

template <int kHeadDim, bool kIsSmall>
size_t backward() {
    using Tile = BwdKernelTraits<kHeadDim, half_t, kIsSmall>;
    using DbiasTile = BwdKernelTraits<kHeadDim, half_t, kIsSmall, BwdPass::kDbias>;
    using GatherTile = BwdKernelTraits<kHeadDim, half_t, kIsSmall, BwdPass::kGather>;
    return largest<BwdSharedStorage<Tile, BiasKind::kKey>, BwdSharedStorage<Tile, BiasKind::kDense>,
                   BwdDbiasSharedStorage<DbiasTile>,
                   typename GatherBwdKernel<GatherTile, BiasKind::kKey>::SharedStorage,
                   typename GatherBwdKernel<GatherTile, BiasKind::kDense>::SharedStorage>();
}

template <int kHeadDim>
void print() {
    std::printf("%d %zu %zu %zu\\n", kHeadDim, forward<kHeadDim>(), backward<kHeadDim, true>(),
                backward<kHeadDim, false>());
}

#define PRINT(T, kHeadDim) print<kHeadDim>();
#include "kernels.h"

int main() {
    FLASH_DMATTN_SM80_FWD_KERNELS(PRINT)
    require_shared_memory("the backward", 256, 200, 200);
    try {
        require_shared_memory("the backward", 256, 140 * 1024 - 5, 99 * 1024);
    } catch (const std::runtime_error& error) {
        std::printf("%s", error.what());
    }
}
"""
# Shared memory per CTA in bytes, by compute capability.
AVAILABLE = {"8.0": 163 * 1024, "8.6": 99 * 1024, "9.0": 227 * 1024}


@needs_nvcc
@pytest.mark.long
def test_sm80_blocks_fit_shared_memory(generator, tmp_path, monkeypatch):
    """The limits are those of the compute capabilities in README.md."""
    monkeypatch.setenv("FLASH_DMATTN_DTYPES", "fp16")
    generator.generate(tmp_path)
    source = tmp_path / "sizes.cu"
    source.write_text(SHARED_MEMORY)
    compiled(source, tmp_path / "sizes", "-I", tmp_path)
    *lines, refusal = subprocess.run([tmp_path / "sizes"], capture_output=True, text=True).stdout.splitlines()
    sizes = {int(head_dim): map(int, rest) for head_dim, *rest in map(str.split, lines)}
    assert tuple(sizes) == generator.HEAD_DIMS
    for head_dim, (forward, small_backward, backward) in sizes.items():
        assert forward <= AVAILABLE["8.6"]
        assert small_backward <= AVAILABLE["8.6" if head_dim <= 128 else "8.0"]
        assert backward <= AVAILABLE["9.0"]
    assert refusal == (
        "the backward of head dimension 256 needs 140 KiB of shared memory a block, this GPU has 99: "
        "see 'What runs where' in README.md"
    )


HOPPER_SHARED_MEMORY = """
#include <algorithm>
#include <cstdio>

#include "cuda/sm90/bwd/shared_storage.cuh"
#include "cuda/sm90/fwd/shared_storage.cuh"
#include "cuda/sm90/dbias/shared_storage.cuh"
#include "cuda/sm90/decode/shared_storage.cuh"
#include "cuda/sm90/sparse_bwd/grouped_shared_storage.cuh"
#include "cuda/sm90/sparse_bwd/per_head_shared_storage.cuh"
#include "cuda/sm90/pair_bias/dkdv_kernel.cuh"
#include "cuda/sm90/pair_bias/dq_dbias_kernel.cuh"
#include "cuda/sm90/pair_bias/fwd_kernel.cuh"

using namespace flash_dmattn;
using namespace flash_dmattn::cuda;
using namespace flash_dmattn::cuda::sm90;

template <template <BiasKind> typename Memory>
size_t largest() {
    const size_t none = sizeof(Memory<BiasKind::kNone>), key = sizeof(Memory<BiasKind::kKey>);
    return std::max({none, key, sizeof(Memory<BiasKind::kDense>)});
}
template <template <BiasKind> typename Memory>
size_t largest_of_forward() {
    return std::max({largest<Memory>(), sizeof(Memory<BiasKind::kRelative>), sizeof(Memory<BiasKind::kRelativeGrid>)});
}
template <typename... Memories>
void print(const char* direction, int head_dim, size_t size) {
    std::printf("%s %d %zu\\n", direction, head_dim, std::max({size, sizeof(Memories)...}));
}

template <int kHeadDim>
struct Forward {
    template <BiasKind kBias>
    using Memory = FwdSharedStorage<half_t, kBias, FwdKernelTraits<kHeadDim, kBias>>;
    template <BiasKind kBias>
    using Tall = FwdSharedStorage<half_t, kBias, FwdKernelTraits<kHeadDim, kBias, has_tall_fwd_tile(kHeadDim, kBias)>>;
};

template <int kHeadDim>
using Gathered = FwdSharedStorage<half_t, BiasKind::kKey, FwdGatherKernelTraits<kHeadDim>>;

template <int kHeadDim, int kRows = bwd_tile_sizes(kHeadDim).rows>
struct Backward {
    template <BiasKind kBias>
    using Memory = BwdSharedStorage<BwdKernelTraits<half_t, kHeadDim, kRows, kRows != kTallBwdRows>, kBias>;
};
template <int kHeadDim>
constexpr int kMostRows = has_tall_bwd_tile(kHeadDim) ? kTallBwdRows : bwd_tile_sizes(kHeadDim).rows;
template <int kHeadDim>
using Tall = typename Backward<kHeadDim, kMostRows<kHeadDim>>::template Memory<BiasKind::kKey>;

#define FORWARD(T, kHeadDim) \\
    print<Gathered<kHeadDim>>("fwd", kHeadDim, std::max(largest_of_forward<Forward<kHeadDim>::template Memory>(), \\
                                                        largest_of_forward<Forward<kHeadDim>::template Tall>()));
#define BACKWARD(T, kHeadDim)                                                  \\
    print<DbiasSharedStorage<DbiasKernelTraits<T, kHeadDim>>, Tall<kHeadDim>>( \\
        "bwd", kHeadDim, largest<Backward<kHeadDim>::template Memory>());
template <typename T, int kHeadDim>
using Grouped = GroupedSparseBwdSharedStorage<GroupedSparseBwdKernelTraits<T, kHeadDim, kHeadDim <= 64 ? 128 : 64>>;
template <typename T, int kHeadDim>
using PerHead = PerHeadSparseBwdSharedStorage<PerHeadSparseBwdKernelTraits<T, kHeadDim>>;
#define SPARSE_BACKWARD(T, kHeadDim)                             \\
    print<Grouped<T, kHeadDim>>("sparse_bwd", kHeadDim, \\
                                can_run_per_head(kHeadDim) ? sizeof(PerHead<T, kHeadDim>) : 0);

template <typename... Tiles>
size_t largest_pair_bias_fwd() {
    return std::max({PairBiasFwdSharedStorage<Tiles>::bytes(Tiles::kSizes.max_keys / 64)...});
}
template <typename... Tiles>
size_t largest_pair_bias_dkdv() {
    return std::max({PairBiasDkdvSharedStorage<Tiles>::bytes(Tiles::kMaxSeqlenQ / kPairBiasRows)...});
}
template <typename T, typename Bias>
using Dquery = PairBiasDqDbiasSharedStorage<PairBiasDqDbiasKernelTraits<T, Bias, 3>>;
#define PAIR_BIAS(T, kHeadDim)                                                                                  \\
    print<Dquery<T, T>, Dquery<T, float>>(                                                                      \\
        "pair_bias", kHeadDim,                                                                                  \\
        std::max(largest_pair_bias_fwd<PairBiasFwdKernelTraits<T, T, 0>, PairBiasFwdKernelTraits<T, T, 1>,      \\
                                       PairBiasFwdKernelTraits<T, float, 2>>(),                                 \\
                 largest_pair_bias_dkdv<PairBiasDkdvKernelTraits<T, T, 3, kPairBiasBwdMaxSeqlen, 3, 2>,         \\
                                        PairBiasDkdvKernelTraits<T, float, 2, 256, 3, 2>,                       \\
                                        PairBiasDkdvKernelTraits<T, float, 2, kPairBiasBwdMaxSeqlen, 2, 1>>()));

template <typename T, int kHeadDim>
int decode_bytes() {  // without selection, whose memory depends on the call
    DecodeArgs args;
    args.query_tiles = kDecodeMaxRows / kDecodeTileRows;
    args.warps = kHeadDim <= kDecodeManyWarpsHeadDim ? kDecodeMaxWarps : 8;
    return DecodeSmemLayout(args, kHeadDim).total;
}
#define DECODE(T, kHeadDim) print<>("decode", kHeadDim, decode_bytes<T, kHeadDim>());

#include "kernels.h"

int main() {
    FLASH_DMATTN_SM90_FWD_KERNELS(FORWARD)
    FLASH_DMATTN_SM90_BWD_KERNELS(BACKWARD)
    FLASH_DMATTN_SM90_PAIR_BIAS_KERNELS(PAIR_BIAS)
    FLASH_DMATTN_SM90_SPARSE_BWD_KERNELS(SPARSE_BACKWARD)
    FLASH_DMATTN_SM90_DECODE_KERNELS(DECODE)
}
"""


@needs_nvcc
@pytest.mark.long
def test_sm90_blocks_fit_shared_memory(generator, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASH_DMATTN_DTYPES", "fp16")
    generator.generate(tmp_path)
    source = tmp_path / "sizes.cu"
    source.write_text(HOPPER_SHARED_MEMORY)
    compiled(source, tmp_path / "sizes", "-I", tmp_path)
    lines = subprocess.run([tmp_path / "sizes"], capture_output=True, text=True).stdout.splitlines()
    sizes = {(direction, int(head_dim)): int(size) for direction, head_dim, size in map(str.split, lines)}
    head_dims = {g.direction: g.head_dims for g in generator.GROUPS if g.architecture == "sm90"}
    assert set(sizes) == {(direction, head_dim) for direction in head_dims for head_dim in head_dims[direction]}
    assert max(sizes.values()) <= AVAILABLE["9.0"], sizes
