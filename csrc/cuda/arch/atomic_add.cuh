// Vector additions to global memory, by one instruction on sm90. `to` is aligned to the whole vector.
#pragma once

#include "memory.cuh"

namespace flash_dmattn::cuda {

__device__ __forceinline__ void reduce_add(float* to, float x, float y) {
    if constexpr (kHasSm90) {
        reduce_add_x2(to, x, y);
    } else {
        reduce_add(to, x);
        reduce_add(to + 1, y);
    }
}
__device__ __forceinline__ void reduce_add(float* to, const float (&x)[4]) {
    if constexpr (kHasSm90) {
        reduce_add_x4(to, x);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) reduce_add(to + i, x[i]);
    }
}

}  // namespace flash_dmattn::cuda
