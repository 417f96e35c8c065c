// What the backward over key lists leaves to do after its main kernel: sums in float32 to gradients in their dtype.
#pragma once

#include <cuda_runtime.h>

#include "cuda/plan.h"

namespace flash_dmattn::cuda {

// dkv_accum to dkey and dvalue, and where there is a dbias_accum, it to dbias.
void convert_sums(const BwdArgs& args, cudaStream_t stream);

}  // namespace flash_dmattn::cuda
