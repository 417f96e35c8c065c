// Launches the prefill forward of one head dimension and dtype.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/common/shared_memory.h"
#include "cuda/sm80/bias_dispatch.h"
#include "plan.h"
#include "kernel_traits.h"
#include "kernel.cuh"

namespace flash_dmattn::cuda::sm80 {

template <typename Kernel>
void launch_fwd(const FwdArgs& p, const FwdTileChoice& choice, cudaStream_t stream) {
    constexpr int kSharedBytes = sizeof(typename Kernel::SharedStorage);
    FwdKernelParams params;
    FwdTileScheduler& scheduler = params.scheduler;
    const int qheads_per_tile = scheduler.qheads_per_tile = static_cast<int>(choice.qheads_per_tile);
    scheduler.num_m_blocks = static_cast<int>(ceil_div<int64_t>(p.seqlen_q * qheads_per_tile, Kernel::kRows));
    scheduler.heads = static_cast<int>(p.heads / qheads_per_tile);
    scheduler.batch = static_cast<int>(p.batch);
    scheduler.batch_first = orders_batch_first(p);
    params.unscaled_scores = can_leave_scores_unscaled(p);
    params.scale = static_cast<float>(p.softmax_scale);
    params.scale_log2 = params.unscaled_scores ? params.scale * kLog2E : kLog2E;
    params.softcap = static_cast<float>(p.softcap);
    const auto aligned = [](int64_t stride) { return stride % 8 == 0; };
    params.bias_aligned = p.bias.col_stride == 1 && reinterpret_cast<intptr_t>(p.bias.data) % 16 == 0 &&
                          aligned(p.bias.batch_stride) && aligned(p.bias.head_stride) && aligned(p.bias.row_stride);
    const int64_t num_ctas = p.num_splits * scheduler.num_m_blocks * scheduler.heads * scheduler.batch;
    const auto kernel = fwd_kernel<Kernel>;
    allow_shared_memory("the forward", p.head_dim, kernel, kSharedBytes);
    launch(kernel, {grid_of(num_ctas), Kernel::kThreads, kSharedBytes}, stream, p, params);
}

template <typename T, int kHeadDim>
void run_fwd(const FwdArgs& p, const FwdTileChoice& choice, cudaStream_t stream) {
    dispatch_bias(p.bias.kind, [&](auto bias) {
        using Prefill = FwdKernel<T, decltype(bias)::value, FwdKernelTraits<kHeadDim, FwdTileKind::kPrefill>>;
        // Devices with less shared memory use smaller tiles.
        fits_shared_memory<typename Prefill::SharedStorage>() ? launch_fwd<Prefill>(p, choice, stream)
                                                              : run_fwd_small<T, kHeadDim>(p, choice, stream);
    });
}

}  // namespace flash_dmattn::cuda::sm80
