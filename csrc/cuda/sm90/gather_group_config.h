// How the backward over key lists that heads share is cut, for its kernel and who plans it.
#pragma once

#include "../../params.h"

namespace flash_dmattn::cuda::sm90 {

constexpr int kGatherGroupKeys = 128;  // of a tile

// Of each head a block has the rows of one list.
constexpr __host__ __device__ int64_t gather_group_rows(const AttentionParams& p) {
    return p.lists.row_tiles > 1 ? p.lists.tile_rows : KeyListsView::kRows;
}

}  // namespace flash_dmattn::cuda::sm90
