// Where the backward sums dQ: in the workspace, in tiles of some query rows of one head.
#pragma once

#include "cuda/plan.h"
#include "basics.cuh"
#include "sequence.cuh"

namespace flash_dmattn::cuda {

// Tiles of `rows` rows of one head; of variable length, of all sequences together: each has room for a last tile that is not
// full.
inline int64_t count_dquery_tiles(const AttentionParams& p, int64_t rows) {
    return p.cu_seqlens_q == nullptr ? ceil_div(p.seqlen_q, rows) : p.total_q / rows + p.batch;
}

// Tiles of all heads together.
constexpr __host__ __device__ int64_t dquery_tiles_total(const AttentionParams& p, const BwdCuts& cuts) {
    return (p.cu_seqlens_q == nullptr ? p.batch : 1) * p.heads * cuts.dquery_tiles;
}

// Index of a tile of dquery_accum. Of variable length a sequence's tiles begin at first_row / rows of a tile + batch.
template <int kRows>
__device__ __forceinline__ int64_t dquery_tile(const BwdArgs& p, const Sequence& s, int head, int m_block) {
    if (p.cu_seqlens_q == nullptr) return (s.batch * p.heads + head) * p.dquery_tiles + m_block;
    return head * p.dquery_tiles + s.first_row / kRows + s.batch + m_block;
}

}  // namespace flash_dmattn::cuda
