// What the backward's instantiations and their dispatcher share.
#pragma once

#include <cuda_runtime.h>

#include "../../params.h"

namespace flash_dmattn::cuda {

// One instantiation a file, written by scripts/generate_kernels.py.
template <typename T, int kHeadDim>
void run_bwd(const BwdParams& params, cudaStream_t stream);
// The same, where params.lists are present.
template <typename T, int kHeadDim>
void run_gather_bwd(const BwdParams& params, cudaStream_t stream);

}  // namespace flash_dmattn::cuda
