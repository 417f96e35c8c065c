// The keys that chunks of prefill with a window may see, gathered from a cache where prefill_lists.h does not serve the
// call: of each sequence and KV head the best keys before the new rows, which include every earlier key that any of these
// rows selects, and the new rows' keys.
//
// A sequence has max_selected + (its new rows) positions, in the cache's order and aligned to the end: first the best
// keys, at last the new rows'. Positions without a key have zeros and a bias of -inf. Packed, sequence b starts at
// cu_seqlens_q[b] + b * max_selected.
#pragma once

#include <cuda_runtime.h>

#include "kvcache_params.h"

namespace flash_dmattn::cuda {

struct BestKeys {
    int64_t max_selected = 0;  // of a sequence and KV head: the smaller of window_size and seqlen_k
    int64_t total = 0;         // positions of all sequences; packed: at least
    int64_t skipped_rows = 0;  // sequences of at most so many rows get biases of -inf alone
    // Key lists of one row each, [B, Hkv], as topk_lists selects them from `biases` and `prefix`.
    const int32_t* lists = nullptr;
    const int64_t* begins = nullptr;
    const int64_t* ends = nullptr;
    void* key = nullptr;    // [total, Hkv, D]
    void* value = nullptr;  // [total, Hkv, D]
    void* bias = nullptr;   // [B, Hkv, total / B]; packed [total, Hkv]; in the dtype of bias_cache
};

// Whether the functions below serve a call.
bool can_gather_best_keys(const KvCacheParams& params);

// The number of keys before the new rows, `prefix` [B], and their biases, `biases` [B, Hkv, seqlen_k] in the dtype of
// bias_cache; packed also the starts of the sequences, `offsets` [B + 1].
void read_biases(const KvCacheParams& params, int64_t max_selected, void* biases, int32_t* prefix, int32_t* offsets,
                 cudaStream_t stream);
// Also writes the new tokens into the cache, except those of sequences that best.skipped_rows excludes.
void gather_best_keys(const KvCacheParams& params, const BestKeys& best, cudaStream_t stream);

}  // namespace flash_dmattn::cuda
