// Where a tile lies in the backward's workspace.
#pragma once

#include "../common/sequence.cuh"
#include "../plan.h"
#include "bwd_config.h"

namespace flash_dmattn::cuda::sm90 {

// Index of a tile of dquery_accum. Of variable length a sequence's tiles begin at first_row / rows of a tile + batch, which
// leaves every sequence room for a last tile that is not full.
template <int kRows>
__device__ __forceinline__ int64_t dquery_tile(const BwdArgs& p, const Sequence& s, int head, int row_tile) {
    if (p.cu_seqlens_q == nullptr) return (s.batch * p.heads + head) * p.dquery_tiles + row_tile;
    return head * p.dquery_tiles + s.first_row / kRows + s.batch + row_tile;
}

// Where deterministic, of dquery_turns: the tickets that blocks have drawn, and behind them for each tile of dquery_accum
// and each warp group whose turn it is to add: that of the first tile of keys that has not passed.
__device__ __forceinline__ int32_t* drawn_tickets(const BwdArgs& p) { return p.dquery_turns; }
__device__ __forceinline__ int32_t* dquery_turns(const BwdArgs& p, int64_t tile) {
    return p.dquery_turns + 1 + tile * kBwdConsumers;
}
constexpr int64_t count_dquery_turns(int64_t tiles) { return 1 + tiles * kBwdConsumers; }

}  // namespace flash_dmattn::cuda::sm90
