// The CUDA kernels, as their callers see them. They know no torch: params.h structs, a plan and a stream.
//
// query, key and value have 16-byte aligned rows: their data pointers are multiples of 16 bytes, their strides of 8
// elements. out likewise. Masks and biases may have any strides.
#pragma once

#include <cuda_runtime.h>

#include "params.h"
#include "plan.h"

namespace flash_dmattn {

// The strides and sizes of the packed form of params.mask; its pointers are null, for the caller to allocate. total_q:
// of variable length, the number of rows of all sequences.
PackedMask plan_packed_mask(const AttentionParams& params, int64_t total_q);
// Reads params.mask once and fills `packed`.
void pack_mask_cuda(const AttentionParams& params, const PackedMask& packed, cudaStream_t stream);

// The strides and sizes of the summaries of params.intervals; the pointer is null, for the caller to allocate.
IntervalSummaries plan_interval_summaries(const AttentionParams& params);
// Reads params.intervals once and fills `tiles`.
void summarize_intervals_cuda(const AttentionParams& params, const IntervalSummaries& tiles, cudaStream_t stream);

namespace cuda {

// What is decided of a call on the current device; params.packed_mask and params.interval_summaries have been filled. Raises
// where no kernel was built for it.
FwdPlan plan_fwd(const FwdParams& params);
BwdPlan plan_bwd(const BwdParams& params);

// workspace: plan.workspace_bytes at a multiple of 256, whatever they hold; null where that is 0.
void run_fwd(const FwdParams& params, const FwdPlan& plan, void* workspace, cudaStream_t stream);
// dout and the gradients are aligned as query is. dbias of a key bias has been filled with zeros, and so has that of a
// dense bias of variable length, or where there are lists.
void run_bwd(const BwdParams& params, const BwdPlan& plan, void* workspace, cudaStream_t stream);

}  // namespace cuda
}  // namespace flash_dmattn
