// Fills the kernels' params from the operators' arguments.
#pragma once

#include "arguments.h"
#include "checks.h"
#include "index_params.h"

namespace flash_dmattn {

// Whether the bias is dense and in float32, on CUDA: the kernels then read it as a matrix of RelativeBiasView.
bool is_bias_matrix(const Inputs& inputs);

// Checks the inputs and fills the params that forward and backward share. For a packed mask it fills the sizes only;
// cuda_backend.cpp fills the rest.
void fill(AttentionParams& params, const Inputs& inputs);

// The params for building the lists of a mask: the batch elements and heads are the mask's.
AttentionParams mask_params(const OptionalTensor& mask, const OptionalTensor& intervals, int64_t seqlen_q,
                            int64_t seqlen_k, bool is_causal, const OptionalTensor& cu_seqlens_q,
                            const OptionalTensor& cu_seqlens_k);

// The params for building the lists of an indexer's keys. The batch elements and heads are those of the lists.
IndexListsParams index_params(const Tensor& indices, const OptionalTensor& intervals, int64_t tile_rows,
                              int64_t seqlen_q, int64_t seqlen_k, bool is_causal, const OptionalTensor& cu_seqlens_q,
                              const OptionalTensor& cu_seqlens_k);

inline bool nothing_to_do(const AttentionParams& params) { return params.batch == 0 || params.heads == 0; }

}  // namespace flash_dmattn
