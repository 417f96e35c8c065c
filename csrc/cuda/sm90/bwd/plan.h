// The backward for compute capability 9.0: what its dispatcher and its instantiations share.
#pragma once

#include <cuda_runtime.h>

#include "cuda/plan.h"

namespace flash_dmattn::cuda::sm90 {

// Whether these kernels are faster than those for 8.0, as measured on an H200: short sequences of small heads are not.
bool should_use_bwd(const BwdParams& params);
// Whether these kernels were built for the call and can do it, and then the plan for it.
bool plan_bwd(const BwdParams& params, BwdPlan& plan, WorkspaceLayout& layout);
void run_bwd(const BwdArgs& args, const BwdPlan& plan, cudaStream_t stream);

// Instantiated in the files that scripts/generate_kernels.py writes.
template <typename T, int kHeadDim>
void run_bwd(const BwdArgs& args, cudaStream_t stream);
// The same, where params.lists are present.
template <typename T, int kHeadDim>
void run_sparse_bwd(const BwdArgs& args, cudaStream_t stream);

}  // namespace flash_dmattn::cuda::sm90
