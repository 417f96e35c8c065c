// The sm90 forward: its plan, and the launchers that scripts/generate_kernels.py instantiates.
#pragma once

#include <cuda_runtime.h>

#include "cuda/plan.h"

namespace flash_dmattn::cuda::sm90 {

// Whether these kernels are faster than sm80's, as measured on an H200: with short sequences of small heads they are
// not.
bool should_use_fwd(const FwdParams& params);
// Supported: more than 64 rows, and tensors that TMA can read; over key lists, no dense bias and has_list_kernel().
bool plan_fwd(const FwdParams& params, FwdPlan& plan);

// Over key lists sm80's kernel is faster at small head dimensions.
constexpr bool has_list_kernel(int64_t head_dim) { return head_dim > 32; }

template <typename T, int kHeadDim>
void run_fwd(const FwdArgs& args, cudaStream_t stream);

}  // namespace flash_dmattn::cuda::sm90
