// The backward's workspace: semaphores, and dQ in float32.
#pragma once

#include "cuda/common/dquery_tiles.cuh"
#include "kernel_traits.h"

namespace flash_dmattn::cuda::sm90 {

// Whether the main kernel stores the gradient of a dense bias.
constexpr __host__ __device__ bool stores_dense_dbias(const BwdArgs& p) {
    return p.dense_dbias == DenseDbias::kDirect || p.dense_dbias == DenseDbias::kSerialReduce;
}

// The semaphores of a tile of dquery_accum, one for each MMA warpgroup.
__device__ __forceinline__ int32_t* dquery_semaphores(const BwdArgs& p, int64_t tile) {
    return p.dquery_semaphores + tile * kBwdConsumerWarpgroups;
}

// Serial reduction of dbias: the progress of a work tile (dense_dbias.cuh).
__device__ __forceinline__ int32_t* dbias_progress(const BwdArgs& p, int work_index) {
    return p.progress_counters + work_index;
}

// A tile of dquery_accum in accumulator order: [warp][fragment][lane][4], so that each warp adds contiguous memory.
template <typename Traits>
struct DqueryLayout {
    static constexpr int kFragments = Traits::kDqN / 8, kWarp = kFragments * 32 * 4,
                         kSize = Traits::kConsumerWarpgroups * 4 * kWarp;
    static_assert(kSize == Traits::kRows * Traits::kHeadDim);

    static __device__ __forceinline__ int offset(int warp, int n, int lane) {
        return warp * kWarp + (n * 32 + lane) * 4;
    }
};

}  // namespace flash_dmattn::cuda::sm90
