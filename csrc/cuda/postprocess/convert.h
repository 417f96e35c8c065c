// Converts the float32 sums of the backward over key lists to gradients, after its main kernel.
#pragma once

#include <cuda_runtime.h>

#include "cuda/plan.h"

namespace flash_dmattn::cuda {

// dkv_accum to dkey and dvalue, dbias_accum to dbias, where present.
void convert_sums(const BwdArgs& args, cudaStream_t stream);

}  // namespace flash_dmattn::cuda
