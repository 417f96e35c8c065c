// The backward for compute capability 8.0 and up: what its dispatcher and its instantiations share.
#pragma once

#include <cuda_runtime.h>

#include "cuda/plan.h"

namespace flash_dmattn::cuda::sm80 {

// The kernels, how their work is cut, and the parts of the workspace, those that must be 0 first.
void plan_bwd(const BwdParams& params, BwdPlan& plan, WorkspaceLayout& layout);
void run_bwd(const BwdArgs& args, const BwdPlan& plan, cudaStream_t stream);

// Instantiated in the files that scripts/generate_kernels.py writes.
template <typename T, int kHeadDim>
void run_bwd(const BwdArgs& args, const BwdPlan& plan, cudaStream_t stream);
// The same, where params.lists are present.
template <typename T, int kHeadDim>
void run_gather_bwd(const BwdArgs& args, const BwdPlan& plan, cudaStream_t stream);

}  // namespace flash_dmattn::cuda::sm80
