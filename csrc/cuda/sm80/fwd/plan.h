// The sm80 forward: its plan, and the launchers that scripts/generate_kernels.py instantiates.
#pragma once

#include <cuda_runtime.h>

#include "cuda/plan.h"
#include "cuda/sm80/tile_sizes.h"

namespace flash_dmattn::cuda::sm80 {

// The tile of a CTA.
struct FwdTileChoice {
    FwdTileKind tile = FwdTileKind::kPrefill;
    int64_t qheads_per_tile = 1;  // pack-GQA: query heads that share an m_block
};

bool plan_fwd(const FwdParams& params, FwdPlan& plan);

// Many rows.
template <typename T, int kHeadDim>
void run_fwd(const FwdArgs& args, const FwdTileChoice& choice, cudaStream_t stream);
// Few rows: kSmall and kDecode.
template <typename T, int kHeadDim>
void run_fwd_small(const FwdArgs& args, const FwdTileChoice& choice, cudaStream_t stream);
// Gathers the keys of params.lists.
template <typename T, int kHeadDim>
void run_gather_fwd(const FwdArgs& args, const FwdTileChoice& choice, cudaStream_t stream);

}  // namespace flash_dmattn::cuda::sm80
