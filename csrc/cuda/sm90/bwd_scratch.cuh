// What the backward's workspace holds.
#pragma once

#include "../common/dquery_tiles.cuh"
#include "bwd_config.h"

namespace flash_dmattn::cuda::sm90 {

// Where deterministic, of dquery_turns: the tickets that blocks have drawn, and behind them for each tile of dquery_accum
// and each warp group whose turn it is to add: that of the first tile of keys that has not passed.
__device__ __forceinline__ int32_t* drawn_tickets(const BwdArgs& p) { return p.dquery_turns; }
__device__ __forceinline__ int32_t* dquery_turns(const BwdArgs& p, int64_t tile) {
    return p.dquery_turns + 1 + tile * kBwdConsumers;
}
// dQ of a tile of rows lies as the registers hold it: of each warp of the groups kWarp numbers, four of each lane together.
template <typename Tile>
struct DqueryLayout {
    static constexpr int kTiles = Tile::kDqCols / 8, kWarp = kTiles * 32 * 4, kSize = Tile::kConsumers * 4 * kWarp;
    static_assert(kSize == Tile::kRows * Tile::kHeadDim);

    // Of four numbers of a lane.
    static __device__ __forceinline__ int offset(int warp, int n, int lane) { return warp * kWarp + (n * 32 + lane) * 4; }
};
constexpr int64_t count_dquery_turns(int64_t tiles) { return 1 + tiles * kBwdConsumers; }

}  // namespace flash_dmattn::cuda::sm90
