// Launches the backward of one head dimension and dtype.
#pragma once

#include "../common/check.h"
#include "../common/shared_memory.h"
#include "bwd.h"
#include "bwd_kernel.cuh"
#include "tensor_map.h"

namespace flash_dmattn::cuda::sm90 {

template <typename Tile, BiasKind kBias>
void launch_bwd(const BwdArgs& p, cudaStream_t stream) {
    using Smem = BwdSmem<Tile, kBias>;
    constexpr int kPanel = Tile::RowsTile::kPanelCols;
    const int sharers = Tile::kExchanges ? static_cast<int>(p.dbias.batch_sharers) : 1;
    BwdMaps maps{};
    maps.query = make_map(query_layout(p, p.query), {kPanel, 1, Tile::kRows, 1});
    maps.dout = make_map(query_layout(p, p.dout), {kPanel, 1, Tile::kRows, 1});
    maps.key = make_map(key_layout(p, p.key), {kPanel, 1, Tile::kKeys, 1});
    maps.value = make_map(key_layout(p, p.value), {kPanel, 1, Tile::kKeys, 1});
    if constexpr (kBias == BiasKind::kDense) {
        constexpr int kPairsPanel = Tile::PairsTile::kPanelCols;
        maps.bias = make_map(dense_layout(p, p.bias), {kPairsPanel, Tile::kRows, 1, 1});
        if (p.dense_dbias == DenseDbias::kByEntry)
            maps.dbias = make_map(dense_layout(p, p.dbias), {kPairsPanel, Tile::kScoreRows, 1, 1});
        if (Tile::kExchanges)
            maps.dbias = make_map(dense_layout(p, p.dbias), {kPairsPanel, Tile::kRows / sharers, 1, 1});
    }
    const auto scale = static_cast<float>(p.softmax_scale);
    const BwdScale factors{scale, scale * kLog2E, static_cast<float>(p.softcap)};
    const int64_t blocks = ceil_div<int64_t>(p.seqlen_k, Tile::kKeys) * p.kv_heads * p.batch;
    const auto kernel = bwd_kernel<Tile, kBias>;
    allow_shared_memory("the backward", p.head_dim, kernel, sizeof(Smem));
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(sharers), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = grid_of(blocks);
    config.blockDim = Tile::kThreads;
    config.dynamicSmemBytes = sizeof(Smem);
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = Tile::kExchanges ? 1 : 0;
    FLASH_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, p, maps, factors));

    const int64_t row_tiles = ceil_div<int64_t>(p.seqlen_q, Tile::kRows);
    convert_dquery_kernel<Tile><<<grid_of(row_tiles * p.heads * p.batch), Tile::kConsumers * 128, 0, stream>>>(p);
    FLASH_CUDA_CHECK(cudaGetLastError());
}

template <typename T, int kHeadDim>
void run_bwd(const BwdArgs& p, cudaStream_t stream) {
    using Tile = BwdTile<T, kHeadDim>;
    switch (p.bias.present() ? p.bias.kind : BiasKind::kNone) {
        case BiasKind::kNone: return launch_bwd<Tile, BiasKind::kNone>(p, stream);
        case BiasKind::kKey: return launch_bwd<Tile, BiasKind::kKey>(p, stream);
        case BiasKind::kDense:
            if constexpr (can_exchange_at(kHeadDim))
                if (p.dense_dbias == DenseDbias::kExchanged)
                    return launch_bwd<BwdTile<T, kHeadDim, true>, BiasKind::kDense>(p, stream);
            return launch_bwd<Tile, BiasKind::kDense>(p, stream);
    }
}

}  // namespace flash_dmattn::cuda::sm90
