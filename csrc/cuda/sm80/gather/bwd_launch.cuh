// Launches the backward over key lists of one head dimension and dtype.
#pragma once

#include "cuda/sm80/bwd/launch.cuh"
#include "bwd_kernel.cuh"

namespace flash_dmattn::cuda::sm80 {

template <typename Traits, BiasKind kBias>
void launch_gather_bwd(const BwdArgs& p, cudaStream_t stream) {
    const GatherBwdTileScheduler scheduler(p, Traits::kRows);
    launch_bwd<Traits>(gather_bwd_kernel<Traits, kBias>,
                       static_cast<int64_t>(scheduler.chains) * scheduler.chain_length(),
                       sizeof(typename GatherBwdKernel<Traits, kBias>::SharedStorage), p, stream);
}

template <typename Traits>
void run_gather_bwd_with(const BwdArgs& p, cudaStream_t stream) {
    dispatch_bias(p.bias.kind, [&](auto bias) { launch_gather_bwd<Traits, decltype(bias)::value>(p, stream); });
}

template <typename T, int kHeadDim>
void run_gather_bwd(const BwdArgs& p, bool small_tiles, cudaStream_t stream) {
    small_tiles ? run_gather_bwd_with<BwdKernelTraits<kHeadDim, T, true, BwdPass::kGather>>(p, stream)
                : run_gather_bwd_with<BwdKernelTraits<kHeadDim, T, false, BwdPass::kGather>>(p, stream);
}

}  // namespace flash_dmattn::cuda::sm80
