// The interface of the CUDA kernels: params.h structs, a plan and a stream, without torch.
//
// query, key, value and out have 16-byte aligned rows: their data pointers are multiples of 16 bytes, their strides of
// 8 elements. Masks and biases may have any strides.
#pragma once

#include <cuda_runtime.h>

#include "kvcache_params.h"
#include "params.h"
#include "plan.h"

namespace flash_dmattn {

// Strides and sizes of the packed form of params.mask, with null pointers: the caller allocates.
PackedMask plan_packed_mask(const AttentionParams& params);
// Reads params.mask once and fills `packed`.
void pack_mask_cuda(const AttentionParams& params, const PackedMask& packed, cudaStream_t stream);

// Strides and sizes of the block summaries of params.intervals, with a null pointer: the caller allocates.
IntervalSummaries plan_interval_summaries(const AttentionParams& params);
// Reads params.intervals once and fills the block summaries; zeroes the counter of the forward's tile scheduler, if any.
void summarize_intervals_cuda(const AttentionParams& params, const IntervalSummaries& summaries,
                              int32_t* tile_count_semaphore, cudaStream_t stream);

namespace cuda {

// Plan a call on the current device. params.packed_mask and params.interval_summaries are filled before. Throw
// std::runtime_error where no kernel was built for the dtype and head dimension.
FwdPlan plan_fwd(const FwdParams& params);
BwdPlan plan_bwd(const BwdParams& params);

// workspace: plan.workspace_bytes uninitialized bytes at a multiple of 256; null where that is 0.
void run_fwd(const FwdParams& params, const FwdPlan& plan, void* workspace, cudaStream_t stream);
// dout and the gradients are aligned as query is. The caller zeroes dbias of a key bias, and dbias of a dense bias
// where it has variable length or key lists are present.
void run_bwd(const BwdParams& params, const BwdPlan& plan, void* workspace, cudaStream_t stream);

// Attention over a cache of keys in one kernel, which also writes the new keys into the cache. Returns true where the
// kernel serves the call, else it launches nothing. skips_longer: see sm90/decode/plan.h.
bool decode_kvcache(const KvCacheParams& params, bool skips_longer, cudaStream_t stream);
// The largest number of query rows of the sequences that decode_kvcache serves with skips_longer; 0: none.
int64_t decodable_rows(const KvCacheParams& params);

}  // namespace cuda
}  // namespace flash_dmattn
