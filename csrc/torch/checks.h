// What is accepted. Every function here raises before anything is launched, and names the argument, what came and what
// is accepted: ValueError speaks of shapes and values, TypeError of dtypes, RuntimeError of devices. Sizes may be
// symbolic; values are looked at where that is free: on the CPU.
#pragma once

#include "tensors.h"

namespace flash_dmattn {

// Sequences of variable length; absent where the length is fixed.
struct Varlen {
    Tensor cu_seqlens_q, cu_seqlens_k;  // int32 (B + 1)
    int64_t max_seqlen_q, max_seqlen_k;
};
using OptionalVarlen = std::optional<Varlen>;

// query, key and value of fixed or variable length, whatever they are to be masked and biased by.
void check_rows(const Tensor& query, const Tensor& key, const Tensor& value, bool varlen);
// Whether the kernels of query's device take its dtype: other backends may, where these do not.
void check_kernels(const Tensor& query);
// A tensor of rows alone: `layout` such as "(B, Sq, H, D)".
void check_rows_of(const char* name, const Tensor& tensor, const char* layout);
void check_head_dim(const char* name, const Tensor& tensor);
// What `tensor` must have in common with query; the head count and the head dimension stand last.
void check_beside_query(const char* name, const Tensor& tensor, const Tensor& query, bool same_dtype);
void check_batch(const char* name, const Tensor& tensor, const Tensor& query);

// Masks and biases beside rows that have been checked. max_seqlen_k: of variable length.
void check_mask(const Tensor& mask, const Tensor& query, const Tensor& key, std::optional<int64_t> max_seqlen_k);
void check_intervals(const Tensor& intervals, const Tensor& query, const Tensor& key, bool varlen);
void check_bias(const Tensor& bias, const Tensor& query, const Tensor& key, std::optional<int64_t> max_seqlen_k);
// How many keys of each batch element there are, of fixed length.
void check_seqlens_k(const Tensor& seqlens_k, const Tensor& query, const Tensor& key);

// Where sequences begin and end.
struct CuSeqlens {
    const char* name;
    const Tensor& tensor;
    const Tensor* beside = nullptr;  // must be on the same device
    const char* whose = "";
    std::optional<int64_t> total;  // rows or keys of all sequences, where known
    bool or_less = false;          // the last sequence may end before them
    const char* longest_name = "";
    std::optional<int64_t> longest;  // a bound on the length of a sequence, where there is one
};
void check_cu_seqlens(const CuSeqlens& given);
// Whether looking at the values of lengths and the like is free: on the CPU, or with FLASH_DMATTN_CHECK=1, where they are
// read back. A tensor that stands for another, while a graph is traced or a transform of torch.func is active, has none.
bool values_at_hand(const Tensor& tensor);
void check_same_sequences(const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k);
void check_varlen(const Varlen& varlen, const Tensor& query, const Tensor& key);

}  // namespace flash_dmattn
