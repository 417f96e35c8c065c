// The sm80 backward: its plan, and the launchers that scripts/generate_kernels.py instantiates.
#pragma once

#include <cuda_runtime.h>

#include "cuda/plan.h"

namespace flash_dmattn::cuda::sm80 {

bool plan_bwd(const BwdParams& params, BwdPlan& plan);
// Whether a kernel for short sequences serves a call.
bool has_short_kernel(const BwdParams& params);

// small_tiles: for devices with little shared memory.
template <typename T, int kHeadDim>
void run_bwd(const BwdArgs& args, bool small_tiles, cudaStream_t stream);
// The backward of short sequences (csrc/cuda/sm80/short_bwd/config.h), which have one size of tiles.
template <typename T, int kHeadDim>
void run_short_bwd(const BwdArgs& args, bool small_tiles, cudaStream_t stream);
// Gathers the keys of params.lists.
template <typename T, int kHeadDim>
void run_gather_bwd(const BwdArgs& args, bool small_tiles, cudaStream_t stream);

}  // namespace flash_dmattn::cuda::sm80
