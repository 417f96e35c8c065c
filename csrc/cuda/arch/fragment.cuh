// The accumulator layout of mma_m16n8k16 and wgmma in the lanes of a warp.
//
// An accumulator is acc[kMFragments][kNFragments][4], fragments of 16 rows by 8 columns: acc[m][n][2 h + e] is row
// 16 m + 8 h + fragment_row() and column 8 n + fragment_col() + e, for h and e in {0, 1}.
#pragma once

#include "cuda/common/basics.cuh"

namespace flash_dmattn::cuda {

__device__ __forceinline__ int fragment_row(int lane = lane_id()) { return lane / 4; }
__device__ __forceinline__ int fragment_col(int lane = lane_id()) { return lane % 4 * 2; }
// True for one of the four lanes that hold a row.
__device__ __forceinline__ bool is_row_leader() { return lane_id() % 4 == 0; }

template <int kMFragments, int kNFragments>
__device__ __forceinline__ void fill(float (&acc)[kMFragments][kNFragments][4], float x) {
#pragma unroll
    for (int m = 0; m < kMFragments; ++m)
#pragma unroll
        for (int n = 0; n < kNFragments; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[m][n][i] = x;
}
template <int kMFragments, int kNFragments>
__device__ __forceinline__ void clear(float (&acc)[kMFragments][kNFragments][4]) {
    fill(acc, 0.f);
}

// Reductions over the four lanes that hold a row.
__device__ __forceinline__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Reductions over the eight lanes that hold a column.
__device__ __forceinline__ float column_max(float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}
__device__ __forceinline__ float column_sum(float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

}  // namespace flash_dmattn::cuda
