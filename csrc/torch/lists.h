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
                                                   const OptionalTensor& cu_seqlens_k,
                                                   std::optional<int64_t> keys_per_row, std::optional<int64_t> limit);

// The same of what an indexer has chosen: places of keys, int32 ({B|B/n|1}, {H|Hkv|1}, rows, k), a row of them for each
// `tile_rows` query rows; of variable length (total_q, {H|Hkv|1}, k) too, where tile_rows is 1. Counted from the sequence's
// first key, -1 for none. rows is empty where every row of a list sees all of its keys (see MaskTensors); `intervals`, where
// they are given, must then be given to the attention too, else they have been heeded. Nothing is read back from the
// device: indices out of range are an error on the CPU and none elsewhere, but with FLASH_DMATTN_CHECK=1.
std::tuple<Tensor, Tensor, Tensor> index_key_lists(const Tensor& indices, const OptionalTensor& intervals,
                                                   int64_t tile_rows, int64_t seqlen_q, int64_t seqlen_k,
                                                   bool is_causal, const OptionalTensor& cu_seqlens_q,
                                                   const OptionalTensor& cu_seqlens_k);

}  // namespace flash_dmattn
