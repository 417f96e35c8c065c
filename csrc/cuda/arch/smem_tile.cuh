// A matrix of 16-bit elements in shared memory, swizzled so that ldmatrix reads it without bank conflicts, and the
// copies between it and global memory.
#pragma once

#include "cp_async.cuh"
#include "mma.cuh"

namespace flash_dmattn::cuda {

// Stored as slabs of 64 columns (of 32, where 64 does not divide the columns or 32 are asked for) whose rows are chunks of
// 16 bytes; the chunks of a row are permuted by the row, so that eight rows of one column of chunks lie in different banks.
template <typename T, int kRows_, int kCols_, int kSlabCols_ = kCols_ % 64 == 0 ? 64 : 32>
struct alignas(128) SmemTile {
    using Element = T;
    static constexpr int kRows = kRows_;
    static constexpr int kCols = kCols_;
    static constexpr int kSlabCols = kSlabCols_;
    static constexpr int kSlabs = kCols / kSlabCols;
    static constexpr int kChunk = 8;  // elements of 16 bytes
    static constexpr int kSlabChunks = kSlabCols / kChunk;
    static_assert(sizeof(T) == 2 && kCols % kSlabCols == 0 && kRows % 8 == 0);

    T data[kRows * kCols];

    // Offset, in elements, of chunk `chunk` (of the whole row) of row `row`.
    static __device__ __forceinline__ int offset(int row, int chunk) {
        const int slab = chunk / kSlabChunks;
        const int permuted = (chunk % kSlabChunks) ^ (kSlabChunks == 8 ? row % 8 : (row / 2) % 4);
        return (slab * kRows + row) * kSlabCols + permuted * kChunk;
    }
    __device__ __forceinline__ uint32_t address(int row, int chunk) const {
        return smem_address(data + offset(row, chunk));
    }
    __device__ __forceinline__ T& at(int row, int col) { return data[offset(row, col / kChunk) + col % kChunk]; }

    // Operands of m16n8k16, by ldmatrix. Every form reads 16 rows from `row` (a multiple of 8) and 16 columns from `col` (a
    // multiple of 16). `lane` is this lane's part of the address, which a loop keeps in a register so that the rest becomes
    // immediate; the order of the four matrices leaves each operand in adjacent registers.
    __device__ __forceinline__ uint32_t lane_down() const { return address(lane_id() % 16, lane_id() / 16); }
    __device__ __forceinline__ uint32_t lane_across() const {
        return address(lane_id() % 8 + lane_id() / 16 * 8, lane_id() / 8 % 2);
    }

    // A operand: its rows are rows here. lane_down.
    static __device__ __forceinline__ void load_a(uint32_t (&a)[4], uint32_t lane, int row, int col) {
        ldmatrix_x4(a, moved(lane, row, col));
    }
    // Two B operands, n = rows and k = columns here: b[0], b[1] of the first eight rows, b[2], b[3] of the last. For a
    // product with the transposed of this matrix (q k^T). lane_across.
    static __device__ __forceinline__ void load_b(uint32_t (&b)[4], uint32_t lane, int row, int col) {
        ldmatrix_x4(b, moved(lane, row, col));
    }
    // Two B operands, k = rows and n = columns here. For a product with this matrix (p v). lane_down.
    static __device__ __forceinline__ void load_b_transposed(uint32_t (&b)[4], uint32_t lane, int row, int col) {
        ldmatrix_x4_trans(b, moved(lane, row, col));
    }

private:
    // The address `row` rows below and `col` columns right of a lane's.
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

// How a block of kThreads copies a tile's rows: a thread copies one chunk of every slab in the rows first_row() + i *
// kRowsAtOnce.
template <int kThreads, typename Tile>
struct RowCopy {
    static constexpr int kRowsAtOnce = kThreads / Tile::kSlabChunks;
    static constexpr int kSteps = ceil_div(Tile::kRows, kRowsAtOnce);
    static_assert(kRowsAtOnce % 8 == 0, "the swizzle repeats every eight rows");
    static_assert(kSteps == 1 || Tile::kRows % kRowsAtOnce == 0);

    static __device__ __forceinline__ int first_row() { return threadIdx.x / Tile::kSlabChunks; }
    static __device__ __forceinline__ int chunk() { return threadIdx.x % Tile::kSlabChunks; }
    // This thread's part of the address; a loop keeps it in a register.
    static __device__ __forceinline__ uint32_t lane_address(const Tile& tile) {
        return tile.address(first_row(), chunk());
    }

    // next(i), called for rising i, gives the pointer to row first_row() + i * kRowsAtOnce, a multiple of 16 bytes, and
    // whether it is visible. Its first `cols` columns (a multiple of 8) are copied; zeros stand beyond them and in rows
    // that are not visible: nothing else is read. The caller commits.
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

// The same where rows are found one by one: row_pointer(row) is null where row is not visible. Where `cols` is no
// multiple of 8, the rest of the last chunk is not read either.
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

// A tile's rows from `first` on, before `rows`, to rows of global memory, 16 bytes a thread where they are aligned.
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
            for (int j = 0; j < min(cols - col, 8); ++j) at[j] = from[j];
        }
    }
}

}  // namespace flash_dmattn::cuda
