// The sm80 forward: its plan, and the launchers that scripts/generate_kernels.py instantiates.
#pragma once

#include <cuda_runtime.h>

#include "cuda/plan.h"
#include "cuda/sm80/tile_sizes.h"

namespace flash_dmattn::cuda::sm80 {

// What sm80 alone plans.
struct FwdPlan {
    FwdTileKind tile = FwdTileKind::kPrefill;
    int64_t qheads_per_tile = 1;  // pack-GQA: query heads that share an m_block
};

bool plan_fwd(const FwdParams& params, cuda::FwdPlan& plan);

// Many rows.
template <typename T, int kHeadDim>
void run_fwd(const FwdArgs& args, const FwdPlan& plan, cudaStream_t stream);
// Few rows: kSmall and kDecode.
template <typename T, int kHeadDim>
void run_fwd_small(const FwdArgs& args, const FwdPlan& plan, cudaStream_t stream);
// Gathers the keys of params.lists.
template <typename T, int kHeadDim>
void run_gather_fwd(const FwdArgs& args, const FwdPlan& plan, cudaStream_t stream);

}  // namespace flash_dmattn::cuda::sm80
