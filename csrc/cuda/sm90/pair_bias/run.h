// Entry points of the pair bias kernels, for the plans of sm90.
#pragma once

#include <cuda_runtime.h>

#include "cuda/plan.h"

namespace flash_dmattn::cuda::sm90 {

// Instantiated in the files that scripts/generate_kernels.py writes.
template <typename T, int kHeadDim>
void run_pair_bias_fwd(const FwdArgs& args, cudaStream_t stream);
template <typename T, int kHeadDim>
void run_pair_bias_bwd(const BwdArgs& args, cudaStream_t stream);

}  // namespace flash_dmattn::cuda::sm90
