// Builds the key lists of KeyListsView (params.h) from params.mask or params.intervals, in two steps: where each list
// is, one behind the other, and what stands in it. A key is listed where the mask, the sequence's length and, if
// params.is_causal, causality let a row of the tile see it; causality is left to the kernels where one list serves all
// rows. Beside the mask, params' batch, lengths and cu_seqlens are read.
#pragma once

#include <cuda_runtime.h>

#include <optional>

#include "params.h"

namespace flash_dmattn {

struct KeyListsPlan {
    int64_t batches = 1;  // as in KeyListsView
    int64_t heads = 1;
    int64_t num_m_blocks = 1;
    bool row_broadcast = false;
    bool has_rows = false;  // the second step writes `rows`
    int64_t chunks = 0;     // of chunk_keys keys each: what lists are put together of
    int64_t chunk_keys = 0;
    int64_t scratch_bytes = 0;

    int64_t lists() const { return batches * heads * num_m_blocks; }
};

KeyListsPlan plan_key_lists(const AttentionParams& params);

// For how many keys there is to be room where lists are made only if they are short: half of those that causality leaves,
// which must not take much memory where they then are not made.
int64_t room_for_short_lists(const AttentionParams& params, const KeyListsPlan& plan);

// params: of a bool mask packed_mask has been filled. begins, ends [lists]: where each list is; its length is rounded up to
// KeyListsView::kAlign. None is beyond `capacity`, the room for keys there will be. total: how much room the lists need,
// uncut; null where nobody asks. percent: of a bool mask, where lists are made only if they fit and hold at most so much of
// the keys in those tiles (PackedMask) that are not empty; without lists all begins and ends are -1. scratch:
// plan.scratch_bytes at a multiple of 16, to be kept for the second step.
void key_list_places_cuda(const AttentionParams& params, const KeyListsPlan& plan, std::optional<int64_t> percent,
                          void* scratch, int64_t* begins, int64_t* ends, int64_t capacity, int64_t* total,
                          cudaStream_t stream);

// Nothing is written beyond `capacity` keys: [capacity], and rows [capacity, KeyListsView::kRows / 32], of which a row
// whose key is -1 is 0.
void key_list_fill_cuda(const AttentionParams& params, const KeyListsPlan& plan, const void* scratch,
                        const int64_t* begins, int64_t capacity, int32_t* keys, uint32_t* rows, cudaStream_t stream);

}  // namespace flash_dmattn
