// Stores accumulator rows to global memory.
#pragma once

#include "memory.cuh"
#include "fragment.cuh"
#include "mma.cuh"

namespace flash_dmattn::cuda {

// Transposes a 4 x 4 matrix over the four lanes of a row: x[i] of lane j swaps with x[j] of lane i. Each lane then has
// 16 contiguous bytes.
__device__ __forceinline__ void transpose_quad(uint32_t (&x)[4]) {
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
        const bool upper = lane_id() & step;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int low = step == 1 ? 2 * i : i, high = low + step;
            const uint32_t received = __shfl_xor_sync(~0u, upper ? x[low] : x[high], step);
            x[low] = upper ? received : x[low];
            x[high] = upper ? x[high] : received;
        }
    }
}

// Stores row h of this lane's two, times `factor`, to the first `cols` columns of `to`, if the row exists. Four lanes
// write 64 contiguous bytes. All lanes of the warp call.
template <typename T, int kFragments>
__device__ __forceinline__ void store_row(const float (&acc)[1][kFragments][4], int h, float factor, T* to, int cols,
                                          bool exists) {
    static_assert(kFragments % 4 == 0);
#pragma unroll
    for (int n = 0; n < kFragments; n += 4) {
        uint32_t packed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            packed[i] = pack<T>(acc[0][n + i][2 * h] * factor, acc[0][n + i][2 * h + 1] * factor);
        transpose_quad(packed);
        const int col = (n + lane_id() % 4) * 8;
        if (exists && col < cols) store_global_16(to + col, packed);
    }
}

// Stores the transposed accumulator, times `factor`: the warp's 16 rows are columns of `to`, which has `rows` rows and
// `cols` columns. Two lanes write 32 contiguous bytes. All lanes of the warp call.
template <typename T, int kFragments>
__device__ __forceinline__ void store_transposed(const float (&acc)[1][kFragments][4], float factor, T* to,
                                                 int64_t row_stride, int rows, int cols) {
    static_assert(kFragments % 2 == 0);
#pragma unroll
    for (int n = 0; n < kFragments; n += 2) {
        uint32_t packed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* x = acc[0][n + i / 2] + i % 2 * 2;
            packed[i] = transpose_8x8(pack<T>(x[0] * factor, x[1] * factor));
        }
        transpose_quad(packed);
        const int row = (n + lane_id() % 4 / 2) * 8 + fragment_row(), col = lane_id() % 2 * 8;
        if (row < rows && col < cols) store_global_16(to + row * row_stride + col, packed);
    }
}

// The same to float32. Four lanes write 32 contiguous bytes; `to` is aligned to 8 bytes, and cols is even.
template <int kFragments>
__device__ __forceinline__ void store_row(const float (&acc)[1][kFragments][4], int h, float factor, float* to,
                                          int cols, bool exists) {
#pragma unroll
    for (int n = 0; n < kFragments; ++n) {
        const int col = n * 8 + fragment_col();
        const float2 pair = {acc[0][n][2 * h] * factor, acc[0][n][2 * h + 1] * factor};
        if (exists && col < cols) *reinterpret_cast<float2*>(to + col) = pair;
    }
}

}  // namespace flash_dmattn::cuda
