// Products of matrices in shared memory, a warp at a time: acc += op(A) op(B) by mma_m16n8k16.
#pragma once

#include "cuda/arch/memory.cuh"
#include "cuda/arch/mma.cuh"
#include "cuda/arch/fragment.cuh"
#include "cuda/arch/smem_tile.cuh"

namespace flash_dmattn::cuda::sm80 {

// Addresses of what lies in a block's shared memory, from one register: its start is not a constant, and to find it anew
// costs more than an addition.
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

// Which 8x8 matrix of a 16x16 block the lanes 8 to 15 of an ldmatrix address: the one below the first or the one beside
// it. The other one is that of the lanes 16 to 23.
enum class BlockOrder { kBelowFirst, kBesideFirst };

// Reads and writes 16x16 blocks of a tile, at offsets from a corner of it that are known at compile time once loops are
// unrolled: a block costs an exclusive or, and what is left of its address is an immediate.
template <typename Tile, BlockOrder kOrder>
class Blocks {
public:
    static constexpr int kRowBytes = Tile::kSlabCols * 2;

    // `lane_offset` is lane_offset(row, col) of the corner, which many products have in common.
    __device__ __forceinline__ Blocks(uint32_t tile, uint32_t lane_offset) : lane_address_(tile + lane_offset) {}

    // Found anew wherever it is wanted: the compiler is not to see that the corner is the same in every turn of a loop.
    // Kept across it, the offsets of all blocks would take more registers than there are.
    __device__ __forceinline__ Blocks(uint32_t tile, int row, int col)
        : lane_address_(tile + lane_offset(row, col, opaque(lane_id()))) {}

    // The blocks from a corner further on; its row and column are as those of a block.
    __device__ __forceinline__ Blocks from(int row, int col) const { return Blocks(address(row, col), 0); }

    // row is a multiple of 8; col shares no bit with the column offsets, other than multiples of a slab.
    static __device__ __forceinline__ uint32_t lane_offset(int row, int col, int lane = lane_id()) {
        const int below = kOrder == BlockOrder::kBelowFirst ? lane / 8 % 2 : lane / 16;
        const int beside = kOrder == BlockOrder::kBelowFirst ? lane / 16 : lane / 8 % 2;
        return Tile::offset(row + lane % 8 + below * 8, col / Tile::kChunk + beside) * 2;
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

// An operand of a product as it lies in shared memory: [m, k] or, transposed, [k, m]; of B [n, k] or, transposed, [k, n].
template <typename Tile, bool kTransposed>
struct OperandA : Blocks<Tile, kTransposed ? BlockOrder::kBesideFirst : BlockOrder::kBelowFirst> {
    using Base = Blocks<Tile, kTransposed ? BlockOrder::kBesideFirst : BlockOrder::kBelowFirst>;
    using Base::Base;
    __device__ __forceinline__ void block(uint32_t (&to)[4], int m, int k) const {
        kTransposed ? this->template load<true>(to, k, m) : this->template load<false>(to, m, k);
    }
};
template <typename Tile, bool kTransposed>
struct OperandB : Blocks<Tile, kTransposed ? BlockOrder::kBelowFirst : BlockOrder::kBesideFirst> {
    using Base = Blocks<Tile, kTransposed ? BlockOrder::kBelowFirst : BlockOrder::kBesideFirst>;
    using Base::Base;
    __device__ __forceinline__ void block(uint32_t (&to)[4], int n, int k) const {
        kTransposed ? this->template load<true>(to, k, n) : this->template load<false>(to, n, k);
    }
};

// acc[m][n] += A B over kDepth. This warp's blocks of 16 columns lie kColStep apart. The operands of a step are loaded
// while the one before is multiplied.
template <typename T, int kDepth, int kColStep = 16, int kMTiles, int kNTiles, typename A, typename B>
__device__ __forceinline__ void multiply_add(float (&acc)[kMTiles][kNTiles][4], const A& a, const B& b) {
    static_assert(kNTiles % 2 == 0);
    uint32_t a_blocks[2][kMTiles][4], b_blocks[2][kNTiles / 2][4];
    const auto load = [&](int step) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) a.block(a_blocks[step % 2][m], m * 16, step * 16);
#pragma unroll
        for (int n = 0; n < kNTiles / 2; ++n) b.block(b_blocks[step % 2][n], n * kColStep, step * 16);
    };
    constexpr int kSteps = kDepth / 16;
    load(0);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        if (step + 1 < kSteps) load(step + 1);
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int n = 0; n < kNTiles; ++n) {
                const uint32_t (&pair)[4] = b_blocks[step % 2][n / 2];
                mma_m16n8k16<T>(acc[m][n], a_blocks[step % 2][m], pair[n % 2 * 2], pair[n % 2 * 2 + 1]);
            }
    }
}

// The accumulator, rounded, to blocks of a tile; those of 16 columns lie kColStep apart.
template <typename T, int kColStep = 16, int kMTiles, int kNTiles, typename Tile>
__device__ __forceinline__ void store_rounded(const float (&acc)[kMTiles][kNTiles][4],
                                              const Blocks<Tile, BlockOrder::kBelowFirst>& to, float scale = 1.f) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int n = 0; n < kNTiles; n += 2) {
            uint32_t block[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* pair = acc[m][n + i / 2] + i % 2 * 2;
                block[i] = pack<T>(pair[0] * scale, pair[1] * scale);
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
