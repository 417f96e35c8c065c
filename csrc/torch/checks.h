// Checks of tensors, before anything is launched. Each error names the argument, what it accepts and what it got:
// ValueError for shapes and values, TypeError for dtypes, RuntimeError for devices. Sizes may be symbolic. Values are
// checked on the CPU.
#pragma once

#include "tensors.h"

namespace flash_dmattn {

// Sequences of variable length; absent for fixed length.
struct Varlen {
    Tensor cu_seqlens_q, cu_seqlens_k;  // int32 (B + 1)
    int64_t max_seqlen_q, max_seqlen_k;
};
using OptionalVarlen = std::optional<Varlen>;

// query, key and value of fixed or variable length. The value may have its own head dimension.
void check_rows(const Tensor& query, const Tensor& key, const Tensor& value, bool varlen);
// Whether the compiled kernels of query's device accept its dtype. Other backends have their own checks.
void check_kernels(const Tensor& query);
// One tensor of rows, with a `layout` such as "(B, Sq, H, D)".
void check_rows_of(const char* name, const Tensor& tensor, const char* layout);
void check_head_dim(const char* name, const Tensor& tensor);
// The dtype, device and heads of `tensor` against query's; the last two dimensions are heads and D.
void check_matches_query(const char* name, const Tensor& tensor, const Tensor& query, bool same_dtype);
void check_same_head_dim(const char* name, const Tensor& tensor, const Tensor& query);
void check_batch(const char* name, const Tensor& tensor, const Tensor& query);

// Masks and biases; the rows have been checked. max_seqlen_k: for variable length.
void check_mask(const Tensor& mask, const Tensor& query, const Tensor& key, std::optional<int64_t> max_seqlen_k);
// What pack_mask made of a mask for `batch` batch elements or sequences. cuda_backend.cpp checks the lengths.
void check_packed_mask(const Tensor& bits, const Tensor& summaries, const Tensor& query, const Tensor& key,
                       int64_t batch, bool varlen);
void check_intervals(const Tensor& intervals, const Tensor& query, const Tensor& key, bool varlen);
void check_bias(const Tensor& bias, const Tensor& query, const Tensor& key, std::optional<int64_t> max_seqlen_k);
// What to pass instead of a relative bias (2R + 1) or (H, 2R + 1); empty for other shapes, and where H could be B.
std::string missing_table_dimensions_hint(const Tensor& table, const Tensor& query, const Tensor& key,
                                          const c10::SymInt& batch);
// A relative bias of one dimension or of a grid, in float32 or query's dtype. `batch`: the batch elements or sequences.
void check_relative_bias(const Tensor& bias, const Tensor& query, const Tensor& key, const c10::SymInt& batch);
// Sq, Sk or a bound on them: the kernels count rows and keys in 32 bits.
void check_length(const char* name, int64_t length);
// The number of valid keys of each batch element, for fixed length.
void check_seqused_k(const Tensor& seqused_k, const Tensor& query, const Tensor& key);

// The offsets of sequences.
struct CuSeqlens {
    const char* name;
    const Tensor& tensor;
    const Tensor* reference = nullptr;  // a tensor on the required device
    const char* whose = "";
    std::optional<int64_t> total;  // rows or keys of all sequences, where known
    const char* counted = "";      // what they are, such as "the rows of query"
    bool or_less = false;          // the last sequence may end before them
    const char* longest_name = "";
    std::optional<int64_t> longest;  // an optional bound on the length of a sequence
};
void check_cu_seqlens(const CuSeqlens& given);
// Whether a tensor has no values of its own: fake tensors of a traced graph, and wrappers of torch.func.
bool is_stand_in(const Tensor& tensor);
// Whether values may be read: on the CPU, and on CUDA with FLASH_DMATTN_CHECK=1.
bool is_host_readable(const Tensor& tensor);
// Called before check_cu_seqlens, which would report the shorter one as ending early.
void check_same_sequences(const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k);
void check_varlen(const Varlen& varlen, const Tensor& query, const Tensor& key);

}  // namespace flash_dmattn
