// How the work is cut: sequences, tiles, and units that threads take one after the other.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>

#include "linalg.h"
#include "params.h"

namespace flash_dmattn {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Where one batch element's rows and keys lie.
struct Sequence {
    int64_t batch;
    int64_t first_row;  // 0 of fixed length
    int64_t rows;
    int64_t first_key;
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

    // Row i sees the keys [0, causal_end(i)), aligned to the bottom right corner.
    int64_t causal_end(int64_t row) const { return std::clamp<int64_t>(row + 1 + keys - rows, 0, keys); }
    // Key j is seen by the rows [causal_begin(j), rows).
    int64_t causal_begin(int64_t key) const { return std::clamp<int64_t>(key - keys + rows, 0, rows); }
};

// Some rows and some keys of one sequence, for one query head. The keys are a run, or some that a list names.
struct Tile {
    const Sequence& sequence;
    int64_t head;
    int64_t row;
    int64_t rows;
    int64_t key;  // the first of the run; 0 where they are listed
    int64_t keys;
    const int32_t* listed = nullptr;        // the keys, in rising order
    const uint32_t* listed_rows = nullptr;  // which rows see them, as in KeyListsView

    // How many of the keys lie before `end`.
    int64_t keys_before(int64_t end) const {
        if (listed != nullptr) return std::lower_bound(listed, listed + keys, end) - listed;
        return std::clamp<int64_t>(end - key, 0, keys);
    }
};

template <typename acc_t>
acc_t* row_stats(const RowStatView& view, const Sequence& sequence, int64_t head, int64_t row) {
    return static_cast<acc_t*>(view.data) + sequence.batch * view.batch_stride + head * view.head_stride +
           sequence.first_row + row;
}

// Of variable length the pairs of a sequence start at its first key where there is one number a key, else at its
// first row.
inline int64_t offset_of(const ScoreView& view, const Tile& tile, int64_t query_heads) {
    const Sequence& s = tile.sequence;
    return view.batch_of(s.batch) * view.batch_stride + view.head_of(tile.head, query_heads) * view.head_stride +
           ((view.per_key ? 0 : s.first_row) + tile.row) * view.row_stride +
           ((view.per_key ? s.first_key : 0) + tile.key) * view.col_stride;
}

// Of the interval of the sequence's first key.
inline int64_t offset_of(const IntervalView& view, const Sequence& s, int64_t query_head, int64_t query_heads) {
    return (view.batches > 1 ? s.batch * view.batch_stride : 0) +
           query_head / (query_heads / view.heads) * view.head_stride + s.first_key * view.col_stride;
}

// Some rows of a query-like tensor, or of a key-like one, as a matrix; see `load` and `store`.
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

// Brings rows of a query-like or key-like tensor nearer to the processor, which does not see coming what lies apart: for the
// unit of work that follows, which is likely to be the same thread's. At most 128 of them: more are more work than waiting.
inline void prefetch_rows(const AttentionParams& p, const RowsView& view, int64_t batch, int64_t row, int64_t rows,
                          int64_t head) {
    const int64_t size = p.dtype == DataType::kFloat64 ? 8 : p.dtype == DataType::kFloat32 ? 4 : 2;
    const int64_t at = batch * view.batch_stride + row * view.row_stride + head * view.head_stride;
    const char* from = static_cast<const char*>(view.data) + at * size;
    for (int64_t i = 0; i < std::min<int64_t>(rows, 128); ++i, from += view.row_stride * size) {
        for (int64_t byte = 0; byte < p.head_dim * size; byte += 64) __builtin_prefetch(from + byte, 0, 2);
    }
}

// Runs `unit(index)` for every index below `units`; threads take the next one when they are free. `make_unit` is
// called once a thread, so that a unit may own scratch memory.
void for_each_unit(int64_t units, const std::function<std::function<void(int64_t)>()>& make_unit);

}  // namespace flash_dmattn
