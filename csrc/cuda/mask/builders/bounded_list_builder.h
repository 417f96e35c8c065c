// Builds the key lists of an interval mask whose rows see a bounded number of keys. Every list has the same capacity,
// so they are written in one pass without counting and without a host synchronization.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace flash_dmattn {

struct BoundedListsPlan {
    int64_t batches = 1;  // as in KeyListsView
    int64_t heads = 1;
    int64_t num_m_blocks = 1;
    int64_t stride = 0;        // list t starts at t * stride
    int64_t capacity = 0;      // elements of keys
    int m_blocks_per_cta = 1;  // m_blocks per CTA

    int64_t lists() const { return batches * heads * num_m_blocks; }
};

// keys_per_row: n consecutive rows see at most keys_per_row + n - 1 keys. Reads the intervals, batch, lengths,
// cu_seqlens and is_causal of params.
BoundedListsPlan plan_bounded_lists(const AttentionParams& params, int64_t keys_per_row);

// keys [capacity], begins and ends [lists], as in KeyListsView. Lists a key if its interval, the sequence length and,
// if params.is_causal, causality let a row of the m_block see it. Truncates a list that exceeds its capacity. A list
// has two parts, each of which ascends: the second has the first 256 of the keys that only some of the m_block's rows see.
void bounded_lists_cuda(const AttentionParams& params, const BoundedListsPlan& plan, int32_t* keys, int64_t* begins,
                        int64_t* ends, cudaStream_t stream);

// Sorts such lists, those of other content slowly. keys [capacity]: the sorted keys, at the same begins and ends.
void merge_bounded_lists_cuda(const KeyListsView& lists, int32_t* keys, cudaStream_t stream);

}  // namespace flash_dmattn
