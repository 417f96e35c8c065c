// Launches the forward of few rows, of one head dimension and dtype.
#pragma once

#include "fwd_launch.cuh"

namespace flash_dmattn::cuda::sm80 {

template <typename T, int kHeadDim, BiasKind kBias>
void run_fwd_of_few_with(const FwdArgs& p, const FwdPlan& plan, cudaStream_t stream) {
    using Few = FwdKernel<T, kBias, false, FwdTile<kHeadDim, FwdTileKind::kFew>>;
    using Decode = FwdKernel<T, kBias, false, FwdTile<kHeadDim, FwdTileKind::kDecode>>;
    if (plan.tile == FwdTileKind::kDecode || !fits_shared_memory<typename Few::SharedMemory>()) {
        launch_fwd<Decode>(p, plan, stream);
    } else {
        launch_fwd<Few>(p, plan, stream);
    }
}

template <typename T, int kHeadDim>
void run_fwd_of_few(const FwdArgs& p, const FwdPlan& plan, cudaStream_t stream) {
    switch (bias_kind(p)) {
        case BiasKind::kNone: return run_fwd_of_few_with<T, kHeadDim, BiasKind::kNone>(p, plan, stream);
        case BiasKind::kKey: return run_fwd_of_few_with<T, kHeadDim, BiasKind::kKey>(p, plan, stream);
        case BiasKind::kDense: return run_fwd_of_few_with<T, kHeadDim, BiasKind::kDense>(p, plan, stream);
    }
}

}  // namespace flash_dmattn::cuda::sm80
