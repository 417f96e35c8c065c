// Top-k selection: from a key bias to the w keys of largest bias among each row's causal keys, as intervals (many rows)
// or key lists (1 to 16 rows, decoding).
//
// On ties the later key wins. A key whose bias is -inf or finfo(dtype).min is never selected. A NaN bias fails a device
// assertion. Row i of Sq stands at key i + (Sk - Sq). Nothing synchronizes with the host; every call can be captured in
// a CUDA graph.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace flash_dmattn {

// The input. Reads bias.{data, batch_stride, head_stride, col_stride, batches, heads, dtype}.
struct SelectParams {
    BiasView bias;        // [{B|1}, {H|Hkv|1}, Sk], any strides; variable length: [total_k, {H|Hkv|1}]
    int64_t batches = 1;  // bias.batches, or B where seqused_k differ; variable length: number of sequences
    int64_t rows = 0;     // Sq; variable length: unused
    int64_t keys = 0;     // Sk; variable length: total_k
    int64_t longest = 0;  // variable length: upper bound of a sequence's keys, total_k if unknown
    int64_t window = 0;   // w
    const int32_t* cu_seqlens_q = nullptr;  // [B + 1], variable length
    const int32_t* cu_seqlens_k = nullptr;  // [B + 1]
    // [B], or null: number of keys of each batch element, clamped to [0, Sk]. The last row stands at the last of them;
    // keys beyond are not read. select_key_lists_cuda only.
    const int32_t* seqused_k = nullptr;
};

// The interval end of a key that is never evicted.
constexpr int32_t kNeverEvicted = 1 << 30;

// Many rows. Every dtype of DataType; up to 2^30 keys over all batch elements and heads.
struct IntervalSelectPlan {
    int64_t scratch_bytes = 0;  // may be 0; scratch is aligned to 256 bytes
    int64_t sort_bytes = 0;     // the sort's part of scratch_bytes
    bool by_chunks = false;     // several CTAs share a sequence
    bool one_launch = false;    // a CTA selects a whole sequence
};

IntervalSelectPlan plan_select_intervals(const SelectParams& params);

// intervals: int32 [2, batches, heads, Sk], variable length [2, total_k, heads], contiguous: starts, then ends, in rows
// of the sequence, as IntervalView reads them. Both are at least 0; a key that no row sees has end <= start. Both are 0
// for keys behind the last sequence.
void select_intervals_cuda(const SelectParams& params, const IntervalSelectPlan& plan, void* scratch,
                           int32_t* intervals, cudaStream_t stream);

// Few rows, fixed length: one kernel, no scratch. float16, bfloat16 and float32.
constexpr int64_t kMaxListedRows = 16;

struct RadixSelectPlan {
    int64_t lists = 0;      // batches * heads; list b * heads + h, one m_block each
    int64_t stride = 0;     // list l starts at l * stride
    int64_t capacity = 0;   // elements of keys, and of rows if has_rows
    bool has_rows = false;  // more than one row: the kernel writes `rows`
    int cluster = 1;        // CTAs that share a list
};

RadixSelectPlan plan_select_key_lists(const SelectParams& params);

// keys [capacity], begins and ends [lists], rows [capacity, KeyListsView::kRows / 32] (null if !has_rows), as in
// KeyListsView: keys ascending, padded with -1 (rows: 0) to a multiple of KeyListsView::kAlign. The rows' bits include
// causality; a single row sees its whole list.
void select_key_lists_cuda(const SelectParams& params, const RadixSelectPlan& plan, int32_t* keys, int64_t* begins,
                           int64_t* ends, uint32_t* rows, cudaStream_t stream);

}  // namespace flash_dmattn
