// Launches the sm90 forward of one head dimension and dtype.
#pragma once

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "cuda/arch/tensor_map.h"
#include "cuda/common/device.h"
#include "cuda/common/launch.h"
#include "cuda/common/shared_memory.h"
#include "kernel.cuh"
#include "cuda/sm90/relative_bias.h"
#include "plan.h"

namespace flash_dmattn::cuda::sm90 {

template <typename T, BiasKind kBias, typename Traits>
void launch_fwd(const FwdArgs& p, cudaStream_t stream) {
    using SharedStorage = FwdSharedStorage<T, kBias, Traits>;
    constexpr bool kIsDense = kBias == BiasKind::kDense;
    const int qheads_per_tile =
        Traits::kGathers && p.lists.m_block_rows < Traits::kRows ? Traits::kConsumerWarpgroups : 1;
    const int rows = Traits::kRows / qheads_per_tile;
    const FwdGrid grid = plan_grid(p, rows, qheads_per_tile, Traits::kGathers);

    FwdKernelParams params{grid.scheduler, {}};
    FwdSoftmaxParams& softmax = params.softmax;
    softmax.unscaled_scores = starts_from_bias(kBias) ? can_start_from_bias(p) : can_leave_scores_unscaled(p);
    softmax.scale = static_cast<float>(p.softmax_scale);
    softmax.inverse_scale = starts_from_bias(kBias) && softmax.unscaled_scores ? 1 / softmax.scale : 0;
    // An entry of -FLT_MAX masks: multiplied by a factor above 1 it becomes -inf.
    if (is_relative(kBias)) softmax.inverse_scale = std::max(softmax.inverse_scale, std::nextafter(1.f, 2.f));
    softmax.scale_log2 = softmax.unscaled_scores ? softmax.scale * kLog2E : kLog2E;
    softmax.softcap = static_cast<float>(p.softcap);

    FwdTensorMaps maps{};
    constexpr int kSlab = SharedStorage::KvTile::kSlabCols;
    maps.query = make_tensor_map(query_layout(p, p.query), {kSlab, 1, rows, 1});
    if (!Traits::kGathers) {
        maps.key = make_tensor_map(key_layout(p, p.key), {kSlab, 1, Traits::kKeys, 1});
        maps.value = make_tensor_map(key_layout(p, p.value), {kSlab, 1, Traits::kKeys, 1});
    }
    if (kIsDense)
        maps.bias = make_tensor_map(dense_bias_layout(p, p.bias), {SharedStorage::kBiasKeys, kWarpgroupRows, 1, 1});

    const auto kernel = fwd_kernel<T, kBias, Traits>;
    allow_shared_memory("the forward", p.head_dim, kernel, sizeof(SharedStorage));
    launch(kernel, {grid.num_ctas, Traits::kThreads, sizeof(SharedStorage)}, stream, p, params, maps);
}

template <typename T, BiasKind kBias, int kHeadDim>
void run_fwd_with(const FwdArgs& p, cudaStream_t stream) {
    using Traits = FwdKernelTraits<kHeadDim, kBias>;
    if constexpr (has_tall_fwd_tile(kHeadDim, kBias)) {
        using Tall = FwdKernelTraits<kHeadDim, kBias, true>;
        using Segment = typename FwdSharedStorage<T, kBias, Tall>::RelativeSegment;
        const bool holds_bias = !is_relative(kBias) || Segment::size(p.relative_bias) <= Segment::kMaxEntries;
        if (holds_bias && should_use_tall_tile(p, kHeadDim, Traits::kRows, Tall::kRows))
            return launch_fwd<T, kBias, Tall>(p, stream);
    }
    launch_fwd<T, kBias, Traits>(p, stream);
}

template <typename T, int kHeadDim>
void run_fwd(const FwdArgs& p, cudaStream_t stream) {
    if constexpr (has_list_kernel(kHeadDim)) {
        using Traits = FwdGatherKernelTraits<kHeadDim>;
        if (p.lists.present())
            return p.bias.kind == BiasKind::kKey ? launch_fwd<T, BiasKind::kKey, Traits>(p, stream)
                                                 : launch_fwd<T, BiasKind::kNone, Traits>(p, stream);
    }
    switch (kernel_bias_kind(p)) {
        case BiasKind::kNone: return run_fwd_with<T, BiasKind::kNone, kHeadDim>(p, stream);
        case BiasKind::kKey: return run_fwd_with<T, BiasKind::kKey, kHeadDim>(p, stream);
        case BiasKind::kDense: return run_fwd_with<T, BiasKind::kDense, kHeadDim>(p, stream);
        case BiasKind::kRelative: return run_fwd_with<T, BiasKind::kRelative, kHeadDim>(p, stream);
        case BiasKind::kRelativeGrid: return run_fwd_with<T, BiasKind::kRelativeGrid, kHeadDim>(p, stream);
    }
    throw std::logic_error("kind of bias");
}

}  // namespace flash_dmattn::cuda::sm90
