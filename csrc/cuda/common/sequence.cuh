// The rows and keys of a batch element, with fixed and with variable length.
#pragma once

#include "params.h"

namespace flash_dmattn::cuda {

struct Sequence {
    int batch;
    int first_row;  // in the concatenated rows; 0 with fixed length
    int rows;
    int first_key;  // in the concatenated keys; 0 with fixed length
    int keys;

    Sequence() = default;
    __device__ Sequence(const AttentionParams& p, int b)
        : batch(b), first_row(0), rows(static_cast<int>(p.seqlen_q)), first_key(0), keys(static_cast<int>(p.seqlen_k)) {
        if (p.cu_seqlens_q != nullptr) {
            first_row = p.cu_seqlens_q[b];
            rows = p.cu_seqlens_q[b + 1] - first_row;
            if (rows <= p.skipped_rows) rows = 0;
            if (p.cu_seqlens_k == nullptr) return;
            first_key = p.cu_seqlens_k[b];
            keys = p.cu_seqlens_k[b + 1] - first_key;
        } else if (p.seqused_k != nullptr) {
            keys = min(max(p.seqused_k[b], 0), keys);
        }
    }

    // A row sees the keys [0, causal_end(row)): causality aligns to the bottom right corner.
    __device__ int causal_end(int row) const { return min(max(row + 1 + keys - rows, 0), keys); }
    // The rows [causal_begin(key), rows) see a key.
    __device__ int causal_begin(int key) const { return min(max(key - keys + rows, 0), rows); }
    // The number of keys that causality and the length leave to a row.
    __device__ int keys_of(int row, bool is_causal) const { return is_causal ? causal_end(row) : keys; }
};

// The head of a view with `view_heads` heads that query head `head` of `heads` uses.
__device__ __forceinline__ int shared_head(int head, int64_t heads, int64_t view_heads) {
    // The common cases need no division.
    if (view_heads == heads) return head;
    if (view_heads == 1) return 0;
    return head / (static_cast<int>(heads) / static_cast<int>(view_heads));
}

// A query head with its KV head. Views have H, Hkv or 1 heads: to find theirs needs no other division.
struct QueryHead {
    int index, kv_head;

    __device__ QueryHead(const AttentionParams& p, int head)
        : index(head), kv_head(shared_head(head, p.heads, p.kv_heads)) {}
};
__device__ __forceinline__ int shared_head(const QueryHead& head, int64_t heads, int64_t view_heads) {
    return view_heads == heads ? head.index : view_heads == 1 ? 0 : head.kv_head;
}

// The batch element of a mask, a bias or lists that a sequence uses.
template <typename View>
__device__ __forceinline__ int shared_batch(const View& view, const Sequence& s) {
    // The common cases need no division.
    if (view.batches == 1) return 0;
    if (view.batch_group_size == 1) return s.batch;
    return s.batch / static_cast<int>(view.batch_group_size);
}

// The offset of a sequence's first row (or key) in one head, in elements. Add row * row_stride.
__device__ __forceinline__ int64_t query_offset(const RowsView& view, const Sequence& s, int head) {
    return s.batch * view.batch_stride + s.first_row * view.row_stride + head * view.head_stride;
}
__device__ __forceinline__ int64_t key_offset(const RowsView& view, const Sequence& s, int head) {
    return s.batch * view.batch_stride + s.first_key * view.row_stride + head * view.head_stride;
}
// The sequence's first row (or key) in one head.
template <typename T>
__device__ __forceinline__ T* query_rows(const RowsView& view, const Sequence& s, int head) {
    return static_cast<T*>(view.data) + query_offset(view, s, head);
}
template <typename T>
__device__ __forceinline__ T* key_rows(const RowsView& view, const Sequence& s, int head) {
    return static_cast<T*>(view.data) + key_offset(view, s, head);
}
__device__ __forceinline__ int64_t stat_offset(const RowStatView& view, const Sequence& s, int head) {
    return s.batch * view.batch_stride + head * view.head_stride + s.first_row;
}
// The words of a packed mask for a sequence's first row and one head. Add row * bits_row_stride and the word.
__device__ __forceinline__ const uint32_t* mask_words(const AttentionParams& p, const Sequence& s, int head) {
    const PackedMask& mask = p.packed_mask;
    return mask.bits + shared_batch(mask, s) * mask.bits_batch_stride +
           shared_head(head, p.heads, mask.heads) * mask.bits_head_stride + s.first_row * mask.bits_row_stride;
}
// The offset of a sequence's first score in one head, in elements. Add row * row_stride + key * col_stride. With
// variable length the scores start at the first key where the view is per key, else at the first row. Head: int or
// QueryHead.
template <typename Head>
__device__ __forceinline__ int64_t score_offset(const ScoreView& view, const Sequence& s, const Head& head,
                                                int64_t heads) {
    return shared_batch(view, s) * view.batch_stride + shared_head(head, heads, view.heads) * view.head_stride +
           (view.per_key ? s.first_key * view.col_stride : s.first_row * view.row_stride);
}

}  // namespace flash_dmattn::cuda
