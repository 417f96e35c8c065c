// Launches the forward of many rows, of one head dimension, dtype and causal flag.
#pragma once

#include "cuda/common/check.h"
#include "cuda/common/shared_memory.h"
#include "plan.h"
#include "kernel_traits.h"
#include "kernel.cuh"

namespace flash_dmattn::cuda::sm80 {

inline BiasKind bias_kind(const FwdArgs& p) { return p.bias.present() ? p.bias.kind : BiasKind::kNone; }

template <typename Kernel>
void launch_fwd(const FwdArgs& p, const FwdPlan& plan, cudaStream_t stream) {
    constexpr int kSharedStorage = sizeof(typename Kernel::SharedStorage);
    const BiasKind bias = bias_kind(p);
    FwdSchedule schedule;
    const int pack = schedule.pack = static_cast<int>(plan.pack);
    schedule.num_m_blocks = static_cast<int>(ceil_div<int64_t>(p.seqlen_q * pack, Kernel::kRows));
    schedule.heads = static_cast<int>(p.heads / pack);
    schedule.batch = static_cast<int>(p.batch);
    // A bias that few batches share is then read from memory once.
    schedule.batch_first = bias == BiasKind::kDense && p.bias.batches == 1 && p.batch <= 8;
    schedule.raw_scores = bias == BiasKind::kNone && p.softcap == 0 && p.softmax_scale > 0;
    schedule.scale = static_cast<float>(p.softmax_scale);
    schedule.to_log2 = schedule.raw_scores ? schedule.scale * kLog2E : kLog2E;
    schedule.softcap = static_cast<float>(p.softcap);
    const auto aligned = [](int64_t stride) { return stride % 8 == 0; };
    schedule.bias_aligned = p.bias.col_stride == 1 && reinterpret_cast<intptr_t>(p.bias.data) % 16 == 0 &&
                            aligned(p.bias.batch_stride) && aligned(p.bias.head_stride) && aligned(p.bias.row_stride);
    const int64_t blocks = p.num_splits * schedule.num_m_blocks * schedule.heads * schedule.batch;
    const auto kernel = fwd_kernel<Kernel>;
    allow_shared_memory("the forward", p.head_dim, kernel, kSharedStorage);
    kernel<<<grid_of(blocks), Kernel::kThreads, kSharedStorage, stream>>>(p, schedule);
    FLASH_CUDA_CHECK(cudaGetLastError());
}

template <typename T, int kHeadDim, bool kCausal, BiasKind kBias>
void run_fwd_with(const FwdArgs& p, const FwdPlan& plan, cudaStream_t stream) {
    using Usual = FwdKernel<T, kBias, kCausal, FwdKernelTraits<kHeadDim, FwdTileKind::kPrefill>>;
    // Where shared memory is short, a tile for fewer rows serves.
    fits_shared_memory<typename Usual::SharedStorage>() ? launch_fwd<Usual>(p, plan, stream)
                                                        : run_fwd_small<T, kHeadDim>(p, plan, stream);
}

template <typename T, int kHeadDim, bool kCausal>
void run_fwd(const FwdArgs& p, const FwdPlan& plan, cudaStream_t stream) {
    switch (bias_kind(p)) {
        case BiasKind::kNone: return run_fwd_with<T, kHeadDim, kCausal, BiasKind::kNone>(p, plan, stream);
        case BiasKind::kKey: return run_fwd_with<T, kHeadDim, kCausal, BiasKind::kKey>(p, plan, stream);
        case BiasKind::kDense: return run_fwd_with<T, kHeadDim, kCausal, BiasKind::kDense>(p, plan, stream);
    }
}

}  // namespace flash_dmattn::cuda::sm80
