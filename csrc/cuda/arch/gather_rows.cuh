// Rows of keys or values, wherever they lie, to a tile in shared memory.
#pragma once

#include "cp_async.cuh"
#include "smem_tile.cuh"

namespace flash_dmattn::cuda {

// A warp's part of a tile: kWarpKeys rows from `first`, a multiple of 8, on. `place` says which row of the tensor this
// lane's key is; zeros stand for -1 and beyond the first `cols` columns. cp.async.
template <int kWarpKeys, typename T, typename Tile>
__device__ __forceinline__ void gather_rows(Tile& to, int first, const T* rows, int64_t row_stride, int place,
                                            int cols) {
    constexpr int kAtOnce = 32 / Tile::kSlabChunks, kSteps = kWarpKeys / kAtOnce;
    constexpr int kPeriod = 8 / kAtOnce;  // the swizzle repeats every eight rows
    const int chunk = lane_id() % Tile::kSlabChunks, lane_row = lane_id() / Tile::kSlabChunks;
    const char* from = reinterpret_cast<const char*>(rows + chunk * Tile::kChunk);
    const int left = cols - chunk * Tile::kChunk;
    const uint32_t row_bytes = static_cast<uint32_t>(row_stride * sizeof(T));
    uint32_t at[kPeriod];
#pragma unroll
    for (int i = 0; i < kPeriod; ++i) at[i] = to.address(first + lane_row + i * kAtOnce, chunk);
    int places[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) places[i] = __shfl_sync(~0u, place, lane_row + i * kAtOnce);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        const char* row = from + uint64_t{static_cast<uint32_t>(places[i])} * row_bytes;
        const uint32_t to_row = at[i % kPeriod] + i / kPeriod * 8 * Tile::kSlabCols * 2;
#pragma unroll
        for (int slab = 0; slab < Tile::kSlabs; ++slab)
            cp_async_16_if(to_row + slab * Tile::kRows * Tile::kSlabCols * 2, row + slab * Tile::kSlabCols * sizeof(T),
                           places[i] >= 0 && slab * Tile::kSlabCols < left);
    }
}

}  // namespace flash_dmattn::cuda
