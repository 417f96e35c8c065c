// Computes D_i = <do_i, o_i> - dlse_i for every row, before the backward's main kernel.
#pragma once

#include <cuda_runtime.h>

#include "cuda/plan.h"

namespace flash_dmattn::cuda {

// Writes args.delta.
void compute_delta(const BwdArgs& args, cudaStream_t stream);

}  // namespace flash_dmattn::cuda
