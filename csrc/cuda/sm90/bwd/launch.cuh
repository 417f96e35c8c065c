// Launches the backward of one head dimension and dtype.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/common/shared_memory.h"
#include "cuda/arch/tensor_map.h"
#include "cuda/sm90/dbias/launch.cuh"
#include "cuda/sm90/relative_bias.h"
#include "plan.h"
#include "kernel.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename Traits, BiasKind kBias>
void launch_bwd(const BwdArgs& p, cudaStream_t stream) {
    using SharedStorage = BwdSharedStorage<Traits, kBias>;
    constexpr int kSlab = Traits::RowsTile::kSlabCols;
    BwdTensorMaps maps{};
    maps.query = make_tensor_map(query_layout(p, p.query), {kSlab, 1, Traits::kRows, 1});
    maps.dout = make_tensor_map(query_layout(p, p.dout), {kSlab, 1, Traits::kRows, 1});
    maps.key = make_tensor_map(key_layout(p, p.key), {kSlab, 1, Traits::kKeys, 1});
    maps.value = make_tensor_map(key_layout(p, p.value), {kSlab, 1, Traits::kKeys, 1});
    if constexpr (kBias == BiasKind::kDense) {
        constexpr int kScoresSlab = Traits::ScoresTile::kSlabCols;
        maps.bias = make_tensor_map(dense_bias_layout(p, p.bias), {kScoresSlab, Traits::kRows, 1, 1});
        if (stores_dense_dbias(p))
            maps.dbias = make_tensor_map(dense_bias_layout(p, p.dbias), {kScoresSlab, Traits::kRows, 1, 1});
    }
    const BwdScale scale(p);
    const auto kernel = bwd_kernel<Traits, kBias>;
    allow_shared_memory("the backward", p.head_dim, kernel, sizeof(SharedStorage));

    // With a serial reduction there is a single launch (plan_launches).
    const bool packs = packs_n_blocks(p, Traits::kKeys);
    const int64_t num_n_blocks = count_n_blocks(p, Traits::kKeys), group_size = serial_group_size(p),
                  units = count_launch_units(p), heads_per_kv = p.heads / p.kv_heads,
                  pairs_per_unit = p.cu_seqlens_q != nullptr && !packs ? p.batch : 1;
    for (int64_t i = 0; i < p.num_launches; ++i) {
        const int64_t first = units * i / p.num_launches, count = units * (i + 1) / p.num_launches - first;
        BwdArgs args = p;  // dquery_accum: to where the tiles of all heads would begin
        args.dquery_accum -= first * heads_per_kv * p.dquery_m_blocks * DqueryLayout<Traits>::kSize;
        const int64_t pairs = count * pairs_per_unit;
        const BwdLaunchRange range{static_cast<int>(first * pairs_per_unit / group_size),
                                   static_cast<int>(pairs / group_size), static_cast<int>(num_n_blocks), packs};
        launch(kernel, {grid_of(num_n_blocks * pairs), Traits::kThreads, sizeof(SharedStorage)}, stream, args, maps,
               scale, range);
        launch(convert_dquery_kernel<typename Traits::MmaTraits>,
               {grid_of(p.dquery_m_blocks * heads_per_kv * count), Traits::kConsumerWarpgroups * kWarpgroupThreads},
               stream, args, static_cast<int>(first * heads_per_kv), i + 1 < p.num_launches);
    }
}

template <typename T, int kHeadDim, BiasKind kBias>
void run_with_bias(const BwdArgs& p, cudaStream_t stream) {
    constexpr int kRows = bwd_tile_sizes(kHeadDim).rows;
    has_mask(p) || p.softcap != 0 ? launch_bwd<BwdKernelTraits<T, kHeadDim, kRows, true>, kBias>(p, stream)
                                  : launch_bwd<BwdKernelTraits<T, kHeadDim, kRows, false>, kBias>(p, stream);
}

// rows: of an m_block.
template <typename T, int kHeadDim>
void run_main_kernel(const BwdArgs& p, int rows, cudaStream_t stream) {
    if constexpr (has_tall_bwd_tile(kHeadDim)) {
        using Traits = BwdKernelTraits<T, kHeadDim, kTallBwdRows, false>;
        if (rows == kTallBwdRows)
            return p.bias.present() ? launch_bwd<Traits, BiasKind::kKey>(p, stream)
                                    : launch_bwd<Traits, BiasKind::kNone>(p, stream);
    }
    switch (kernel_bias_kind(p)) {
        case BiasKind::kNone: return run_with_bias<T, kHeadDim, BiasKind::kNone>(p, stream);
        case BiasKind::kKey: return run_with_bias<T, kHeadDim, BiasKind::kKey>(p, stream);
        case BiasKind::kDense: return run_with_bias<T, kHeadDim, BiasKind::kDense>(p, stream);
        case BiasKind::kRelative: return run_with_bias<T, kHeadDim, BiasKind::kRelative>(p, stream);
        case BiasKind::kRelativeGrid: return run_with_bias<T, kHeadDim, BiasKind::kRelativeGrid>(p, stream);
    }
}

template <typename T, int kHeadDim>
void run_bwd(const BwdArgs& p, int rows, cudaStream_t stream) {
    run_main_kernel<T, kHeadDim>(p, rows, stream);
    if (p.dense_dbias == DenseDbias::kRecompute) recompute_dbias<T, kHeadDim>(p, stream);
}

}  // namespace flash_dmattn::cuda::sm90
