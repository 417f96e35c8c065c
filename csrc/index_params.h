// Key lists of what an indexer has chosen: the keys of each query row, or of each tile of query rows.
#pragma once

#include <algorithm>

#include "params.h"

namespace flash_dmattn {

// Places of keys, counted from the sequence's first; -1 stands for none, and so does whatever is no key.
struct IndexView {
    const int32_t* data =
        nullptr;  // [{B|1}, {H|Hkv|1}, ceil(Sq / tile_rows), k]; or of variable length [total_q, heads, k]
    int64_t batch_stride = 0;
    int64_t head_stride = 0;
    int64_t row_stride = 0;
    int64_t col_stride = 0;
    int64_t batches = 1;
    int64_t heads = 1;
    int64_t count = 0;      // k
    int64_t tile_rows = 1;  // query rows that share a row of indices
    bool packed = false;    // the rows of all sequences lie one after the other
};

// Beside the indices the batch elements and heads of the lists, the lengths, cu_seqlens and is_causal are read, and
// `intervals`, where they are present: a row sees of its indices what they show.
struct IndexListsParams : AttentionParams {
    IndexView indices;
};

// A group of query rows has one list: the rows of a tile of lists, or those that share indices, where these are whole
// tiles of lists. Its list begins at `stride` times its number, and all the tiles of the group name it.
struct IndexListsPlan {
    int64_t batches = 1;  // as in KeyListsView
    int64_t heads = 1;
    int64_t num_m_blocks = 1;
    int64_t tile_rows = KeyListsView::kRows;
    bool has_rows = false;    // not every row of a list sees all of its keys
    int64_t group_tiles = 1;  // tiles of lists in a group
    int64_t groups = 1;       // of one batch element and head
    int64_t stride = 0;       // room for a list
    int64_t capacity = 0;     // of keys, in all

    int64_t units() const { return batches * heads * groups; }
    int64_t group_rows() const { return group_tiles * tile_rows; }
};

// How rows are grouped is written down in flash_dmattn/ops.py as well, for graphs.
inline IndexListsPlan plan_index_lists(const IndexListsParams& p) {
    constexpr int64_t kRows = KeyListsView::kRows, kAlign = KeyListsView::kAlign;
    const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
    const int64_t shared = p.indices.tile_rows;
    IndexListsPlan plan;
    plan.batches = p.batch;
    plan.heads = p.heads;
    plan.has_rows = shared % (kRows / 2) != 0;
    plan.tile_rows = plan.has_rows || shared % kRows == 0 ? kRows : kRows / 2;
    plan.num_m_blocks = ceil_div(p.seqlen_q, plan.tile_rows);
    plan.group_tiles = plan.has_rows ? 1 : shared / plan.tile_rows;
    plan.groups = ceil_div(plan.num_m_blocks, plan.group_tiles);
    // Rows of indices that a group may lie across.
    const int64_t most = !plan.has_rows ? 1 : kRows % shared == 0 ? kRows / shared : (kRows - 2) / shared + 2;
    const int64_t across = std::min(most, ceil_div(p.seqlen_q, shared));
    plan.stride = ceil_div(std::min(across * p.indices.count, p.seqlen_k), kAlign) * kAlign;
    plan.capacity = plan.units() * plan.stride;
    return plan;
}

}  // namespace flash_dmattn
