// Writes the new tokens of a call into its cache, for kernels that do not read them from the caller's tensors.
#pragma once

#include <cuda_runtime.h>

#include "kvcache_params.h"

namespace flash_dmattn::cuda {

// Does nothing without new tokens. `params` must be readable (can_gather in args.h).
void append_new_tokens(const KvCacheParams& params, cudaStream_t stream);

}  // namespace flash_dmattn::cuda
