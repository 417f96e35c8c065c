// What the backward's workspace holds.
#pragma once

#include "cuda/common/dquery_tiles.cuh"
#include "kernel_traits.h"

namespace flash_dmattn::cuda::sm90 {

// Where deterministic, of dquery_semaphore: the tickets that blocks have drawn, and behind them for each tile of dquery_accum
// and each warp group whose turn it is to add: that of the first tile of keys that has not passed.
__device__ __forceinline__ int32_t* drawn_tickets(const BwdArgs& p) { return p.dquery_semaphore; }
__device__ __forceinline__ int32_t* dquery_semaphore(const BwdArgs& p, int64_t tile) {
    return p.dquery_semaphore + 1 + tile * kBwdConsumerWarpgroups;
}
// dQ of a tile of rows lies as the registers hold it: of each warp of the groups kWarp numbers, four of each lane together.
template <typename Traits>
struct DqueryLayout {
    static constexpr int kTiles = Traits::kDqCols / 8, kWarp = kTiles * 32 * 4,
                         kSize = Traits::kConsumerWarpgroups * 4 * kWarp;
    static_assert(kSize == Traits::kRows * Traits::kHeadDim);

    // Of four numbers of a lane.
    static __device__ __forceinline__ int offset(int warp, int n, int lane) {
        return warp * kWarp + (n * 32 + lane) * 4;
    }
};
constexpr int64_t count_dquery_semaphores(int64_t tiles) { return 1 + tiles * kBwdConsumerWarpgroups; }

}  // namespace flash_dmattn::cuda::sm90
