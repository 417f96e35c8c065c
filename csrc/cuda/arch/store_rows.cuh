// From a warp group's accumulator to rows of 16-bit elements in global memory.
#pragma once

#include "memory.cuh"
#include "fragment.cuh"

namespace flash_dmattn::cuda {

// Of the lanes 4 q + j, x[i] becomes that of the lane 4 q + i with index j: from parts of four rows to whole ones.
__device__ __forceinline__ void transpose_among_four(uint32_t (&x)[4]) {
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
        const bool upper = lane_id() & step;
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            const int low = step == 1 ? 2 * pair : pair, high = low + step;
            const uint32_t received = __shfl_xor_sync(~0u, upper ? x[low] : x[high], step);
            x[low] = upper ? received : x[low];
            x[high] = upper ? x[high] : received;
        }
    }
}

// Row h of this lane's two, times a factor, to the first `cols` columns of `to`, 16 bytes a lane and 64 a row; nothing where
// the row does not exist. All lanes of the warp call.
template <typename T, int kTiles>
__device__ __forceinline__ void store_row(const float (&acc)[1][kTiles][4], int h, float factor, T* to, int cols,
                                          bool exists) {
    static_assert(kTiles % 4 == 0);
#pragma unroll
    for (int n = 0; n < kTiles; n += 4) {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            pairs[i] = pack<T>(acc[0][n + i][2 * h] * factor, acc[0][n + i][2 * h + 1] * factor);
        transpose_among_four(pairs);
        const int col = (n + lane_id() % 4) * 8;
        if (exists && col < cols) store_global_16(to + col, pairs);
    }
}

}  // namespace flash_dmattn::cuda
