// Chooses the tile and the bias of the gathered forward of one head dimension and dtype, and launches.
#pragma once

#include "fwd_launch.cuh"
#include "gather_fwd_kernel.cuh"

namespace flash_dmattn::cuda::sm80 {

template <typename T, int kHeadDim, BiasKind kBias>
void run_gather_fwd_with(const FwdArgs& p, const FwdPlan& plan, cudaStream_t stream) {
    using Usual = GatherFwdKernel<T, kBias, FwdTile<kHeadDim, FwdTileKind::kUsual, true>>;
    using Decode = GatherFwdKernel<T, kBias, FwdTile<kHeadDim, FwdTileKind::kDecode>>;
    using Few = GatherFwdKernel<T, kBias, FwdTile<kHeadDim, FwdTileKind::kFew>>;
    if (plan.tile == FwdTileKind::kDecode || !fits_shared_memory<typename Few::SharedMemory>()) {
        launch_fwd<Decode>(p, plan, stream);
    } else if (plan.tile == FwdTileKind::kFew || !fits_shared_memory<typename Usual::SharedMemory>()) {
        launch_fwd<Few>(p, plan, stream);
    } else {
        launch_fwd<Usual>(p, plan, stream);
    }
}

template <typename T, int kHeadDim>
void run_gather_fwd(const FwdArgs& p, const FwdPlan& plan, cudaStream_t stream) {
    switch (bias_kind(p)) {
        case BiasKind::kNone: return run_gather_fwd_with<T, kHeadDim, BiasKind::kNone>(p, plan, stream);
        case BiasKind::kKey: return run_gather_fwd_with<T, kHeadDim, BiasKind::kKey>(p, plan, stream);
        case BiasKind::kDense: return run_gather_fwd_with<T, kHeadDim, BiasKind::kDense>(p, plan, stream);
    }
}

}  // namespace flash_dmattn::cuda::sm80
