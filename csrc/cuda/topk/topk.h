// Top-k selection: from a key bias to the w keys of largest bias among each row's causal keys, as intervals (many rows)
// or key lists (1 to 16 rows, decoding). csrc/select_params.h has the rules.
//
// A NaN bias fails a device assertion. Nothing synchronizes with the host; every call can be captured in a CUDA graph.
#pragma once

#include <cuda_runtime.h>

#include "cuda/common/workspace.h"
#include "select_params.h"

namespace flash_dmattn {

// The interval end of a key that is never evicted.
constexpr int32_t kNeverEvicted = 1 << 30;

// Many rows. Every dtype of DataType; up to 2^30 keys over all batch elements and heads.
struct IntervalSelectPlan : cuda::WorkspaceLayout {
    bool by_chunks = false;   // several CTAs share a sequence
    bool one_launch = false;  // a CTA selects a whole sequence
    // Otherwise positions are sorted: the double buffers of the sort, its own memory, and the counts of a partition.
    cuda::WorkspaceBuffer sort_keys[2], sort_values[2], sort_memory, counts;
};

IntervalSelectPlan plan_select_intervals(const SelectParams& params);

// intervals: int32 [2, batches, heads, Sk], variable length [2, total_k, heads], contiguous: starts, then ends, in rows
// of the sequence, as IntervalView reads them. Both are at least 0; a key that no row sees has end <= start. Both are 0
// for keys behind the last sequence.
void select_intervals_cuda(const SelectParams& params, const IntervalSelectPlan& plan, void* workspace,
                           int32_t* intervals, cudaStream_t stream);

// Few rows, fixed length: one kernel, no workspace. float16, bfloat16 and float32.
// keys [capacity], begins and ends [lists], rows [capacity, KeyListsView::kRows / 32] (null if !has_rows), as in
// KeyListsView: keys ascending, padded with -1 (rows: 0) to a multiple of KeyListsView::kAlign. The rows' bits include
// causality; a single row sees its whole list.
void select_key_lists_cuda(const SelectParams& params, const SelectedListsPlan& plan, int32_t* keys, int64_t* begins,
                           int64_t* ends, uint32_t* rows, cudaStream_t stream);

}  // namespace flash_dmattn
