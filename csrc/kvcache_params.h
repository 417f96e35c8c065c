// Attention of new query rows over a cache of keys, values and biases, contiguous or in pages, as a plain struct that the
// PyTorch boundary and the CUDA kernels share, without torch. No gradients.
//
// Shapes: B sequences, H query heads, Hkv key/value heads, D head dimension. A sequence has cache_seqlens[b] keys in the
// cache, its new rows, and, where `key` is present, one new key for each new row, which the kernels write into the cache
// behind the others. No other sequence of the call may have such a place among its keys. The last row stands at the last
// key, the one before it at the key before.
#pragma once

#include <cstdint>

#include "params.h"

namespace flash_dmattn {

// One bias for each key and key/value head.
struct KeyBiasView {
    void* data = nullptr;      // [B, S, Hkv] or [pages, page_size, Hkv]; packed [total_q, Hkv]
    int64_t batch_stride = 0;  // of a page, where the cache has pages; 0 where packed
    int64_t row_stride = 0;
    int64_t head_stride = 0;
    DataType dtype = DataType::kFloat32;  // float32, or the cache's

    bool present() const { return data != nullptr; }
};

struct KvCacheParams {
    int64_t batch = 0;     // B
    int64_t heads = 0;     // H
    int64_t kv_heads = 0;  // Hkv
    int64_t head_dim = 0;  // D, of keys and values
    int64_t seqlen_q = 0;  // new rows of a sequence; packed: the most of any
    int64_t total_q = 0;   // new rows of all sequences
    int64_t seqlen_k = 0;  // the most keys that a sequence has room for: of a batch element, or of its pages
    const int32_t* cu_seqlens_q = nullptr;  // [B + 1]; null where each sequence has seqlen_q rows

    int64_t cache_batch = 0;  // pages of the cache, or batch elements of a contiguous one
    int64_t page_size = 0;    // keys of a page, 0: contiguous
    // [B, pages of a sequence], row-contiguous: page j holds the keys [j * page_size, (j + 1) * page_size). Entries
    // beyond a sequence's keys may have any value.
    const int32_t* block_table = nullptr;
    int64_t block_table_stride = 0;
    const int32_t* cache_batch_idx = nullptr;  // [B], contiguous cache: the batch element of a sequence; null: its own
    const int32_t* cache_seqlens = nullptr;    // [B]: keys in the cache, without the new ones; null: seqlen_k

    DataType dtype = DataType::kFloat32;  // of query, keys, values and out
    double softmax_scale = 1.0;
    double softcap = 0.0;  // 0: none
    bool is_causal = true;
    int64_t window_size = 0;       // w: a row sees the w keys of largest bias among its causal ones; 0: all of them
    bool batch_invariant = false;  // the bits of a sequence's output depend on that sequence alone

    RowsView query;    // [B, Sq, H, D]; packed [total_q, H, D]
    RowsView k_cache;  // [cache_batch, seqlen_k or page_size, Hkv, D]
    RowsView v_cache;
    RowsView key;  // [B, Sq, Hkv, D]; packed [total_q, Hkv, D]; absent: nothing is appended
    RowsView value;
    KeyBiasView bias_cache;  // absent: none
    KeyBiasView bias;        // of the new keys; present where bias_cache and key are
    RowsView out;            // [B, Sq, H, D]; packed [total_q, H, D]
    RowStatView lse;         // [B, H, Sq]; packed [H, total_q]; without sinks

    RelativeBiasView relative_bias;  // one dimension
    const float* sinks = nullptr;    // [H] or [1], by sinks_stride; null: none
    int64_t sinks_stride = 0;        // 0: one for all heads
};

}  // namespace flash_dmattn
