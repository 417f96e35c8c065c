// Zeros rows of shared memory tiles that may hold NaN: 0 * NaN is NaN.
#pragma once

#include "mbarrier.cuh"

namespace flash_dmattn::cuda {

// Zeros the rows of [first, first + kCount) for which is_empty(row); `thread` counts the kThreads threads that call.
// The caller synchronizes them.
template <int kCount, int kThreads, typename Tile, typename IsEmpty>
__device__ __forceinline__ void zero_rows(Tile& tile, int first, int thread, const IsEmpty& is_empty) {
    constexpr int kChunks = Tile::kCols / 8;
    for (int i = thread; i < kCount * kChunks; i += kThreads)
        if (is_empty(first + i / kChunks))
            *reinterpret_cast<uint4*>(tile.data + Tile::offset(first + i / kChunks, i % kChunks)) = {};
    fence_proxy_async();
}

template <int kCount>
__device__ __forceinline__ bool any_of(const bool (&flags)[kCount]) {
    bool any = false;
#pragma unroll
    for (int i = 0; i < kCount; ++i) any |= flags[i];
    return any;
}

}  // namespace flash_dmattn::cuda
