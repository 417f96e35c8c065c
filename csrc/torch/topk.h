// Top-k selection from a key bias: the inputs on all devices, and the operator that selects key lists.
#pragma once

#include <tuple>

#include "select_params.h"
#include "tensors.h"

namespace flash_dmattn {

// bias: ({B|1}, {H|Hkv|1}, Sk) or ({B|1}, {H|Hkv|1}, 1, Sk); for variable length (total_k, {H|Hkv|1}).
SelectParams select_params(const Tensor& bias, int64_t window_size, int64_t seqlen_q);

// For fixed length and at most 16 rows: (kv_indices, kv_indptr, kv_row_bits); kv_row_bits is empty for one row.
// seqused_k: int32 (B); keys beyond are neither selected nor read.
std::tuple<Tensor, Tensor, Tensor> topk_lists(const Tensor& bias, int64_t window_size, int64_t seqlen_q,
                                              const OptionalTensor& seqused_k);

// On the CPU: bool (rows, Sk), for each row of a bias (rows, Sk) its `window_size` best keys among the candidates, bool
// (rows, Sk), none of which has a bias that is NaN.
Tensor topk_mask(const Tensor& bias, const Tensor& candidates, int64_t window_size);

// Raises where a bias on the CPU is NaN, of the keys that topk_lists would read. On CUDA the kernels assert instead.
void refuse_nan(const Tensor& bias, const OptionalTensor& seqused_k);

}  // namespace flash_dmattn
