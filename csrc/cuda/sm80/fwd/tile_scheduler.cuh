// The forward's tile scheduler: one CTA for each work tile and split of its keys. fwd_kernel decodes blockIdx.
#pragma once

#include "cuda/common/sequence.cuh"
#include "cuda/plan.h"

namespace flash_dmattn::cuda::sm80 {

// (m_block, head, batch), or with pack-GQA (m_block, packed heads, batch), and a split of the keys. Lives in shared
// memory, since the mainloop needs the registers.
struct FwdWorkTile {
    Sequence sequence;
    int first_head;
    int first_row;    // of the m_block; with pack-GQA it counts (row, head) pairs
    int split_group;  // index of the CTAs that split the keys of one m_block, among all heads and batch elements
    int split_idx;
};

struct FwdTileScheduler {
    int num_m_blocks;     // of `qheads_per_tile` heads
    int heads;            // H / qheads_per_tile
    int batch;            // B
    int qheads_per_tile;  // pack-GQA: row r of a tile is row r / qheads_per_tile of head r % qheads_per_tile
    bool batch_first;     // neighbouring CTAs differ in their batch element, else in their m_block

    // False where a sequence of variable length has fewer m_blocks than the longest one.
    __device__ __forceinline__ bool is_valid(const FwdWorkTile& work_tile) const {
        return work_tile.first_row < work_tile.sequence.rows * qheads_per_tile;
    }
};

}  // namespace flash_dmattn::cuda::sm80
