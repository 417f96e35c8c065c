// Key lists for chunks of prefill with a window: the keys of the cache that each m_block of new rows selects, straight
// from their biases. The lists name rows of the cache, so that attention reads keys and values in place.
#pragma once

#include <cuda_runtime.h>

#include "kvcache_params.h"

namespace flash_dmattn::cuda {

// Rows of K, and of V, as numbers: page (or batch element) * page_step + row * row_step, in units of a stride that is
// their own.
struct CacheRows {
    int64_t page_step = 0, row_step = 0;
    int64_t count = 0;  // above all numbers

    bool exist() const { return row_step > 0; }
};

// List t is that of KeyListsView, but its entries are numbers of rows of the cache. Causality is in the row bits. Only
// m_blocks with rows of sequences that are not skipped have a list.
struct PrefillLists {
    CacheRows cache_rows;
    int64_t num_m_blocks = 0;      // of a sequence
    int64_t stride = 0;            // keys that a list has room for
    int64_t capacity = 0;          // keys that all lists have room for
    int64_t bias_copy_stride = 0;  // biases of a sequence and KV head in bias_copy
    int64_t skipped_rows = 0;      // sequences of at most so many rows are left out

    // [B, Hkv, bias_copy_stride], in the dtype of bias_cache: scratch for a copy where the biases cannot be read eight at
    // a time in the cache; else null
    void* bias_copy = nullptr;
    int32_t* keys = nullptr;    // [capacity]
    int64_t* begins = nullptr;  // [B, Hkv, num_m_blocks]
    int64_t* ends = nullptr;    // the same
    uint32_t* rows = nullptr;   // [capacity, 4]
    void* biases = nullptr;     // [capacity], in the dtype of bias_cache

    bool serves() const { return cache_rows.exist(); }
};

// The sizes, where list_prefill_keys serves the call.
PrefillLists plan_prefill_lists(const KvCacheParams& params);
// Also writes the new tokens into the cache, except those of skipped sequences.
void list_prefill_keys(const KvCacheParams& params, const PrefillLists& lists, cudaStream_t stream);
// Attention of the new rows to the listed rows of the cache.
FwdParams attention_to_lists(const KvCacheParams& params, const PrefillLists& lists);

}  // namespace flash_dmattn::cuda
