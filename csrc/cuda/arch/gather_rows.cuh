// Gathers rows of K or V into a tile in shared memory, by cp.async.
#pragma once

#include "cp_async.cuh"
#include "smem_tile.cuh"

namespace flash_dmattn::cuda {

// A warp gathers the kWarpKeys rows of the tile from `first`, a multiple of 8, on. `position` is the tensor row for
// lane i's row of the tile; -1 stores zeros. Columns from `cols` on are zero. The caller commits or arrives.
template <int kWarpKeys, typename T, typename Tile>
__device__ __forceinline__ void gather_rows(Tile& to, int first, const T* rows, int64_t row_stride, int position,
                                            int cols) {
    constexpr int kRowsPerStep = 32 / Tile::kSlabChunks, kSteps = kWarpKeys / kRowsPerStep;
    constexpr int kPeriod = 8 / kRowsPerStep;  // steps after which the swizzle repeats
    const int chunk = lane_id() % Tile::kSlabChunks, lane_row = lane_id() / Tile::kSlabChunks;
    const char* from = reinterpret_cast<const char*>(rows + chunk * Tile::kChunk);
    const int left = cols - chunk * Tile::kChunk;
    const uint32_t row_bytes = static_cast<uint32_t>(row_stride * sizeof(T));
    uint32_t at[kPeriod];
#pragma unroll
    for (int i = 0; i < kPeriod; ++i) at[i] = to.address(first + lane_row + i * kRowsPerStep, chunk);
    int positions[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) positions[i] = __shfl_sync(~0u, position, lane_row + i * kRowsPerStep);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        const char* row = from + uint64_t{static_cast<uint32_t>(positions[i])} * row_bytes;
        const uint32_t to_row = at[i % kPeriod] + i / kPeriod * 8 * Tile::kSlabCols * 2;
#pragma unroll
        for (int slab = 0; slab < Tile::kSlabs; ++slab)
            cp_async_16_if(to_row + slab * Tile::kRows * Tile::kSlabCols * 2, row + slab * Tile::kSlabCols * sizeof(T),
                           positions[i] >= 0 && slab * Tile::kSlabCols < left);
    }
}

}  // namespace flash_dmattn::cuda
