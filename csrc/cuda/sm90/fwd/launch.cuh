// Launches the forward of one head dimension and dtype.
#pragma once

#include <algorithm>

#include "cuda/common/check.h"
#include "cuda/common/shared_memory.h"
#include "plan.h"
#include "kernel.cuh"
#include "cuda/arch/tensor_map.h"

namespace flash_dmattn::cuda::sm90 {

template <typename T, BiasKind kBias, typename Traits>
void launch_fwd(const FwdArgs& p, cudaStream_t stream) {
    using SharedStorage = FwdSharedStorage<T, kBias, Traits>;
    FwdSchedule schedule;
    const int tile_heads = schedule.tile_heads =
        Traits::kGathers && p.lists.tile_rows < Traits::kRows ? Traits::kConsumerWarpgroups : 1;
    const int tile_rows = Traits::kRows / tile_heads;
    const int64_t num_m_blocks = ceil_div<int64_t>(p.seqlen_q, tile_rows), heads = p.heads / tile_heads;
    schedule.num_work_tiles = grid_of(num_m_blocks * heads * p.batch);
    schedule.num_m_blocks = FastDivmod(num_m_blocks);
    schedule.heads = FastDivmod(heads);
    schedule.batch = FastDivmod(p.batch);
    // A bias that few batches share is then read from memory once.
    schedule.batch_first = kBias == BiasKind::kDense && p.bias.batches == 1 && p.batch <= 8;
    schedule.raw_scores = kBias == BiasKind::kNone && p.softcap == 0 && p.softmax_scale > 0;
    schedule.scale = static_cast<float>(p.softmax_scale);
    schedule.to_log2 = schedule.raw_scores ? schedule.scale * kLog2E : kLog2E;
    schedule.softcap = static_cast<float>(p.softcap);

    FwdMaps maps{};
    constexpr int kSlab = SharedStorage::KeyTile::kSlabCols;
    maps.query = make_map(query_layout(p, p.query), {kSlab, 1, tile_rows, 1});
    if (!Traits::kGathers) {
        maps.key = make_map(key_layout(p, p.key), {kSlab, 1, Traits::kKeys, 1});
        maps.value = make_map(key_layout(p, p.value), {kSlab, 1, Traits::kKeys, 1});
    }
    if (kBias == BiasKind::kDense)
        maps.bias = make_map(dense_layout(p, p.bias), {SharedStorage::kBiasKeys, kWarpgroupRows, 1, 1});

    // Where the works are about alike, or short, as many blocks as run at once share them out, and load for the next while the
    // last ends; else blocks come as others end. Intervals are windows, documents, anything: of their works a block takes one
    // when it is done with another.
    const bool mask_differs_by_row =
        p.interval_summaries.present() || (p.packed_mask.present() && p.packed_mask.bits_row_stride != 0);
    const bool uniform = Traits::kGathers || (!p.is_causal && p.cu_seqlens_q == nullptr && !mask_differs_by_row);
    constexpr int kShort = 2048;
    const bool is_persistent = uniform || p.interval_summaries.present() || p.seqlen_q <= kShort;
    schedule.m_block_last = is_persistent && !uniform;
    schedule.tile_count_semaphore = p.interval_summaries.tile_count_semaphore;
    const unsigned blocks =
        is_persistent ? std::min<unsigned>(schedule.num_work_tiles, current_device().num_sms) : schedule.num_work_tiles;
    const auto kernel = fwd_kernel<T, kBias, Traits>;
    allow_shared_memory("the forward", p.head_dim, kernel, sizeof(SharedStorage));
    kernel<<<blocks, Traits::kThreads, sizeof(SharedStorage), stream>>>(p, schedule, maps);
    FLASH_CUDA_CHECK(cudaGetLastError());
}

template <typename T, BiasKind kBias, int kHeadDim>
void run_fwd_with(const FwdArgs& p, cudaStream_t stream) {
    constexpr bool kIsDense = kBias == BiasKind::kDense;
    using Traits = FwdKernelTraits<kHeadDim, kIsDense>;
    if constexpr (Traits::kConsumerWarpgroups > 2) {
        using Fewer = FwdKernelTraits<kHeadDim, kIsDense, true>;
        if (fewer_fit_better(p.seqlen_q, Fewer::kRows, Traits::kRows)) return launch_fwd<T, kBias, Fewer>(p, stream);
    }
    launch_fwd<T, kBias, Traits>(p, stream);
}

template <typename T, int kHeadDim>
void run_fwd(const FwdArgs& p, cudaStream_t stream) {
    if (p.lists.present()) {
        p.bias.kind == BiasKind::kKey ? launch_fwd<T, BiasKind::kKey, FwdGatherKernelTraits<kHeadDim>>(p, stream)
                                      : launch_fwd<T, BiasKind::kNone, FwdGatherKernelTraits<kHeadDim>>(p, stream);
        return;
    }
    switch (p.bias.present() ? p.bias.kind : BiasKind::kNone) {
        case BiasKind::kNone: return run_fwd_with<T, BiasKind::kNone, kHeadDim>(p, stream);
        case BiasKind::kKey: return run_fwd_with<T, BiasKind::kKey, kHeadDim>(p, stream);
        case BiasKind::kDense: return run_fwd_with<T, BiasKind::kDense, kHeadDim>(p, stream);
    }
}

}  // namespace flash_dmattn::cuda::sm90
