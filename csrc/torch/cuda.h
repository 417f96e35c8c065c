// What the operators have done on CUDA, and what they do there alone. cuda.cpp has it; where the CUDA kernels are not
// built no_cuda.cpp says so in its place.
#pragma once

#include <tuple>

#include "inputs.h"

namespace flash_dmattn {

// The params point to the inputs and outputs.
void forward_cuda(FwdParams& params, const Inputs& inputs);
void backward_cuda(BwdParams& params, const Inputs& inputs);

// The two tensors that hold a packed mask: bits int32 in the shape of the mask, 32 keys a word, and of every tile of
// 64 x 64 pairs nine bytes, uint8 (9, {B|B/n|1}, heads, row tiles, key tiles): its columns, and last its kind.
std::tuple<Tensor, Tensor> pack_mask(const Tensor& mask, int64_t seqlen_q, int64_t seqlen_k, bool is_causal,
                                     const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k);

// The same of fixed length, and the mask's lists (keys, spans, rows) in the forms of MaskTensors, where these are short: where
// they hold at most half of all keys, and at most `percent` of those in tiles that are not empty. Else their spans are -1.
// Nothing is read back: the operators take both forms together, and the device goes by the lists where there are any, else by
// tiles.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> pack_and_list_mask(const Tensor& mask, int64_t seqlen_q,
                                                                      int64_t seqlen_k, bool is_causal,
                                                                      int64_t percent);

// build_key_lists (lists.h) on CUDA: of intervals with a bound, and of any mask. `source`: what params were made of.
std::tuple<Tensor, Tensor, Tensor> build_bounded_lists(const AttentionParams& params, const Tensor& source,
                                                       int64_t keys_per_row);
std::tuple<Tensor, Tensor, Tensor> build_counted_lists(AttentionParams params, const Tensor& source);

// index_key_lists on CUDA, as index_lists_cpu (cpu/index_lists.h).
void build_index_lists(const IndexListsParams& params, const IndexListsPlan& plan, const Tensor& indices, int32_t* keys,
                       int64_t* begins, int64_t* ends, uint32_t* rows);

// Selection: from a bias of one number a key to the keys of the causal dynamic mask (KeyIntervalMask.topk).
// bias ({B|1}, {H|Hkv|1}, Sk) to intervals int32 (2, {B|1}, {H|Hkv|1}, Sk); of variable length (total_k, heads) to
// (2, total_k, heads). longest: of variable length, a bound on the keys of a sequence, where one is known.
Tensor topk_intervals(const Tensor& bias, int64_t window_size, int64_t seqlen_q, const OptionalTensor& cu_seqlens_q,
                      const OptionalTensor& cu_seqlens_k, std::optional<int64_t> longest);
// For at most 16 rows, straight to lists (keys, spans, rows) in the forms of MaskTensors; rows is empty for one row.
// seqlens_k: int32 (B), keys beyond are neither chosen nor read.
std::tuple<Tensor, Tensor, Tensor> topk_lists(const Tensor& bias, int64_t window_size, int64_t seqlen_q,
                                              const OptionalTensor& seqlens_k);

}  // namespace flash_dmattn
