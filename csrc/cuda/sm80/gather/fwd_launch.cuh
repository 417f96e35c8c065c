// Chooses the tile and the bias of the gathered forward of one head dimension and dtype, and launches.
#pragma once

#include "cuda/sm80/fwd/launch.cuh"
#include "fwd_kernel.cuh"

namespace flash_dmattn::cuda::sm80 {

template <typename T, int kHeadDim, BiasKind kBias>
void run_gather_fwd_with(const FwdArgs& p, const FwdPlan& plan, cudaStream_t stream) {
    using Usual = GatherFwdKernel<T, kBias, FwdKernelTraits<kHeadDim, FwdTileKind::kPrefill, true>>;
    using Decode = GatherFwdKernel<T, kBias, FwdKernelTraits<kHeadDim, FwdTileKind::kDecode>>;
    using Few = GatherFwdKernel<T, kBias, FwdKernelTraits<kHeadDim, FwdTileKind::kSmall>>;
    if (plan.tile == FwdTileKind::kDecode || !fits_shared_memory<typename Few::SharedStorage>()) {
        launch_fwd<Decode>(p, plan, stream);
    } else if (plan.tile == FwdTileKind::kSmall || !fits_shared_memory<typename Usual::SharedStorage>()) {
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
