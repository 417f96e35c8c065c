// The launchers for pair bias, a dense bias that many batch elements share, over short sequences.
// scripts/generate_kernels.py instantiates them.
#pragma once

#include <cuda_runtime.h>

#include "cuda/plan.h"

namespace flash_dmattn::cuda::sm90 {

template <typename T, int kHeadDim>
void run_pair_bias_fwd(const FwdArgs& args, cudaStream_t stream);
template <typename T, int kHeadDim>
void run_pair_bias_bwd(const BwdArgs& args, cudaStream_t stream);

}  // namespace flash_dmattn::cuda::sm90
