// Launches the small and decode forward of one head dimension and dtype.
#pragma once

#include "launch.cuh"

namespace flash_dmattn::cuda::sm80 {

template <typename T, int kHeadDim>
void run_fwd_small(const FwdArgs& p, const FwdTileChoice& choice, cudaStream_t stream) {
    dispatch_bias(p.bias.kind, [&](auto bias) {
        constexpr BiasKind kBias = decltype(bias)::value;
        using Small = FwdKernel<T, kBias, FwdKernelTraits<kHeadDim, FwdTileKind::kSmall>>;
        using Decode = FwdKernel<T, kBias, FwdKernelTraits<kHeadDim, FwdTileKind::kDecode>>;
        if (choice.tile == FwdTileKind::kDecode || !fits_shared_memory<typename Small::SharedStorage>()) {
            launch_fwd<Decode>(p, choice, stream);
        } else {
            launch_fwd<Small>(p, choice, stream);
        }
    });
}

}  // namespace flash_dmattn::cuda::sm80
