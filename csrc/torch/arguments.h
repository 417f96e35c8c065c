// The list of the operators' arguments. The struct Inputs, the schemas (library.cpp), the signatures and calls
// (operators.h) and autograd's saved values (autograd.cpp) are generated from it. flash_dmattn/ops/schema.py repeats
// it.
#pragma once

#include <c10/core/SymInt.h>

#include "tensors.h"

namespace flash_dmattn {

using OptionalSymInt = std::optional<c10::SymInt>;

// X(schema type, C++ type, name), in the schema's order.
//   query                (B, Sq, H, D), or of variable length (total_q, H, D)
//   key, value           (B, Sk, Hkv, D), or (total_k, Hkv, D)
//   bias                 ({B|B/n|1}, {H|Hkv|1}, {Sq|1}, Sk), or (total_k, heads), or (total_q, heads, max_seqlen_k)
//   relative_bias        ({B|1}, {H|Hkv|1}, 2 R + 1), or a grid of h x w tokens ({B|1}, {H|Hkv|1}, 2 h - 1, 2 w - 1);
//                        float32, or float64 beside a float64 query (RelativeBiasView in params.h)
//   mask                 bool in the bias's shapes. On CUDA the bits that pack_mask made: int32, 32 keys per word
//   mask_summaries       on CUDA, beside mask: uint8, nine bytes for each block of 64 x 64 scores
//   intervals            int32 (2, {B|1}, {H|Hkv|1}, Sk), starts and ends, or (2, total_k, heads)
//   kv_indices           int32 (capacity), the keys of all lists, padded with -1 (KeyListsView in params.h)
//   kv_indptr            int64 (2, {B|B/n|1}, {H|Hkv|1}, m_blocks), where each list begins and ends in kv_indices
//   kv_row_bits          int32 (capacity, 4), a bit for each of the 128 rows of a list. (0, 4) or (0, 2) where each of
//                        the 128 or 64 rows of a list sees all its keys
//   cu_seqlens_*, max_*  all of them for variable length, or none; cu_seqlens int32 (B + 1)
//   seqused_k            int32 (B), the number of keys of each batch element, of fixed length and without gradients
//
// At most one of mask and intervals is given. Lists come alone, with intervals that show which rows see a listed key,
// or with a packed mask (pack_and_list_mask), where the device chooses between the two.
#define FLASH_DMATTN_ARGUMENTS(X)                \
    X("Tensor", Tensor, query)                   \
    X("Tensor", Tensor, key)                     \
    X("Tensor", Tensor, value)                   \
    X("Tensor?", OptionalTensor, bias)           \
    X("Tensor?", OptionalTensor, relative_bias)  \
    X("Tensor?", OptionalTensor, mask)           \
    X("Tensor?", OptionalTensor, mask_summaries) \
    X("Tensor?", OptionalTensor, intervals)      \
    X("Tensor?", OptionalTensor, kv_indices)     \
    X("Tensor?", OptionalTensor, kv_indptr)      \
    X("Tensor?", OptionalTensor, kv_row_bits)    \
    X("Tensor?", OptionalTensor, cu_seqlens_q)   \
    X("Tensor?", OptionalTensor, cu_seqlens_k)   \
    X("SymInt?", OptionalSymInt, max_seqlen_q)   \
    X("SymInt?", OptionalSymInt, max_seqlen_k)   \
    X("Tensor?", OptionalTensor, seqused_k)      \
    X("float", double, softmax_scale)            \
    X("float", double, softcap)                  \
    X("bool", bool, is_causal)                   \
    X("bool", bool, deterministic)

struct Inputs {
#define FLASH_DMATTN_FIELD(schema, type, name) type name;
    FLASH_DMATTN_ARGUMENTS(FLASH_DMATTN_FIELD)
#undef FLASH_DMATTN_FIELD

    bool is_varlen() const { return cu_seqlens_q.has_value(); }
};

// Calls `visit` with each field, in order. `inputs` is an Inputs or a const Inputs.
template <typename SomeInputs, typename Visit>
void for_each_field(SomeInputs& inputs, const Visit& visit) {
#define FLASH_DMATTN_VISIT(schema, type, name) visit(inputs.name);
    FLASH_DMATTN_ARGUMENTS(FLASH_DMATTN_VISIT)
#undef FLASH_DMATTN_VISIT
}

// Calls `function` with all fields as arguments, in order.
template <typename Function>
auto apply_fields(const Inputs& inputs, const Function& function) {
    const auto call = [&](std::nullptr_t, const auto&... fields) { return function(fields...); };
#define FLASH_DMATTN_PASS(schema, type, name) , inputs.name
    return call(nullptr FLASH_DMATTN_ARGUMENTS(FLASH_DMATTN_PASS));
#undef FLASH_DMATTN_PASS
}

}  // namespace flash_dmattn
