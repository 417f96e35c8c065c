// Launches the backward of short sequences of one dtype and head dimension on a stream.
#pragma once

#include <algorithm>

#include "cuda/common/device.h"
#include "cuda/common/launch.h"
#include "cuda/common/shared_memory.h"
#include "cuda/sm80/bwd/plan.h"
#include "kernel.cuh"

namespace flash_dmattn::cuda::sm80 {

template <typename Traits, bool kRelative>
void launch_short_bwd(const BwdArgs& p, cudaStream_t stream) {
    const auto kernel = short_bwd_kernel<Traits, kRelative>;
    constexpr size_t kBytes = sizeof(ShortBwdSharedStorage<Traits>);
    allow_shared_memory("the backward", p.head_dim, kernel, kBytes);
    const int64_t slots = current_device().num_sms * Traits::kCtasPerSm;
    const int64_t ctas_per_head = std::clamp<int64_t>(slots / p.heads, 1, p.batch);
    launch(kernel, {grid_of(ctas_per_head * p.heads), Traits::kThreads, kBytes}, stream, p);
}

template <typename T, int kHeadDim>
void run_short_bwd(const BwdArgs& p, bool, cudaStream_t stream) {
    using Traits = ShortBwdTraits<T, kHeadDim>;
    p.relative_bias.present() ? launch_short_bwd<Traits, true>(p, stream) : launch_short_bwd<Traits, false>(p, stream);
}

}  // namespace flash_dmattn::cuda::sm80
