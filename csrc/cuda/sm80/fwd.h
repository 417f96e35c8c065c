// The forward for compute capability 8.0 and up: what its dispatcher and its instantiations share.
#pragma once

#include <cuda_runtime.h>

#include "../plan.h"

namespace flash_dmattn::cuda::sm80 {

// The kernels, the tile, and how the keys are split.
void plan_fwd(const FwdParams& params, FwdPlan& plan);
void run_fwd(const FwdArgs& args, const FwdPlan& plan, cudaStream_t stream);

// One instantiation a file, written by scripts/generate_kernels.py.
template <typename T, int kHeadDim>
void run_fwd(const FwdArgs& args, const FwdPlan& plan, cudaStream_t stream);
// The same over params.lists.
template <typename T, int kHeadDim>
void run_gather_fwd(const FwdArgs& args, const FwdPlan& plan, cudaStream_t stream);

}  // namespace flash_dmattn::cuda::sm80
