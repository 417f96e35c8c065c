// Where a tile lies in the backward's workspace.
#pragma once

#include "../common/sequence.cuh"
#include "../plan.h"

namespace flash_dmattn::cuda::sm90 {

// Index of a tile of dquery_accum. Of variable length a sequence's tiles begin at first_row / rows of a tile + batch, which
// leaves every sequence room for a last tile that is not full.
template <int kRows>
__device__ __forceinline__ int64_t dquery_tile(const BwdArgs& p, const Sequence& s, int head, int row_tile) {
    if (p.cu_seqlens_q == nullptr) return (s.batch * p.heads + head) * p.dquery_tiles + row_tile;
    return head * p.dquery_tiles + s.first_row / kRows + s.batch + row_tile;
}

}  // namespace flash_dmattn::cuda::sm90
