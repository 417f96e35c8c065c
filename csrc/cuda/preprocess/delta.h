// What the backward needs before its main kernel: D_i, for every row.
#pragma once

#include <cuda_runtime.h>

#include "cuda/plan.h"

namespace flash_dmattn::cuda {

void compute_delta(const BwdArgs& args, cudaStream_t stream);

}  // namespace flash_dmattn::cuda
