// Block sizes of the grouped sparse backward, for its kernel and its plan.
#pragma once

#include "params.h"

namespace flash_dmattn::cuda::sm90 {

// Keys of an n_block: above head dimension 128 both MMA warpgroups share 64 (sm90/bwd/kernel_traits.h).
constexpr int grouped_block_n(int head_dim) { return head_dim > 128 ? 64 : 128; }

// Whether the per-head sparse kernel is compiled, too.
constexpr bool can_run_per_head(int head_dim) { return head_dim <= 128; }

// Rows of an m_block for each head: those of one list.
constexpr __host__ __device__ int64_t grouped_block_m(const AttentionParams& p) {
    return p.lists.num_m_blocks > 1 ? p.lists.tile_rows : KeyListsView::kRows;
}

}  // namespace flash_dmattn::cuda::sm90
