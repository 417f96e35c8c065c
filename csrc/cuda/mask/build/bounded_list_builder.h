// The key lists of a mask of intervals of which no row sees more than so many keys: every list has the same room, so
// they are written in one pass, nothing is counted first and nothing is read back.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace flash_dmattn {

struct BoundedListsPlan {
    int64_t batches = 1;  // as in KeyListsView
    int64_t heads = 1;
    int64_t num_m_blocks = 1;
    int64_t stride = 0;    // list t begins at t * stride
    int64_t capacity = 0;  // of keys
    int block_tiles = 1;   // row tiles of one block

    int64_t lists() const { return batches * heads * num_m_blocks; }
};

// keys_per_row: no n rows that follow each other see more than keys_per_row + n - 1 keys. Of params the intervals, the
// batch, the lengths, cu_seqlens and is_causal are read.
BoundedListsPlan plan_bounded_lists(const AttentionParams& params, int64_t keys_per_row);

// keys [capacity], begins and ends [lists], as KeyListsView has them. A key is listed where its interval, the
// sequence's length and, if params.is_causal, causality let a row of the tile see it. A list that would not fit in its
// room is cut.
void bounded_lists_cuda(const AttentionParams& params, const BoundedListsPlan& plan, int32_t* keys, int64_t* begins,
                        int64_t* ends, cudaStream_t stream);

}  // namespace flash_dmattn
