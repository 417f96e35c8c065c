// The CUDA side of the operators: cuda_backend.cpp. In a build without CUDA kernels no_cuda.cpp raises errors instead.
#pragma once

#include <optional>
#include <tuple>

#include "inputs.h"
#include "kvcache_params.h"
#include "select_params.h"

namespace flash_dmattn {

// Run the kernels. `params` holds the inputs and outputs.
void forward_cuda(FwdParams& params, const Inputs& inputs);
void backward_cuda(BwdParams& params, const Inputs& inputs);

// Attention over a cache of keys (kvcache.h). Returns false, and launches nothing, where no kernel serves the call.
// skips_longer: serves the sequences of few query rows, and leaves the out and lse of the others alone. `like`: a
// tensor on the device.
bool decode_kvcache_cuda(const KvCacheParams& params, const Tensor& like, bool skips_longer);

// Keys that were gathered from a cache.
struct GatheredCache {
    Tensor key, value;            // (B, max_keys, Hkv, D), packed (total_k, Hkv, D)
    OptionalTensor bias;          // (B, Hkv, 1, max_keys), packed (total_k, Hkv)
    OptionalTensor cu_seqlens_k;  // packed: int32 (B + 1)
    int64_t max_keys;             // of a sequence
    // Packed: sequences of at most so many rows have no keys here. decode_kvcache_cuda serves them, and writes their
    // new tokens.
    int64_t skipped_rows;
};
// Write the new tokens into the cache, except those of skipped sequences, and gather: with a window the keys that the
// rows may see, aligned to the end of each sequence; without a window, packed, all keys. Where no kernel serves the
// call they do nothing and return nothing. `like`: the cache of keys; `bias_like`: that of biases.
std::optional<GatheredCache> gather_best_keys_cuda(const KvCacheParams& params, const Tensor& like,
                                                   const Tensor& bias_like);
std::optional<GatheredCache> gather_all_keys_cuda(const KvCacheParams& params, const Tensor& like,
                                                  const OptionalTensor& bias_like);
// With a window: writes the new tokens into the cache, except those of skipped sequences, lists the keys that the rows
// select, and attends to them in place (params.out, params.lse). Returns skipped_rows, as in GatheredCache. Where no
// kernel serves the call it does nothing and returns nothing. `bias_like`: the cache of biases.
std::optional<int64_t> attend_in_cache_cuda(const KvCacheParams& params, const Tensor& query, const Tensor& bias_like);

// A packed mask: bits int32 in the mask's shape, 32 keys per word; and nine bytes for each block of 64 x 64 scores,
// uint8 (9, {B|B/n|1}, heads, m_blocks, n_blocks): eight of visible keys, then the block's kind.
std::tuple<Tensor, Tensor> pack_mask(const Tensor& mask, int64_t seqlen_q, int64_t seqlen_k, bool is_causal,
                                     const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k);

// For fixed length: the packed mask and its lists (kv_indices, kv_indptr, kv_row_bits), if these are short: at most
// half of all keys, and at most `percent` of the keys in blocks that are not empty. Otherwise kv_indptr is -1. Reads
// nothing back: the operators take both forms, and the device uses the lists if there are any, else the packed mask.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> pack_and_list_mask(const Tensor& mask, int64_t seqlen_q,
                                                                      int64_t seqlen_k, bool is_causal,
                                                                      int64_t percent);

// build_key_lists (lists.h) on CUDA: for intervals with a bound, and for any mask. `source`: the mask or the intervals.
std::tuple<Tensor, Tensor, Tensor> build_bounded_lists(const AttentionParams& params, const Tensor& source,
                                                       int64_t keys_per_row);
std::tuple<Tensor, Tensor, Tensor> build_counted_lists(AttentionParams params, const Tensor& source);

// index_key_lists on CUDA, as index_lists_cpu (cpu/index_lists.h).
void build_index_lists(const IndexListsParams& params, const IndexListsPlan& plan, const Tensor& indices, int32_t* keys,
                       int64_t* begins, int64_t* ends, uint32_t* rows);

// Top-k selection (KeyIntervalMask.topk): from a key bias ({B|1}, {H|Hkv|1}, Sk) to intervals int32
// (2, {B|1}, {H|Hkv|1}, Sk); for variable length from (total_k, heads) to (2, total_k, heads). max_keys: an optional
// bound on the keys of a sequence, for variable length.
Tensor topk_intervals(const Tensor& bias, int64_t window_size, int64_t seqlen_q, const OptionalTensor& cu_seqlens_q,
                      const OptionalTensor& cu_seqlens_k, std::optional<int64_t> max_keys);
// topk_lists (topk.h) on CUDA, as topk_lists_cpu (cpu/topk_lists.h).
void select_key_lists(const SelectParams& params, const SelectedListsPlan& plan, const Tensor& bias, int32_t* keys,
                      int64_t* begins, int64_t* ends, uint32_t* rows);

}  // namespace flash_dmattn
