// Launches the forward over key lists of one head dimension and dtype.
#pragma once

#include "cuda/sm80/fwd/launch.cuh"
#include "fwd_kernel.cuh"

namespace flash_dmattn::cuda::sm80 {

template <typename T, int kHeadDim>
void run_gather_fwd(const FwdArgs& p, const FwdTileChoice& choice, cudaStream_t stream) {
    dispatch_bias(p.bias.kind, [&](auto bias) {
        constexpr BiasKind kBias = decltype(bias)::value;
        using Prefill = GatherFwdKernel<T, kBias, FwdKernelTraits<kHeadDim, FwdTileKind::kPrefill, true>>;
        using Decode = GatherFwdKernel<T, kBias, FwdKernelTraits<kHeadDim, FwdTileKind::kDecode>>;
        using Small = GatherFwdKernel<T, kBias, FwdKernelTraits<kHeadDim, FwdTileKind::kSmall>>;
        if (choice.tile == FwdTileKind::kDecode || !fits_shared_memory<typename Small::SharedStorage>()) {
            launch_fwd<Decode>(p, choice, stream);
        } else if (choice.tile == FwdTileKind::kSmall || !fits_shared_memory<typename Prefill::SharedStorage>()) {
            launch_fwd<Small>(p, choice, stream);
        } else {
            launch_fwd<Prefill>(p, choice, stream);
        }
    });
}

}  // namespace flash_dmattn::cuda::sm80
