// Launches the forward of one head dimension and dtype.
#pragma once

#include <algorithm>

#include "../common/check.h"
#include "../common/shared_memory.h"
#include "fwd.h"
#include "fwd_kernel.cuh"
#include "tensor_map.h"

namespace flash_dmattn::cuda::sm90 {

template <typename T, BiasKind kBias, typename Tile>
void launch_fwd(const FwdArgs& p, cudaStream_t stream) {
    using Smem = FwdSmem<T, kBias, Tile>;
    FwdSchedule schedule;
    const int tile_heads = schedule.tile_heads = Tile::kGathers && p.lists.tile_rows < Tile::kRows ? Tile::kConsumers : 1;
    const int tile_rows = Tile::kRows / tile_heads;
    const int64_t row_tiles = ceil_div<int64_t>(p.seqlen_q, tile_rows), heads = p.heads / tile_heads;
    schedule.works = grid_of(row_tiles * heads * p.batch);
    schedule.row_tiles = Divisor(row_tiles);
    schedule.heads = Divisor(heads);
    schedule.batch = Divisor(p.batch);
    // A bias that few batches share is then read from memory once.
    schedule.batch_first = kBias == BiasKind::kDense && p.bias.batches == 1 && p.batch <= 8;
    schedule.raw_scores = kBias == BiasKind::kNone && p.softcap == 0 && p.softmax_scale > 0;
    schedule.scale = static_cast<float>(p.softmax_scale);
    schedule.to_log2 = schedule.raw_scores ? schedule.scale * kLog2E : kLog2E;
    schedule.softcap = static_cast<float>(p.softcap);

    FwdMaps maps{};
    constexpr int kPanel = Smem::KeyTile::kPanelCols;
    maps.query = make_map(query_layout(p, p.query), {kPanel, 1, tile_rows, 1});
    if (!Tile::kGathers) {
        maps.key = make_map(key_layout(p, p.key), {kPanel, 1, Tile::kKeys, 1});
        maps.value = make_map(key_layout(p, p.value), {kPanel, 1, Tile::kKeys, 1});
    }
    if (kBias == BiasKind::kDense) maps.bias = make_map(dense_layout(p, p.bias), {Smem::kBiasKeys, kGroupRows, 1, 1});

    // Where the works are about alike, or short, as many blocks as run at once share them out, and load for the next while the
    // last ends; else blocks come as others end. Intervals are windows, documents, anything: of their works a block takes one
    // when it is done with another.
    const bool mask_differs_by_row =
        p.interval_tiles.present() || (p.packed_mask.present() && p.packed_mask.bits_row_stride != 0);
    const bool alike = Tile::kGathers || (!p.is_causal && p.cu_seqlens_q == nullptr && !mask_differs_by_row);
    constexpr int kShort = 2048;
    const bool shares_out = alike || p.interval_tiles.present() || p.seqlen_q <= kShort;
    schedule.tiles_last = shares_out && !alike;
    schedule.taken = p.interval_tiles.works_taken;
    const unsigned blocks =
        shares_out ? std::min<unsigned>(schedule.works, current_device().multiprocessors) : schedule.works;
    const auto kernel = fwd_kernel<T, kBias, Tile>;
    allow_shared_memory("the forward", p.head_dim, kernel, sizeof(Smem));
    kernel<<<blocks, Tile::kThreads, sizeof(Smem), stream>>>(p, schedule, maps);
    FLASH_CUDA_CHECK(cudaGetLastError());
}

template <typename T, BiasKind kBias, int kHeadDim>
void run_fwd_with(const FwdArgs& p, cudaStream_t stream) {
    constexpr bool kIsDense = kBias == BiasKind::kDense;
    using Tile = FwdTile<kHeadDim, kIsDense>;
    if constexpr (Tile::kConsumers > 2) {
        using Fewer = FwdTile<kHeadDim, kIsDense, true>;
        if (fewer_fit_better(p.seqlen_q, Fewer::kRows, Tile::kRows)) return launch_fwd<T, kBias, Fewer>(p, stream);
    }
    launch_fwd<T, kBias, Tile>(p, stream);
}

template <typename T, int kHeadDim>
void run_fwd(const FwdArgs& p, cudaStream_t stream) {
    if (p.lists.present()) {
        p.bias.kind == BiasKind::kKey ? launch_fwd<T, BiasKind::kKey, FwdListTile<kHeadDim>>(p, stream)
                                      : launch_fwd<T, BiasKind::kNone, FwdListTile<kHeadDim>>(p, stream);
        return;
    }
    switch (p.bias.present() ? p.bias.kind : BiasKind::kNone) {
        case BiasKind::kNone: return run_fwd_with<T, BiasKind::kNone, kHeadDim>(p, stream);
        case BiasKind::kKey: return run_fwd_with<T, BiasKind::kKey, kHeadDim>(p, stream);
        case BiasKind::kDense: return run_fwd_with<T, BiasKind::kDense, kHeadDim>(p, stream);
    }
}

}  // namespace flash_dmattn::cuda::sm90
