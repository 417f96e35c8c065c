// What the kernels that read a cache of keys share: their arguments, and which calls they can read.
#pragma once

#include <climits>

#include "cuda/common/basics.cuh"
#include "kvcache_params.h"

namespace flash_dmattn::cuda {

// A kernel parameter: compiled kernels depend on the order of the members, here and in kvcache_params.h.
struct KvCacheArgs : KvCacheParams {
    FastDivmod keys_per_page;  // page_size; more than any sequence's keys where the cache is contiguous

    KvCacheArgs() = default;
    explicit KvCacheArgs(const KvCacheParams& params)
        : KvCacheParams(params), keys_per_page(params.page_size > 0 ? params.page_size : INT_MAX / 2) {}
};

// Whether rows can be read by 16-byte vectors of 16-bit elements.
inline bool is_aligned(const RowsView& view) {
    return reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && view.batch_stride % 8 == 0 && view.row_stride % 8 == 0 &&
           view.head_stride % 8 == 0;
}

// Whether KvCache (cache.cuh) can read the cache and the new tokens.
inline bool can_read_cache(const KvCacheParams& p) {
    const auto fits = [](int64_t x) { return x < INT_MAX / 2; };
    return p.dtype != DataType::kFloat32 && p.dtype != DataType::kFloat64 && p.head_dim % 8 == 0 && fits(p.seqlen_k) &&
           fits(p.cache_batch) && fits(p.total_q * (p.head_dim / 8)) && is_aligned(p.k_cache) &&
           is_aligned(p.v_cache) && is_aligned(p.key) && is_aligned(p.value) &&
           (!p.bias_cache.present() || p.bias_cache.dtype == DataType::kFloat32 || p.bias_cache.dtype == p.dtype) &&
           (!p.bias.present() || p.bias.dtype == p.bias_cache.dtype);
}

constexpr int kVectorBiases = 8;  // neighbouring biases that a thread reads at once
// Whether so many biases of a page or batch element, from a multiple of that on, are adjacent and aligned.
inline bool has_vector_bias(const KvCacheParams& p) {
    const KeyBiasView& bias = p.bias_cache;
    const int64_t vector = bias.dtype == DataType::kFloat32 ? 4 : 8;
    return bias.row_stride == 1 && reinterpret_cast<uintptr_t>(bias.data) % 16 == 0 &&
           bias.batch_stride % vector == 0 && bias.head_stride % vector == 0 && p.page_size % kVectorBiases == 0;
}

// Whether kernels can gather keys from the cache: it can be read, and a CTA for each sequence and KV head fits a grid.
inline bool can_gather(const KvCacheParams& p) {
    constexpr int64_t kMaxGrid = 65535;  // CTAs along y
    return can_read_cache(p) && p.batch > 0 && p.total_q > 0 && p.cache_batch > 0 && p.kv_heads > 0 &&
           p.batch * p.kv_heads < kMaxGrid;
}

// Whether rows of such a call select keys by their biases: with a window below the capacity of a sequence, and with
// batch_invariant any, so that bits do not depend on the capacity. A relative bias needs every key at its position.
inline bool selects_keys(const KvCacheParams& p) {
    return can_gather(p) && p.window_size > 0 && p.seqlen_k > 0 && (p.window_size < p.seqlen_k || p.batch_invariant) &&
           p.bias_cache.present() && !p.relative_bias.present();
}

}  // namespace flash_dmattn::cuda
