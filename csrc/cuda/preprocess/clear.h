// What the kernels of a call need before they begin: sums that are 0.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace flash_dmattn::cuda {

// memory: `bytes` of it, a multiple of 16, at such an address. Where the call goes the other way it is left as it is.
void clear(const AttentionParams& params, void* memory, int64_t bytes, cudaStream_t stream);

}  // namespace flash_dmattn::cuda
