// Swizzled tiles of 16-bit elements in shared memory, and copies between them and global memory.
#pragma once

#include "cp_async.cuh"
#include "mma.cuh"

namespace flash_dmattn::cuda {

// The tile consists of slabs of kSlabCols columns, 64 or 32, in the 128-byte or 64-byte swizzle of TMA and wgmma: the
// 16-byte chunks of a slab row are permuted by the row, so that ldmatrix reads eight rows without bank conflicts.
template <typename T, int kRows_, int kCols_, int kSlabCols_ = kCols_ % 64 == 0 ? 64 : 32>
struct alignas(128) SmemTile {
    using Element = T;
    static constexpr int kRows = kRows_;
    static constexpr int kCols = kCols_;
    static constexpr int kSlabCols = kSlabCols_;
    static constexpr int kSlabs = kCols / kSlabCols;
    static constexpr int kChunk = 8;  // elements of a 16-byte chunk
    static constexpr int kSlabChunks = kSlabCols / kChunk;
    static_assert(sizeof(T) == 2 && kCols % kSlabCols == 0 && kRows % 8 == 0);

    T data[kRows * kCols];

    // Offset in elements of a chunk, counted over the whole row. Unsigned indices take fewer instructions.
    template <typename Index>
    static __device__ __forceinline__ Index offset(Index row, Index chunk) {
        const Index slab = chunk / kSlabChunks;
        const Index permuted = (chunk % kSlabChunks) ^ (kSlabChunks == 8 ? row % 8 : (row / 2) % 4);
        return (slab * kRows + row) * kSlabCols + permuted * kChunk;
    }
    __device__ __forceinline__ uint32_t address(int row, int chunk) const {
        return smem_address(data + offset(row, chunk));
    }
    __device__ __forceinline__ T& at(int row, int col) { return data[offset(row, col / kChunk) + col % kChunk]; }
    __device__ __forceinline__ const T& at(int row, int col) const {
        return data[offset(row, col / kChunk) + col % kChunk];
    }

    // ldmatrix of m16n8k16 operands: 16 rows from `row` (a multiple of 8) and 16 columns from `col` (a multiple of 16).
    // `lane` is ldmatrix_lane_a() or ldmatrix_lane_b(): a loop keeps it in a register, so that the rest becomes
    // immediate.
    __device__ __forceinline__ uint32_t ldmatrix_lane_a() const { return address(lane_id() % 16, lane_id() / 16); }
    __device__ __forceinline__ uint32_t ldmatrix_lane_b() const {
        return address(lane_id() % 8 + lane_id() / 16 * 8, lane_id() / 8 % 2);
    }

    // An A operand, M x K; ldmatrix_lane_a().
    static __device__ __forceinline__ void load_a(uint32_t (&a)[4], uint32_t lane, int row, int col) {
        ldmatrix_x4(a, moved(lane, row, col));
    }
    // An A operand from K x M; ldmatrix_lane_b().
    static __device__ __forceinline__ void load_a_transposed(uint32_t (&a)[4], uint32_t lane, int row, int col) {
        ldmatrix_x4_trans(a, moved(lane, row, col));
    }
    // Two B operands from N x K, as in Q K^T: b[0], b[1] for the first eight rows, b[2], b[3] for the last;
    // ldmatrix_lane_b().
    static __device__ __forceinline__ void load_b(uint32_t (&b)[4], uint32_t lane, int row, int col) {
        ldmatrix_x4(b, moved(lane, row, col));
    }
    // Two B operands from K x N, as in P V; ldmatrix_lane_a().
    static __device__ __forceinline__ void load_b_transposed(uint32_t (&b)[4], uint32_t lane, int row, int col) {
        ldmatrix_x4_trans(b, moved(lane, row, col));
    }

private:
    // Moves a lane's address by `row` rows and `col` columns.
    static __device__ __forceinline__ uint32_t moved(uint32_t lane_address, int row, int col) {
        const int slab = col / kSlabCols;
        const uint32_t permuted = lane_address ^ (col % kSlabCols / kChunk * 16);
        return permuted + (slab * kRows + row) * kSlabCols * sizeof(T);
    }
};

template <typename T>
struct RowSource {
    const T* row;
    bool visible;
};

// How kThreads threads copy a tile by cp.async: each copies one chunk of every slab in rows first_row() + i *
// kRowsAtOnce.
template <int kThreads, typename Tile>
struct RowCopy {
    static constexpr int kRowsAtOnce = kThreads / Tile::kSlabChunks;
    static constexpr int kSteps = ceil_div(Tile::kRows, kRowsAtOnce);
    static_assert(kRowsAtOnce % 8 == 0, "the swizzle repeats every eight rows");
    static_assert(kSteps == 1 || Tile::kRows % kRowsAtOnce == 0);

