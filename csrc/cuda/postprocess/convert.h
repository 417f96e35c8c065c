// Converts the sums of the backward to gradients, after its main kernel.
#pragma once

#include <cuda_runtime.h>

#include "cuda/plan.h"

namespace flash_dmattn::cuda {

// dkv_accum to dkey and dvalue, dbias_accum to dbias, drelative_bias_exact to drelative_bias, where present.
void convert_sums(const BwdArgs& args, cudaStream_t stream);

}  // namespace flash_dmattn::cuda
