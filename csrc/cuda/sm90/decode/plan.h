// Which calls the decoding kernel serves, and how it divides them.
#pragma once

#include <cuda_runtime.h>

#include "args.h"

namespace flash_dmattn::cuda::sm90 {

// Runs the kernel and returns true; returns false where it does not serve the call, which then has no effect. Depends
// on shapes and strides alone, never on lengths, so that a CUDA graph may replay the call with other lengths.
//
// The kernel serves sequences of up to kDecodeMaxRows / (H / Hkv) query rows, or of one row where it selects keys.
// skips_longer: serves these sequences of a call that has longer ones too, and skips the longer ones.
bool decode_kvcache(const KvCacheParams& params, bool skips_longer, cudaStream_t stream);

// The largest number of query rows of the sequences that decode_kvcache serves with skips_longer; 0: none.
int64_t decodable_rows(const KvCacheParams& params);

template <typename T, int kHeadDim>
void run_decode(const DecodeArgs& args, cudaStream_t stream);
// How many clusters of the kernel run at a time.
template <typename T, int kHeadDim>
void max_active_decode_clusters(int* num_clusters, const DecodeArgs& args);

}  // namespace flash_dmattn::cuda::sm90
