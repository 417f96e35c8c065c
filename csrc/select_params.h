// Top-k selection from a key bias, for the CPU and the CUDA kernels: the input, and the layout of selected key lists.
//
// On ties the later key wins. A key whose bias is -inf or finfo(dtype).min is never selected. Row i of Sq stands at key
// i + (Sk - Sq).
#pragma once

#include <algorithm>
#include <cstdint>

#include "params.h"

namespace flash_dmattn {

// Reads bias.{data, batch_stride, head_stride, col_stride, batches, heads, dtype}.
struct SelectParams {
    BiasView bias;         // [{B|1}, {H|Hkv|1}, Sk], any strides; variable length: [total_k, {H|Hkv|1}]
    int64_t batches = 1;   // bias.batches, or B where seqused_k differ; variable length: number of sequences
    int64_t rows = 0;      // Sq; variable length: unused
    int64_t keys = 0;      // Sk; variable length: total_k
    int64_t max_keys = 0;  // variable length: upper bound of a sequence's keys, total_k if unknown
    int64_t window = 0;    // w
    const int32_t* cu_seqlens_q = nullptr;  // [B + 1], variable length
    const int32_t* cu_seqlens_k = nullptr;  // [B + 1]
    // [B], or null: number of keys of each batch element, clamped to [0, Sk]. The last row stands at the last of them;
    // keys beyond are not read. Key lists only.
    const int32_t* seqused_k = nullptr;
};

// Key lists are selected for few rows, of fixed length.
constexpr int64_t kMaxListedRows = 16;

// The layout of the key lists of a selection.
struct SelectedListsPlan {
    int64_t lists = 0;      // batches * heads; list b * heads + h, one m_block each
    int64_t stride = 0;     // list l starts at l * stride
    int64_t capacity = 0;   // elements of keys, and of rows if has_rows
    bool has_rows = false;  // more than one row: the kernel writes `rows`
};

inline SelectedListsPlan plan_selected_lists(const SelectParams& params) {
    const int64_t max_keys = std::min(params.window + std::max<int64_t>(params.rows - 1, 0), params.keys);
    SelectedListsPlan plan;
    plan.lists = params.rows > 0 ? params.batches * params.bias.heads : 0;
    plan.stride = KeyListsView::padded(max_keys);
    plan.capacity = plan.lists * plan.stride;
    plan.has_rows = params.rows > 1;
    return plan;
}

}  // namespace flash_dmattn
