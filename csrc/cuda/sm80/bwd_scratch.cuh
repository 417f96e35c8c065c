// Where a tile lies in the backward's workspace.
#pragma once

#include "../common/basics.cuh"
#include "../common/sequence.cuh"
#include "../plan.h"

namespace flash_dmattn::cuda::sm80 {

// Index of a tile of dquery_accum and dquery_turns. Of variable length a sequence's tiles begin at first_row / rows of a
// tile + batch, which leaves every sequence room for a last tile that is not full.
template <int kRows>
__device__ __forceinline__ int64_t dquery_tile(const BwdArgs& p, const Sequence& s, int head, int row_tile) {
    if (p.cu_seqlens_q == nullptr) return (s.batch * p.heads + head) * p.dquery_tiles + row_tile;
    return head * p.dquery_tiles + s.first_row / kRows + s.batch + row_tile;
}

// Tiles of all heads together.
constexpr __host__ __device__ int64_t dquery_tiles_total(const AttentionParams& p, const BwdCuts& cuts) {
    return (p.cu_seqlens_q == nullptr ? p.batch : 1) * p.heads * cuts.dquery_tiles;
}

// Whether every entry of a dense bias belongs to one batch element and one query head.
inline bool dbias_is_of_one(const BwdParams& p) {
    return p.dbias.heads == p.heads && (p.cu_seqlens_q != nullptr || p.dbias.batches == p.batch);
}

}  // namespace flash_dmattn::cuda::sm80
