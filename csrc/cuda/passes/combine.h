#pragma once

#include <cuda_runtime.h>

#include "../plan.h"

namespace flash_dmattn::cuda {

// out and lse from split_out and split_lse.
void combine_splits(const FwdArgs& args, cudaStream_t stream);

}  // namespace flash_dmattn::cuda
