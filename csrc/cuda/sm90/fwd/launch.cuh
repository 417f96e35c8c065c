// Launches the sm90 forward of one head dimension and dtype.
#pragma once

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "cuda/arch/tensor_map.h"
#include "cuda/common/check.h"
#include "cuda/common/device.h"
#include "cuda/common/shared_memory.h"
#include "kernel.cuh"
#include "cuda/sm90/relative_bias.h"
#include "plan.h"

namespace flash_dmattn::cuda::sm90 {

// The tile scheduler of a call, and its grid.
struct FwdGrid {
    FwdTileSchedulerParams scheduler{};
    unsigned num_ctas = 0;

    FwdGrid(const FwdArgs& p, int rows, int qheads_per_tile, bool gathers, bool has_dense_bias) {
        const int64_t num_m_blocks = ceil_div<int64_t>(p.seqlen_q, rows), heads = p.heads / qheads_per_tile;
        scheduler.num_work_tiles = grid_of(num_m_blocks * heads * p.batch);
        scheduler.num_m_blocks = FastDivmod(num_m_blocks);
        scheduler.tile_count_semaphore = p.interval_summaries.tile_count_semaphore;
        scheduler.qheads_per_tile = qheads_per_tile;
        scheduler.batch_first = has_dense_bias && p.bias.batches == 1 && p.batch <= 8;
        scheduler.inner = FastDivmod(scheduler.batch_first ? p.batch : heads);
        // A persistent CTA loads its next work tile during the last one's epilogue. Its work tiles are known in
        // advance, unless the scheduler is dynamic (interval masks): so they must be short or their lengths change
        // evenly.
        const bool even = p.cu_seqlens_q == nullptr && !mask_differs_by_row(p);
        const bool uniform = gathers || (!p.is_causal && even);
        constexpr int kShort = 2048;
        const bool is_persistent =
            uniform || p.interval_summaries.present() || p.seqlen_q <= kShort || (even && is_near_cache(p));
        const int64_t pairs = heads * p.batch;
        int64_t section = scheduler.batch_first ? p.batch : 1;
        if (is_persistent && !uniform) {
            section = pairs;  // lengths change evenly from the first work tile to the last
        } else if (p.is_causal && !uniform && p.cu_seqlens_q == nullptr) {
            section = pairs_in_cache(p, pairs);
        }
        scheduler.section = FastDivmod(section);
        const unsigned num_sms = current_device().num_sms;
        num_ctas = is_persistent ? std::min(scheduler.num_work_tiles, num_sms) : scheduler.num_work_tiles;
    }

private:
    static int64_t kv_head_bytes(const FwdArgs& p) { return 2 * p.seqlen_k * p.head_dim * kElementBytes; }
    // Whether all K and V are read at the same time without loss: they take at most twice the L2 cache. The CTAs of a
    // head read the same keys at about the same time.
    static bool is_near_cache(const FwdArgs& p) {
        return p.batch * p.kv_heads * kv_head_bytes(p) <= 2 * current_device().l2_bytes;
    }
    // The largest divisor of the number of (head, batch) pairs whose K and V take at most half of the L2 cache.
    static int64_t pairs_in_cache(const FwdArgs& p, int64_t pairs) {
        const int64_t kv_heads = current_device().l2_bytes / 2 / kv_head_bytes(p);
        int64_t section = std::clamp<int64_t>(kv_heads * (p.heads / p.kv_heads), 1, pairs);
        while (pairs % section != 0) --section;
        return section;
    }
};

template <typename T, BiasKind kBias, typename Traits>
void launch_fwd(const FwdArgs& p, cudaStream_t stream) {
    using SharedStorage = FwdSharedStorage<T, kBias, Traits>;
    constexpr bool kIsDense = kBias == BiasKind::kDense;
    const int qheads_per_tile =
        Traits::kGathers && p.lists.m_block_rows < Traits::kRows ? Traits::kConsumerWarpgroups : 1;
    const int rows = Traits::kRows / qheads_per_tile;
    const FwdGrid grid(p, rows, qheads_per_tile, Traits::kGathers, kIsDense);

    FwdKernelParams params{grid.scheduler, {}};
    FwdSoftmaxParams& softmax = params.softmax;
    softmax.raw_scores = starts_from_bias(kBias) ? can_start_from_bias(p)
                                                 : kBias == BiasKind::kNone && p.softcap == 0 && p.softmax_scale > 0;
    softmax.scale = static_cast<float>(p.softmax_scale);
    softmax.inverse_scale = starts_from_bias(kBias) && softmax.raw_scores ? 1 / softmax.scale : 0;
    // -FLT_MAX masks a score: times more than 1 it becomes -inf.
    if (is_relative(kBias)) softmax.inverse_scale = std::max(softmax.inverse_scale, std::nextafter(1.f, 2.f));
    softmax.to_log2 = softmax.raw_scores ? softmax.scale * kLog2E : kLog2E;
    softmax.softcap = static_cast<float>(p.softcap);

    FwdTensorMaps maps{};
    constexpr int kSlab = SharedStorage::KeyTile::kSlabCols;
    maps.query = make_tensor_map(query_layout(p, p.query), {kSlab, 1, rows, 1});
    if (!Traits::kGathers) {
        maps.key = make_tensor_map(key_layout(p, p.key), {kSlab, 1, Traits::kKeys, 1});
        maps.value = make_tensor_map(key_layout(p, p.value), {kSlab, 1, Traits::kKeys, 1});
    }
    if (kIsDense)
        maps.bias = make_tensor_map(dense_bias_layout(p, p.bias), {SharedStorage::kBiasKeys, kWarpgroupRows, 1, 1});

    const auto kernel = fwd_kernel<T, kBias, Traits>;
    allow_shared_memory("the forward", p.head_dim, kernel, sizeof(SharedStorage));
    kernel<<<grid.num_ctas, Traits::kThreads, sizeof(SharedStorage), stream>>>(p, params, maps);
    FLASH_CUDA_CHECK(cudaGetLastError());
}

template <typename T, BiasKind kBias, int kHeadDim>
void run_fwd_with(const FwdArgs& p, cudaStream_t stream) {
    constexpr bool kIsDense = kBias == BiasKind::kDense;
    using Traits = FwdKernelTraits<kHeadDim, kIsDense>;
    using Fewer = FwdKernelTraits<kHeadDim, kIsDense, true>;
    if constexpr (Traits::kConsumerWarpgroups > 2) {
        using Segment = typename FwdSharedStorage<T, kBias, Traits>::RelativeSegment;
        const bool holds_bias = !is_relative(kBias) || Segment::size(p.relative_bias) <= Segment::kMaxEntries;
        !holds_bias || fewer_fit_better(p.seqlen_q, Fewer::kRows, Traits::kRows)
            ? launch_fwd<T, kBias, Fewer>(p, stream)
            : launch_fwd<T, kBias, Traits>(p, stream);
    } else {
        launch_fwd<T, kBias, Traits>(p, stream);
    }
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
