// Builds key lists from an indexer's indices. Every list has the same capacity, so they are written in one pass without
// counting and without a host synchronization.
#pragma once

#include <cuda_runtime.h>

#include "index_params.h"

namespace flash_dmattn {

// keys [capacity], begins and ends [lists], rows [capacity, KeyListsView::kRows / 32] (null if the plan has none), as
// in KeyListsView. Ignores indices outside the sequence and repeated indices.
void index_lists_cuda(const IndexListsParams& params, const IndexListsPlan& plan, int32_t* keys, int64_t* begins,
                      int64_t* ends, uint32_t* rows, cudaStream_t stream);

}  // namespace flash_dmattn
