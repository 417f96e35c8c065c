// The key lists of what an indexer has chosen. Every list has the same room, so they are written in one pass, nothing is
// counted first and nothing is read back.
#pragma once

#include <cuda_runtime.h>

#include "index_params.h"

namespace flash_dmattn {

// keys [capacity], begins and ends [lists], rows [capacity, KeyListsView::kRows / 32] where the plan has them (else null),
// as KeyListsView has them. An index that is no key of its sequence counts as none, one that is repeated once.
void index_lists_cuda(const IndexListsParams& params, const IndexListsPlan& plan, int32_t* keys, int64_t* begins,
                      int64_t* ends, uint32_t* rows, cudaStream_t stream);

}  // namespace flash_dmattn
