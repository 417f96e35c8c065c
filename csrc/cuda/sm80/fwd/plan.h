// The forward for compute capability 8.0 and up: what its dispatcher and its instantiations share.
#pragma once

#include <cuda_runtime.h>

#include "cuda/plan.h"

namespace flash_dmattn::cuda::sm80 {

// The kernels, the tile, and how the keys are split.
void plan_fwd(const FwdParams& params, FwdPlan& plan);
void run_fwd(const FwdArgs& args, const FwdPlan& plan, cudaStream_t stream);

// Instantiated in the files that scripts/generate_kernels.py writes. Causality is a constant where it pays: over key lists
// and of few rows it is asked once for each key or row, beside what memory says of it.
template <typename T, int kHeadDim, bool kCausal>
void run_fwd(const FwdArgs& args, const FwdPlan& plan, cudaStream_t stream);
// Of few rows: tiles of other kinds than kPrefill.
template <typename T, int kHeadDim>
void run_fwd_small(const FwdArgs& args, const FwdPlan& plan, cudaStream_t stream);
// Over params.lists.
template <typename T, int kHeadDim>
void run_gather_fwd(const FwdArgs& args, const FwdPlan& plan, cudaStream_t stream);

}  // namespace flash_dmattn::cuda::sm80
