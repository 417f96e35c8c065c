// The CUDA kernels of the forward, as flash_api.cpp calls them. They know no torch: params.h structs and a stream.
//
// query, key and value have 16-byte aligned rows: their data pointers are multiples of 16 bytes, their strides of 8
// elements. out likewise. Masks and biases may have any strides.
#pragma once

#include <cuda_runtime.h>

#include "../params.h"

namespace flash_dmattn {

// The strides and sizes of the packed form of params.mask; its pointers are null, for the caller to allocate. total_q:
// of variable length, the number of rows of all sequences.
PackedMask plan_packed_mask(const AttentionParams& params, int64_t total_q);
// Reads params.mask once and fills `packed`.
void pack_mask_cuda(const AttentionParams& params, const PackedMask& packed, cudaStream_t stream);

// Into how many parts the forward should split the keys on the current device. Where more than 1, split_out needs
// splits * B * H * Sq * D floats and split_lse splits * B * H * Sq.
int64_t plan_fwd_splits(const AttentionParams& params);
void mha_fwd_cuda(const FwdParams& params, cudaStream_t stream);

}  // namespace flash_dmattn
