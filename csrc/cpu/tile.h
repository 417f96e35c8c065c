// Sequences, tiles, and the rows of tensors that belong to them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "linalg.h"
#include "params.h"

namespace flash_dmattn {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The rows and keys of a batch element, with fixed and with variable length.
struct Sequence {
    int64_t batch;
    int64_t first_row;  // in the concatenated rows; 0 with fixed length
    int64_t rows;
    int64_t first_key;  // in the concatenated keys; 0 with fixed length
    int64_t keys;

    Sequence(const AttentionParams& p, int64_t b)
        : batch(b), first_row(0), rows(p.seqlen_q), first_key(0), keys(p.seqlen_k) {
        if (p.cu_seqlens_q != nullptr) {
            first_row = p.cu_seqlens_q[b];
            rows = p.cu_seqlens_q[b + 1] - first_row;
            first_key = p.cu_seqlens_k[b];
            keys = p.cu_seqlens_k[b + 1] - first_key;
        } else if (p.seqused_k != nullptr) {
            keys = std::clamp<int64_t>(p.seqused_k[b], 0, keys);
        }
    }

    // A row sees the keys [0, causal_end(row)): causality aligns to the bottom right corner.
    int64_t causal_end(int64_t row) const { return std::clamp<int64_t>(row + 1 + keys - rows, 0, keys); }
    // The rows [causal_begin(key), rows) see a key.
    int64_t causal_begin(int64_t key) const { return std::clamp<int64_t>(key - keys + rows, 0, rows); }
};

// Rows of one sequence and query head, by consecutive keys or by keys gathered by a list.
struct Tile {
    const Sequence& sequence;
    int64_t head;
    int64_t row;
    int64_t rows;
    int64_t key;  // the first key; 0 where keys are gathered
    int64_t keys;
    const int32_t* gathered = nullptr;    // positions of the gathered keys, sorted; null for consecutive keys
    const uint32_t* row_words = nullptr;  // KeyListsView::rows of the gathered keys, or null

    // The number of the tile's keys before position `end`.
    int64_t keys_before(int64_t end) const {
        if (gathered != nullptr) return std::lower_bound(gathered, gathered + keys, end) - gathered;
        return std::clamp<int64_t>(end - key, 0, keys);
    }
};

template <typename acc_t>
acc_t* row_stats(const RowStatView& view, const Sequence& sequence, int64_t head, int64_t row) {
    return static_cast<acc_t*>(view.data) + sequence.batch * view.batch_stride + head * view.head_stride +
           sequence.first_row + row;
}

// The offset of a tile's first score, in elements. With variable length the scores of a sequence start at its first key
// where the view is per key, else at its first row.
inline int64_t offset_of(const ScoreView& view, const Tile& tile, int64_t query_heads) {
    const Sequence& s = tile.sequence;
    return view.batch_of(s.batch) * view.batch_stride + view.head_of(tile.head, query_heads) * view.head_stride +
           ((view.per_key ? 0 : s.first_row) + tile.row) * view.row_stride +
           ((view.per_key ? s.first_key : 0) + tile.key) * view.col_stride;
}

// The offset of the key interval of a sequence's first key.
inline int64_t offset_of(const IntervalView& view, const Sequence& s, int64_t query_head, int64_t query_heads) {
    return (view.batches > 1 ? s.batch * view.batch_stride : 0) +
           query_head / (query_heads / view.heads) * view.head_stride + s.first_key * view.col_stride;
}

// Rows of Q, O or a gradient of theirs (load_rows, store_rows), or of K, V or theirs (load_keys, store_keys), as
// matrices [rows, D]. See `load_operand` and `store`.
template <typename acc_t>
Matrix<acc_t> load_rows(const AttentionParams& p, const RowsView& view, const Sequence& s, int64_t row, int64_t rows,
                        int64_t head, acc_t* scratch) {
    const int64_t at = s.batch * view.batch_stride + (s.first_row + row) * view.row_stride + head * view.head_stride;
    return load_operand<acc_t>(view.data, p.dtype, at, view.row_stride, rows, p.head_dim, scratch);
}

template <typename acc_t>
Matrix<acc_t> load_keys(const AttentionParams& p, const RowsView& view, const Sequence& s, int64_t key, int64_t keys,
                        int64_t head, acc_t* scratch) {
    const int64_t at = s.batch * view.batch_stride + (s.first_key + key) * view.row_stride + head * view.head_stride;
    return load_operand<acc_t>(view.data, p.dtype, at, view.row_stride, keys, p.head_dim, scratch);
}

template <typename acc_t>
void store_rows(const AttentionParams& p, const Matrix<acc_t>& rows, const RowsView& view, const Sequence& s,
                int64_t row, int64_t head) {
    const int64_t at = s.batch * view.batch_stride + (s.first_row + row) * view.row_stride + head * view.head_stride;
    store(rows, view.data, p.dtype, at, view.row_stride);
}

template <typename acc_t>
void store_keys(const AttentionParams& p, const Matrix<acc_t>& keys, const RowsView& view, const Sequence& s,
                int64_t key, int64_t head) {
    const int64_t at = s.batch * view.batch_stride + (s.first_key + key) * view.row_stride + head * view.head_stride;
    store(keys, view.data, p.dtype, at, view.row_stride);
}

// Prefetches rows for the next task, which the same thread probably runs. The hardware prefetcher does not recognize
// rows that are far apart. More than 128 rows cost more than they save.
inline void prefetch_rows(const AttentionParams& p, const RowsView& view, int64_t batch, int64_t row, int64_t rows,
                          int64_t head) {
    const int64_t size = p.dtype == DataType::kFloat64 ? 8 : p.dtype == DataType::kFloat32 ? 4 : 2;
    const int64_t at = batch * view.batch_stride + row * view.row_stride + head * view.head_stride;
    const char* from = static_cast<const char*>(view.data) + at * size;
    for (int64_t i = 0; i < std::min<int64_t>(rows, 128); ++i, from += view.row_stride * size) {
        for (int64_t byte = 0; byte < p.head_dim * size; byte += 64) __builtin_prefetch(from + byte, 0, 2);
    }
}

}  // namespace flash_dmattn
