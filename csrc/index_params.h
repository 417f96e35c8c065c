// Key lists from the indices that an indexer selects for each query row, or for each block of query rows.
#pragma once

#include <algorithm>

#include "params.h"

namespace flash_dmattn {

// Positions of keys, counted from the sequence's first key. Positions outside the sequence, such as -1, stand for none.
struct IndexView {
    // [{B|1}, {H|Hkv|1}, ceil(Sq / tile_rows), k]; with variable length [total_q, heads, k]
    const int32_t* data = nullptr;
    int64_t batch_stride = 0;
    int64_t head_stride = 0;
    int64_t row_stride = 0;
    int64_t col_stride = 0;
    int64_t batches = 1;    // B or 1
    int64_t heads = 1;      // H, Hkv or 1
    int64_t count = 0;      // k
    int64_t tile_rows = 1;  // query rows that share a row of indices
    bool packed = false;    // variable length: the rows of all sequences are concatenated
};

// Besides the indices, the builders read batch and heads, which are those of the lists, the lengths, cu_seqlens,
// is_causal, and `intervals`: where present, a row sees only the indices that they show.
struct IndexListsParams : AttentionParams {
    IndexView indices;
};

// How index lists are laid out. A list belongs to a group of m_blocks: one m_block, or the m_blocks whose rows share
// indices. List i starts at keys[i * stride], and all m_blocks of its group refer to it.
struct IndexListsPlan {
    int64_t batches = 1;                         // as in KeyListsView
    int64_t heads = 1;                           // as in KeyListsView
    int64_t num_m_blocks = 1;                    // as in KeyListsView
    int64_t m_block_rows = KeyListsView::kRows;  // as in KeyListsView
    bool has_rows = false;                       // rows of an m_block have indices of their own: KeyListsView::rows
    int64_t m_blocks_per_group = 1;              // m_blocks of a group
    int64_t num_groups = 1;                      // of one batch element and head
    int64_t stride = 0;                          // keys that a list has room for
    int64_t capacity = 0;                        // keys that all lists have room for

    int64_t units() const { return batches * heads * num_groups; }  // lists
    int64_t rows_per_group() const { return m_blocks_per_group * m_block_rows; }
};

// flash_dmattn/ops/fakes.py repeats the grouping and the capacity, for graphs.
inline IndexListsPlan plan_index_lists(const IndexListsParams& p) {
    constexpr int64_t kRows = KeyListsView::kRows;
    const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
    const int64_t index_rows = p.indices.tile_rows;
    IndexListsPlan plan;
    plan.batches = p.batch;
    plan.heads = p.heads;
    plan.has_rows = index_rows % (kRows / 2) != 0;
    plan.m_block_rows = plan.has_rows || index_rows % kRows == 0 ? kRows : kRows / 2;
    plan.num_m_blocks = ceil_div(p.seqlen_q, plan.m_block_rows);
    plan.m_blocks_per_group = plan.has_rows ? 1 : index_rows / plan.m_block_rows;
    plan.num_groups = ceil_div(plan.num_m_blocks, plan.m_blocks_per_group);
    // The largest number of rows of indices that the query rows of a group refer to.
    const int64_t overlapped = !plan.has_rows            ? 1
                               : kRows % index_rows == 0 ? kRows / index_rows
                                                         : (kRows - 2) / index_rows + 2;
    const int64_t max_index_rows = std::min(overlapped, ceil_div(p.seqlen_q, index_rows));
    plan.stride = KeyListsView::padded(std::min(max_index_rows * p.indices.count, p.seqlen_k));
    plan.capacity = plan.units() * plan.stride;
    return plan;
}

}  // namespace flash_dmattn
