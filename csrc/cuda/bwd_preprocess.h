// What the backward needs before its main kernel: D_i, for every row.
#pragma once

#include <cuda_runtime.h>

#include "../params.h"

namespace flash_dmattn::cuda {

void preprocess_bwd(const BwdParams& params, cudaStream_t stream);

}  // namespace flash_dmattn::cuda
