// Zeroes the sums in the workspace before the main kernels.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace flash_dmattn::cuda {

// memory: 16-byte aligned; `bytes` is a multiple of 16. An inactive launch of a device-side dispatch leaves it
// unchanged.
void clear(const AttentionParams& params, void* memory, int64_t bytes, cudaStream_t stream);

}  // namespace flash_dmattn::cuda