    static __device__ __forceinline__ int first_row() { return threadIdx.x / Tile::kSlabChunks; }
    static __device__ __forceinline__ int chunk() { return threadIdx.x % Tile::kSlabChunks; }
    // Loops keep this in a register.
    static __device__ __forceinline__ uint32_t lane_address(const Tile& tile) {
        return tile.address(first_row(), chunk());
    }

    // next(i), called for ascending i, returns the RowSource of row first_row() + i * kRowsAtOnce, 16-byte aligned.
    // Copies its first `cols` columns, a multiple of 8; writes zeros elsewhere and for masked rows, which are not read.
    // The caller commits.
    template <typename Next>
    static __device__ __forceinline__ void start(uint32_t lane, int cols, const Next& next) {
        const int left = cols - chunk() * Tile::kChunk;
        if (Tile::kRows < kRowsAtOnce && first_row() >= Tile::kRows) return;
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            const auto source = next(i);
            const auto* from = source.row + chunk() * Tile::kChunk;
#pragma unroll
            for (int slab = 0; slab < Tile::kSlabs; ++slab) {
                const int at = (slab * Tile::kRows + i * kRowsAtOnce) * Tile::kSlabCols;
                const bool in_row = slab * Tile::kSlabCols < left;
                cp_async_16_if(lane + at * 2, from + slab * Tile::kSlabCols, source.visible && in_row);
            }
        }
    }
};

// The same with row_pointer(row), null for masked rows, and any `cols`: nothing beyond them is read.
template <int kThreads, typename Tile, typename RowPointer>
__device__ __forceinline__ void copy_rows_async(Tile& tile, int cols, const RowPointer& row_pointer) {
    using Copy = RowCopy<kThreads, Tile>;
    if (Tile::kRows < Copy::kRowsAtOnce && Copy::first_row() >= Tile::kRows) return;
    const uint32_t to = Copy::lane_address(tile);
#pragma unroll
    for (int i = 0; i < Copy::kSteps; ++i) {
        const auto* from = row_pointer(Copy::first_row() + i * Copy::kRowsAtOnce);
#pragma unroll
        for (int slab = 0; slab < Tile::kSlabs; ++slab) {
            const int col = Copy::chunk() * Tile::kChunk + slab * Tile::kSlabCols;
            const int bytes = from == nullptr ? 0 : min(max(2 * (cols - col), 0), 16);
            const int at = (slab * Tile::kRows + i * Copy::kRowsAtOnce) * Tile::kSlabCols;
            cp_async_16(to + at * 2, bytes > 0 ? from + col : nullptr, bytes);
        }
    }
}

// Stores the tile's rows [first, rows) to global memory, row `first` to `to`; 16 bytes a thread where rows are aligned.
template <int kThreads, typename Tile, typename T>
__device__ __forceinline__ void copy_tile_out(const Tile& tile, T* to, int64_t row_stride, int rows, int cols,
                                              int first = 0) {
    constexpr int kChunks = Tile::kCols / 8;
    const bool aligned = row_stride % 8 == 0 && reinterpret_cast<uintptr_t>(to) % 16 == 0;
#pragma unroll 4
    for (int i = opaque(threadIdx.x); i < Tile::kRows * kChunks; i += kThreads) {
        const int row = i / kChunks, col = i % kChunks * 8;
        if (row < first || row >= rows || col >= cols) continue;
        const T* from = tile.data + Tile::offset(row, i % kChunks);
        T* at = to + (row - first) * row_stride + col;
        if (aligned && col + 8 <= cols) {
            *reinterpret_cast<uint4*>(at) = *reinterpret_cast<const uint4*>(from);
        } else {
#pragma unroll 1
            for (int j = 0; j < min(cols - col, 8); ++j) at[j] = from[j];
        }
    }
}

}  // namespace flash_dmattn::cuda
