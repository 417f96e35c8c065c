// Selection: from a bias of one number a key to what each query row sees, the w keys of largest bias among the keys up
// to its own, as intervals (many rows) or straight as key lists (1 to 16 rows, decoding).
//
// Everywhere: of equal biases that of the later key is the larger; a key whose bias is -inf or the least finite number
// of the bias's dtype is never seen; a bias of NaN fails an assertion on the device. Row i of Sq stands at key
// i + (Sk - Sq). Nothing waits for the device, and every call may be captured in a graph.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace flash_dmattn {

// What is selected from. Of `bias` data, batch_stride, head_stride, col_stride (between keys), batches, heads and dtype
// are read.
struct SelectParams {
    BiasView bias;        // [{B|1}, {H|Hkv|1}, Sk], any strides; of variable length [total_k, {H|Hkv|1}]
    int64_t batches = 1;  // to select for: bias.batches, or B where seqused_k differ; of variable length the sequences
    int64_t rows = 0;     // Sq; of variable length it is not read
    int64_t keys = 0;     // Sk; of variable length total_k
    int64_t longest = 0;  // of variable length: no sequence has more keys; total_k where nothing better is known
    int64_t window = 0;   // w
    const int32_t* cu_seqlens_q = nullptr;  // [B + 1], of variable length
    const int32_t* cu_seqlens_k = nullptr;  // [B + 1]
    // [B], or null: only so many of a batch element's keys, clamped to 0 .. Sk, are there; the last row stands at the
    // last of them, and the keys beyond are not read. For select_key_lists_cuda only.
    const int32_t* seqused_k = nullptr;
};

// The end of a key that no later key drives out.
constexpr int32_t kNeverDropped = 1 << 30;

// Many rows. Every dtype of DataType; up to 2^30 keys of all batch elements and heads together.
struct IntervalSelectPlan {
    int64_t scratch_bytes = 0;  // may be 0; the scratch is aligned to 256 bytes
    int64_t sort_bytes = 0;     // of them the sort's own
    bool by_chunks = false;     // blocks share each sequence
    bool one_launch = false;    // a block sorts and splits a sequence whole
};

IntervalSelectPlan plan_select_intervals(const SelectParams& params);

// intervals: int32 [2, batches, heads, Sk], of variable length [2, total_k, heads], contiguous: starts, then ends, in
// rows of the sequence, as IntervalView reads them. Both are at least 0; a key that no row sees has an end that is not
// above its start. Of keys behind the last sequence both are 0.
void select_intervals_cuda(const SelectParams& params, const IntervalSelectPlan& plan, void* scratch,
                           int32_t* intervals, cudaStream_t stream);

// Few rows, of fixed length: one kernel, without scratch. float16, bfloat16 and float32.
constexpr int64_t kMaxListedRows = 16;

struct RadixSelectPlan {
    int64_t lists = 0;      // batches * heads: list b * heads + h, of one row tile
    int64_t stride = 0;     // list l begins at l * stride
    int64_t capacity = 0;   // of keys, and of rows where has_rows
    bool has_rows = false;  // more than one row: the kernel writes `rows`
    int cluster = 1;        // blocks that share a list's work
};

RadixSelectPlan plan_select_key_lists(const SelectParams& params);

// keys [capacity], begins and ends [lists], rows [capacity, KeyListsView::kRows / 32] (null where !has_rows), as
// KeyListsView has them: keys ascending, padded with -1 (rows: 0) to a multiple of KeyListsView::kAlign. Every row sees
// only keys up to its own, so neither intervals nor causality are needed beside `rows`; a single row sees all of its
// list.
void select_key_lists_cuda(const SelectParams& params, const RadixSelectPlan& plan, int32_t* keys, int64_t* begins,
                           int64_t* ends, uint32_t* rows, cudaStream_t stream);

}  // namespace flash_dmattn
