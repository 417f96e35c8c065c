// How the backward over key lists that heads share is cut, for its kernel and who plans it.
#pragma once

#include "params.h"

namespace flash_dmattn::cuda::sm90 {

// Of a tile. Above head dimension 128 the warp groups share them, as in the backward of tiles (bwd_config.h).
constexpr int grouped_block_n(int head_dim) { return head_dim > 128 ? 64 : 128; }

// Whether heads can be gathered for one by one, too (gather_bwd_block.cuh).
constexpr bool can_run_per_head(int head_dim) { return head_dim <= 128; }

// Of each head a block has the rows of one list.
constexpr __host__ __device__ int64_t grouped_block_m(const AttentionParams& p) {
    return p.lists.num_m_blocks > 1 ? p.lists.tile_rows : KeyListsView::kRows;
}

}  // namespace flash_dmattn::cuda::sm90
