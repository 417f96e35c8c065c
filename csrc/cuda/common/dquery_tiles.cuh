// The layout of dquery_accum, where the backward sums dQ: one tile for each m_block of each head.
#pragma once

#include "cuda/plan.h"
#include "basics.cuh"
#include "packed_blocks.cuh"
#include "sequence.cuh"

namespace flash_dmattn::cuda {

// m_blocks of `rows` rows of one head; with variable length, of all sequences, numbered as in packed_blocks.cuh.
inline int64_t count_dquery_m_blocks(const AttentionParams& p, int64_t rows) {
    return p.cu_seqlens_q == nullptr ? ceil_div(p.seqlen_q, rows) : count_packed_blocks(p.total_q, p.batch, rows);
}

constexpr __host__ __device__ int64_t total_dquery_m_blocks(const AttentionParams& p, const BwdTiling& tiling) {
    return (p.cu_seqlens_q == nullptr ? p.batch : 1) * p.heads * tiling.dquery_m_blocks;
}

// The tile of an m_block.
template <int kRows>
__device__ __forceinline__ int64_t dquery_tile(const BwdArgs& p, const Sequence& s, int head, int m_block) {
    if (p.cu_seqlens_q == nullptr) return (s.batch * p.heads + head) * p.dquery_m_blocks + m_block;
    return head * p.dquery_m_blocks + first_packed_block(s.first_row, s.batch, kRows) + m_block;
}

}  // namespace flash_dmattn::cuda
