// The forward for compute capability 9.0: what its dispatcher and its instantiations share.
#pragma once

#include <cuda_runtime.h>

#include "cuda/plan.h"

namespace flash_dmattn::cuda::sm90 {

// Whether these kernels are faster than those for 8.0, as measured on an H200: short sequences of small heads are not.
bool should_use_fwd(const FwdParams& params);
// Whether these kernels were built for the call and can do it, and then the plan for it: tiles of many rows, whose tensors
// the copy engine can read; gathered keys without a dense bias.
bool plan_fwd(const FwdParams& params, FwdPlan& plan);
void run_fwd(const FwdArgs& args, const FwdPlan& plan, cudaStream_t stream);

// Instantiated in the files that scripts/generate_kernels.py writes.
template <typename T, int kHeadDim>
void run_fwd(const FwdArgs& args, cudaStream_t stream);

}  // namespace flash_dmattn::cuda::sm90
