// GEMMs of one warp: mma.sync m16n8k16 on fragments that ldmatrix reads from swizzled shared memory.
#pragma once

#include "cuda/arch/memory.cuh"
#include "cuda/arch/mma.cuh"
#include "cuda/arch/fragment.cuh"
#include "cuda/arch/smem_tile.cuh"

namespace flash_dmattn::cuda::sm80 {

// Keeps the start of shared memory in one register: recomputing it costs more than an addition.
class SmemAddress {
public:
    __device__ __forceinline__ explicit SmemAddress(const void* start)
        : start_(static_cast<const char*>(start)), address_(opaque(smem_address(start))) {}
    __device__ __forceinline__ const char* start() const { return start_; }
    template <typename X>
    __device__ __forceinline__ uint32_t operator()(const X& x) const {
        return address_ + static_cast<uint32_t>(reinterpret_cast<const char*>(&x) - start_);
    }

private:
    const char* start_;
    uint32_t address_;
};

// Order in which ldmatrix.x4 reads the four 8x8 matrices of a 16x16 block.
enum class MatrixOrder { kColMajor, kRowMajor };

// Loads and stores 16x16 blocks of a swizzled tile, at offsets from a corner. In unrolled loops the offsets are
// constants: a block costs one exclusive or, the rest of its address is an immediate.
template <typename Tile, MatrixOrder kOrder>
class SmemFragments {
public:
    static constexpr int kRowBytes = Tile::kSlabCols * 2;

    // `lane_offset` is lane_offset(row, col) of the corner.
    __device__ __forceinline__ SmemFragments(uint32_t tile, uint32_t lane_offset) : lane_address_(tile + lane_offset) {}

    // Recomputes the offset on every call: the opaque lane hides from the compiler that it is loop-invariant. Kept
    // across a loop, the offsets of all blocks would spill.
    __device__ __forceinline__ SmemFragments(uint32_t tile, int row, int col)
        : lane_address_(tile + lane_offset(row, col, opaque(lane_id()))) {}

    // Moves the corner.
    __device__ __forceinline__ SmemFragments from(int row, int col) const {
        return SmemFragments(address(row, col), 0);
    }

    // row is a multiple of 8; col shares no bit with later column offsets, except multiples of a swizzle slab.
    static __device__ __forceinline__ uint32_t lane_offset(int row, int col, int lane = lane_id()) {
        const int row8 = kOrder == MatrixOrder::kColMajor ? lane / 8 % 2 : lane / 16;
        const int col8 = kOrder == MatrixOrder::kColMajor ? lane / 16 : lane / 8 % 2;
        return Tile::offset(row + lane % 8 + row8 * 8, col / Tile::kChunk + col8) * 2;
    }
    __device__ __forceinline__ uint32_t address(int row, int col) const {
        return (lane_address_ ^ (col % Tile::kSlabCols * 2)) + (col / Tile::kSlabCols * Tile::kRows + row) * kRowBytes;
    }
    template <bool kTransposed>
    __device__ __forceinline__ void load(uint32_t (&to)[4], int row, int col) const {
        if constexpr (kTransposed) {
            ldmatrix_x4_trans(to, address(row, col));
        } else {
            ldmatrix_x4(to, address(row, col));
        }
    }

private:
    uint32_t lane_address_;
};

// Operands in shared memory. K-major: A is [m, k], B is [n, k]. MN-major: A is [k, m], B is [k, n].
template <typename Tile, Major kMajor>
struct FragmentsA : SmemFragments<Tile, kMajor == Major::kMN ? MatrixOrder::kRowMajor : MatrixOrder::kColMajor> {
    using Base = SmemFragments<Tile, kMajor == Major::kMN ? MatrixOrder::kRowMajor : MatrixOrder::kColMajor>;
    using Base::Base;
    __device__ __forceinline__ void load_fragment(uint32_t (&to)[4], int m, int k) const {
        kMajor == Major::kMN ? this->template load<true>(to, k, m) : this->template load<false>(to, m, k);
    }
};
template <typename Tile, Major kMajor>
struct FragmentsB : SmemFragments<Tile, kMajor == Major::kMN ? MatrixOrder::kColMajor : MatrixOrder::kRowMajor> {
    using Base = SmemFragments<Tile, kMajor == Major::kMN ? MatrixOrder::kColMajor : MatrixOrder::kRowMajor>;
    using Base::Base;
    __device__ __forceinline__ void load_fragment(uint32_t (&to)[4], int n, int k) const {
        kMajor == Major::kMN ? this->template load<true>(to, k, n) : this->template load<false>(to, n, k);
    }
};

// acc += A B over kDepth. This warp's 16-column blocks lie kColStep apart. Loads run one k-step ahead of mma.sync.
template <typename T, int kDepth, int kColStep = 16, int kMFragments, int kNFragments, typename A, typename B>
__device__ __forceinline__ void warp_gemm(float (&acc)[kMFragments][kNFragments][4], const A& a, const B& b) {
    static_assert(kNFragments % 2 == 0);
    uint32_t a_fragments[2][kMFragments][4], b_fragments[2][kNFragments / 2][4];
    const auto load = [&](int step) {
#pragma unroll
        for (int m = 0; m < kMFragments; ++m) a.load_fragment(a_fragments[step % 2][m], m * 16, step * 16);
#pragma unroll
        for (int n = 0; n < kNFragments / 2; ++n) b.load_fragment(b_fragments[step % 2][n], n * kColStep, step * 16);
    };
    constexpr int kSteps = kDepth / 16;
    load(0);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        if (step + 1 < kSteps) load(step + 1);
#pragma unroll
        for (int m = 0; m < kMFragments; ++m)
#pragma unroll
            for (int n = 0; n < kNFragments; ++n) {
                const uint32_t (&b16)[4] = b_fragments[step % 2][n / 2];
                mma_m16n8k16<T>(acc[m][n], a_fragments[step % 2][m], b16[n % 2 * 2], b16[n % 2 * 2 + 1]);
            }
    }
}

// Rounds an accumulator and stores it to a tile; 16-column blocks lie kColStep apart.
template <typename T, int kColStep = 16, int kMFragments, int kNFragments, typename Tile>
__device__ __forceinline__ void store_accumulator(const float (&acc)[kMFragments][kNFragments][4],
                                                  const SmemFragments<Tile, MatrixOrder::kColMajor>& to,
                                                  float scale = 1.f) {
#pragma unroll
    for (int m = 0; m < kMFragments; ++m)
#pragma unroll
        for (int n = 0; n < kNFragments; n += 2) {
            uint32_t block[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* x = acc[m][n + i / 2] + i % 2 * 2;
                block[i] = pack<T>(x[0] * scale, x[1] * scale);
            }
            const uint32_t address = to.address(m * 16, n / 2 * kColStep);
            if constexpr (kHasSm90) {
                stmatrix_x4(address, block);
            } else {
            // Lane 8 i + r has the address of row r of the 8x8 matrix i.
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const uint32_t row = __shfl_sync(~0u, address, i * 8 + fragment_row());
                    asm volatile("st.shared.b32 [%0], %1;" ::"r"(row + fragment_col() * 2), "r"(block[i]) : "memory");
                }
            }
        }
}

}  // namespace flash_dmattn::cuda::sm80
