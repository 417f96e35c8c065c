// A dense bias that batch elements share, over short sequences: what the dispatcher of compute capability 9.0 and the
// instantiations share.
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
