// Builders of key lists, which depend on the mask only.
#pragma once

#include <tuple>

#include "inputs.h"

namespace flash_dmattn {

// The memory of key lists, for the kernels that fill it.
struct KeyListTensors {
    Tensor kv_indices, kv_indptr, kv_row_bits;
    int64_t* begins() const { return kv_indptr.data_ptr<int64_t>(); }
    int64_t* ends() const { return begins() + kv_indptr.stride(0); }
    uint32_t* row_words() const {  // null without row bits
        return kv_row_bits.numel() > 0 ? reinterpret_cast<uint32_t*>(kv_row_bits.data_ptr<int32_t>()) : nullptr;
    }
    std::tuple<Tensor, Tensor, Tensor> tensors() const { return {kv_indices, kv_indptr, kv_row_bits}; }
};
// On the device of `like`.
KeyListTensors empty_key_lists(const Tensor& like, int64_t capacity, int64_t batches, int64_t heads,
                               int64_t num_m_blocks, bool has_rows, int64_t m_block_rows = KeyListsView::kRows);

// (kv_indices, kv_indptr, kv_row_bits) of a mask's lists. kv_row_bits is empty except for a bool mask whose rows
// differ.
//
// keys_per_row: for intervals, a bound: no n consecutive rows see more than keys_per_row + n - 1 keys. Without it the
//     total length of the lists is read back from the device. Too small a bound is an error on the CPU; on CUDA it
//     truncates the lists.
// limit: on the CPU, without keys_per_row: the total length beyond which empty lists are returned.
std::tuple<Tensor, Tensor, Tensor> build_key_lists(const OptionalTensor& mask, const OptionalTensor& intervals,
                                                   int64_t seqlen_q, int64_t seqlen_k, bool is_causal,
                                                   const OptionalTensor& cu_seqlens_q,
                                                   const OptionalTensor& cu_seqlens_k,
                                                   std::optional<int64_t> keys_per_row, std::optional<int64_t> limit);

// The lists of an indexer's keys: positions from the sequence's first key, int32 ({B|B/n|1}, {H|Hkv|1}, rows, k), one
// row for each `tile_rows` query rows, -1 for none; for variable length also (total_q, {H|Hkv|1}, k), with tile_rows 1.
// kv_row_bits is empty where every row of a list sees all its keys: attention then needs the `intervals` too. Otherwise
// the bits include them. Reads nothing back: an index out of range is an error on the CPU, and on CUDA with
// FLASH_DMATTN_CHECK=1.
std::tuple<Tensor, Tensor, Tensor> index_key_lists(const Tensor& indices, const OptionalTensor& intervals,
                                                   int64_t tile_rows, int64_t seqlen_q, int64_t seqlen_k,
                                                   bool is_causal, const OptionalTensor& cu_seqlens_q,
                                                   const OptionalTensor& cu_seqlens_k);

}  // namespace flash_dmattn
