// Lists of keys: what depends on the mask alone.
#pragma once

#include <tuple>

#include "inputs.h"

namespace flash_dmattn {

// (keys, spans, rows) of the lists of a mask's keys, in the forms of MaskTensors; rows is empty but for a bool mask whose
// rows differ.
// keys_per_row: of intervals, a bound: no n rows that follow each other see more than keys_per_row + n - 1 keys. Without
//     one the lists' total length is read back from the device. A bound that is too small is an error on the CPU;
//     elsewhere, where looking would make the device wait, it cuts lists short.
// limit: without a bound, the total length beyond which the lists are of no use: they then come back empty.
std::tuple<Tensor, Tensor, Tensor> build_key_lists(const OptionalTensor& mask, const OptionalTensor& intervals,
                                                   int64_t seqlen_q, int64_t seqlen_k, bool is_causal,
                                                   const OptionalTensor& cu_seqlens_q,
                                                   const OptionalTensor& cu_seqlens_k, std::optional<int64_t> keys_per_row,
                                                   std::optional<int64_t> limit);

}  // namespace flash_dmattn
