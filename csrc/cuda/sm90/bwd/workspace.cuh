// The backward's workspace: semaphores of the deterministic order, and dQ in float32.
#pragma once

#include "cuda/common/dquery_tiles.cuh"
#include "kernel_traits.h"

namespace flash_dmattn::cuda::sm90 {

// With deterministic=True dquery_semaphore holds the tile scheduler's counter, then a semaphore for each tile of
// dquery_accum and MMA warpgroup: the first n_block that has not yet added to the tile.
__device__ __forceinline__ int32_t* tile_count_semaphore(const BwdArgs& p) { return p.dquery_semaphore; }
__device__ __forceinline__ int32_t* dquery_semaphore(const BwdArgs& p, int64_t tile) {
    return p.dquery_semaphore + 1 + tile * kBwdConsumerWarpgroups;
}
constexpr int64_t count_dquery_semaphores(int64_t tiles) { return 1 + tiles * kBwdConsumerWarpgroups; }

// A tile of dquery_accum in accumulator order: [warp][fragment][lane][4], so that each warp adds contiguous memory.
template <typename Traits>
struct DqueryLayout {
    static constexpr int kFragments = Traits::kDqCols / 8, kWarp = kFragments * 32 * 4,
                         kSize = Traits::kConsumerWarpgroups * 4 * kWarp;
    static_assert(kSize == Traits::kRows * Traits::kHeadDim);

    static __device__ __forceinline__ int offset(int warp, int n, int lane) {
        return warp * kWarp + (n * 32 + lane) * 4;
    }
};

}  // namespace flash_dmattn::cuda::sm90
