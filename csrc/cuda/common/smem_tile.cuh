// A matrix of 16-bit elements in shared memory, swizzled so that ldmatrix reads it without bank conflicts, and the
// copies between it and global memory.
#pragma once

#include "ptx.cuh"

namespace flash_dmattn::cuda {

// Stored as panels of 64 columns (of 32, where 64 does not divide the columns) whose rows are chunks of 16 bytes; the
// chunks of a row are permuted by the row, so that eight rows of one column of chunks lie in different banks.
template <typename T, int kRows_, int kCols_>
struct alignas(128) SmemTile {
    static constexpr int kRows = kRows_;
    static constexpr int kCols = kCols_;
    static constexpr int kPanelCols = kCols % 64 == 0 ? 64 : 32;
    static constexpr int kPanels = kCols / kPanelCols;
    static constexpr int kChunk = 8;  // elements of 16 bytes
    static constexpr int kPanelChunks = kPanelCols / kChunk;
    static_assert(sizeof(T) == 2 && kCols % 32 == 0 && kRows % 8 == 0);

    T data[kRows * kCols];

    // Offset, in elements, of chunk `chunk` (of the whole row) of row `row`.
    static __device__ __forceinline__ int offset(int row, int chunk) {
        const int panel = chunk / kPanelChunks;
        const int permuted = (chunk % kPanelChunks) ^ (kPanelChunks == 8 ? row % 8 : (row / 2) % 4);
        return (panel * kRows + row) * kPanelCols + permuted * kChunk;
    }
    __device__ __forceinline__ uint32_t address(int row, int chunk) const {
        return smem_address(data + offset(row, chunk));
    }
    __device__ __forceinline__ T& at(int row, int col) { return data[offset(row, col / kChunk) + col % kChunk]; }

    // A operand of m16n8k16: rows [row, row + 16), columns [col, col + 16).
    __device__ __forceinline__ void load_a(uint32_t (&a)[4], int row, int col) const {
        ldmatrix_x4(a, address(row + lane_id() % 16, col / kChunk + lane_id() / 16));
    }
    // The same operand of the transposed matrix: its rows are the columns [col, col + 16) here, its columns the rows
    // [row, row + 16).
    __device__ __forceinline__ void load_a_transposed(uint32_t (&a)[4], int row, int col) const {
        ldmatrix_x4_trans(a, address(row + lane_id() % 8 + lane_id() / 16 * 8, col / kChunk + lane_id() / 8 % 2));
    }
    // Two B operands: n = rows [row, row + 16), k = columns [col, col + 16): b[0], b[1] of the first eight, b[2], b[3]
    // of the last. For a product with the transposed of this matrix (q k^T).
    __device__ __forceinline__ void load_b(uint32_t (&b)[4], int row, int col) const {
        ldmatrix_x4(b, address(row + lane_id() % 8 + lane_id() / 16 * 8, col / kChunk + lane_id() / 8 % 2));
    }
    // Two B operands: k = rows [row, row + 16), n = columns [col, col + 16). For a product with this matrix (p v).
    __device__ __forceinline__ void load_b_transposed(uint32_t (&b)[4], int row, int col) const {
        ldmatrix_x4_trans(b, address(row + lane_id() % 16, col / kChunk + lane_id() / 16));
    }
};

// Copies rows to a tile with cp.async: row r of the tile from row_pointer(r), the first `cols` of its columns; zeros
// beyond them, and in rows whose pointer is null: nothing else is read. Pointers are multiples of 16 bytes. The
// block's kThreads threads take part; the caller commits.
template <int kThreads, typename Tile, typename RowPointer>
__device__ __forceinline__ void copy_rows_async(Tile& tile, int cols, const RowPointer& row_pointer) {
    constexpr int kRowsAtOnce = kThreads / Tile::kPanelChunks;
    static_assert(kRowsAtOnce % 8 == 0 && Tile::kRows % kRowsAtOnce == 0, "the swizzle repeats every eight rows");
    const int first = threadIdx.x / Tile::kPanelChunks;
    const int chunk = threadIdx.x % Tile::kPanelChunks;
    const int col = chunk * Tile::kChunk;
    const uint32_t to = tile.address(first, chunk);
#pragma unroll
    for (int step = 0; step < Tile::kRows / kRowsAtOnce; ++step) {
        const auto* from = row_pointer(first + step * kRowsAtOnce);
#pragma unroll
        for (int panel = 0; panel < Tile::kPanels; ++panel) {
            const int at = (panel * Tile::kRows + step * kRowsAtOnce) * Tile::kPanelCols;
            const int left = cols - col - panel * Tile::kPanelCols;
            const int bytes = from == nullptr || left <= 0 ? 0 : min(2 * left, 16);
            cp_async_16(to + at * 2, bytes > 0 ? from + col + panel * Tile::kPanelCols : nullptr, bytes);
        }
    }
}

}  // namespace flash_dmattn::cuda
