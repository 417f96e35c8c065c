// Key lists for chunks of prefill with a window: the keys of the cache that each m_block of new rows selects, straight
// from their biases. The lists name rows of the cache, so that attention reads keys and values in place.
#pragma once

#include <cuda_runtime.h>

#include "kvcache_params.h"

namespace flash_dmattn::cuda {

// The lists, without causality: row bits have it. List t is that of KeyListsView, but its keys are numbers of rows of
// the cache, of which a page or batch element takes rows_per_page. Only m_blocks with rows of sequences that are not
// skipped have a list.
struct PrefillLists {
    int64_t num_m_blocks = 0;   // of a sequence
    int64_t stride = 0;         // keys that a list has room for
    int64_t capacity = 0;       // keys that all lists have room for
    int64_t rows_per_page = 0;  // of k_cache and of v_cache
    int64_t cache_rows = 0;     // rows of the cache
    int64_t bias_stride = 0;    // biases of a sequence and KV head in all_biases
    int64_t skipped_rows = 0;   // sequences of at most so many rows are left out

    // [B, Hkv, bias_stride], in the dtype of bias_cache: scratch where they cannot be read eight at a time in the cache,
    // else null
    void* all_biases = nullptr;
    int32_t* keys = nullptr;    // [capacity]
    int64_t* begins = nullptr;  // [B, Hkv, num_m_blocks]
    int64_t* ends = nullptr;    // the same
    uint32_t* rows = nullptr;   // [capacity, 4]
    void* biases = nullptr;     // [capacity], in the dtype of bias_cache
};

// The sizes; rows_per_page is 0 where list_prefill_keys does not serve the call.
PrefillLists plan_prefill_lists(const KvCacheParams& params);
// Also writes the new tokens into the cache, except those of skipped sequences.
void list_prefill_keys(const KvCacheParams& params, const PrefillLists& lists, cudaStream_t stream);
// Attention of the new rows to the listed rows of the cache.
FwdParams attention_to_lists(const KvCacheParams& params, const PrefillLists& lists);

}  // namespace flash_dmattn::cuda
