// What the backward's instantiations and their dispatcher share.
#pragma once

#include <cuda_runtime.h>

#include "../../params.h"

namespace flash_dmattn::cuda {

// Whether the code that the current device runs was made of small tiles (bwd_tile.cuh).
bool uses_small_tiles();

// One instantiation a file, written by scripts/generate_kernels.py.
template <typename T, int kHeadDim>
void run_bwd(const BwdParams& params, cudaStream_t stream);
// The same, where params.lists are present.
template <typename T, int kHeadDim>
void run_gather_bwd(const BwdParams& params, cudaStream_t stream);

}  // namespace flash_dmattn::cuda
