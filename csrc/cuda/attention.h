// The CUDA kernels, as flash_api.cpp calls them. They know no torch: params.h structs and a stream.
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

// The strides and sizes of the summaries of params.intervals; the pointer is null, for the caller to allocate.
IntervalTiles plan_interval_tiles(const AttentionParams& params);
// Reads params.intervals once and fills `tiles`.
void summarize_intervals_cuda(const AttentionParams& params, const IntervalTiles& tiles, cudaStream_t stream);

// Into how many parts the forward should split the keys on the current device; params.packed_mask, params.intervals
// and params.bias have been filled. Where more than 1, split_out needs splits * B * H * Sq * D floats and split_lse
// splits * B * H * Sq.
int64_t plan_fwd_splits(const AttentionParams& params);
void mha_fwd_cuda(const FwdParams& params, cudaStream_t stream);

// Numbers of elements of the scratch memory of params.h that the backward needs: 0, where it needs none of a kind.
struct BwdScratch {
    int64_t dquery_accum = 0;  // float32
    int64_t dquery_turns = 0;  // int32
    int64_t dbias_parts = 0;   // float32
    int64_t dkv_accum = 0;     // float32
    int64_t dbias_accum = 0;   // float32
    int64_t watermarks = 0;    // int32
};
// Decides the sizes and cuts of `params`, whose other fields but the scratch pointers have been filled. total_q, total_k: of
// variable length, the numbers of rows and of keys of all sequences.
BwdScratch plan_bwd_scratch(BwdParams& params, int64_t total_q, int64_t total_k);
// dout and the gradients are aligned as query is. dbias of a key bias has been filled with zeros, and so has that of a
// dense bias of variable length, or where there are lists.
void mha_bwd_cuda(const BwdParams& params, cudaStream_t stream);

}  // namespace flash_dmattn
