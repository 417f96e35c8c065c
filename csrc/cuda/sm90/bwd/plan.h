// The sm90 backward: its plan, and the launchers that scripts/generate_kernels.py instantiates.
#pragma once

#include <cuda_runtime.h>

#include "cuda/plan.h"

namespace flash_dmattn::cuda::sm90 {

// Whether these kernels are faster than sm80's, as measured on an H200: with short sequences of small heads they are
// not.
bool should_use_bwd(const BwdParams& params);
bool plan_bwd(const BwdParams& params, BwdPlan& plan);

// rows: of an m_block.
template <typename T, int kHeadDim>
void run_bwd(const BwdArgs& args, int rows, cudaStream_t stream);
// Gathers the keys of params.lists.
template <typename T, int kHeadDim>
void run_sparse_bwd(const BwdArgs& args, cudaStream_t stream);

}  // namespace flash_dmattn::cuda::sm90
