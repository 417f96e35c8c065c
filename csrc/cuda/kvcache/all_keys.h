// All keys of packed sequences, gathered from a cache without gaps, for chunks of prefill without a window.
#pragma once

#include <cuda_runtime.h>

#include "kvcache_params.h"

namespace flash_dmattn::cuda {

struct AllKeys {
    int64_t skipped_rows = 0;    // sequences of at most so many rows have no keys here
    int32_t* offsets = nullptr;  // [B + 1]: the first key of each sequence
    void* key = nullptr;         // [B * seqlen_k, Hkv, D], as value
    void* value = nullptr;
    void* bias = nullptr;  // [B * seqlen_k, Hkv] in the dtype of bias_cache; null without a bias_cache
};

// Whether the function below serves a call: packed, without a window.
bool can_gather_all_keys(const KvCacheParams& params);

// Also writes the new tokens into the cache, except those of sequences that all.skipped_rows excludes.
void gather_all_keys(const KvCacheParams& params, const AllKeys& all, cudaStream_t stream);

}  // namespace flash_dmattn::cuda
