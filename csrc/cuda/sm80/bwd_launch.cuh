// Runs the backward's kernels of one dtype and head dimension, one after the other on a stream.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../common/check.h"
#include "bwd.h"
#include "bwd_convert.cuh"
#include "bwd_dbias_kernel.cuh"
#include "bwd_kernel.cuh"

namespace flash_dmattn::cuda {

using BwdKernel = void (*)(BwdParams);

inline void allow_shared_memory(BwdKernel kernel, size_t bytes) {
    FLASH_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
}

template <typename Tile>
void launch(BwdKernel kernel, int64_t blocks, size_t shared_bytes, const BwdParams& p, cudaStream_t stream) {
    if (blocks == 0) return;
    allow_shared_memory(kernel, shared_bytes);
    kernel<<<static_cast<unsigned>(blocks), Tile::kThreads, shared_bytes, stream>>>(p);
    FLASH_CUDA_CHECK(cudaGetLastError());
}

// Runs the main kernel so that the batch elements that share a dense bias sum its gradient themselves; false, and nothing
// is run, where they cannot.
template <typename Tile, bool kCausal>
bool launch_exchanging_dx(int64_t blocks, const BwdParams& p, cudaStream_t stream) {
    if constexpr (kCanExchangeDx<Tile>) {
        const int64_t sharers = p.batch;
        const bool is_shared = p.dbias.heads == p.heads && p.dbias.batches == 1 && p.cu_seqlens_q == nullptr;
        const bool divides = sharers > 1 && DxExchangeSmem<Tile>::kBlocks % sharers == 0 && sharers <= 8;
        if (!is_shared || !divides || p.softcap > 0 || p.deterministic || blocks == 0) return false;
        const BwdKernel kernel = bwd_kernel<Tile, BiasKind::kDense, kCausal>;
        cudaFuncAttributes compiled;
        FLASH_CUDA_CHECK(cudaFuncGetAttributes(&compiled, kernel));
        if (std::min(compiled.binaryVersion, compiled.ptxVersion) < 90) return false;

        const size_t bytes = sizeof(BwdSmem<Tile, BiasKind::kDense>) + sizeof(DxExchangeSmem<Tile>);
        allow_shared_memory(kernel, bytes);
        cudaLaunchAttribute cluster;
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim = {static_cast<unsigned>(sharers), 1, 1};
        cudaLaunchConfig_t config{};
        config.gridDim = static_cast<unsigned>(blocks);
        config.blockDim = Tile::kThreads;
        config.dynamicSmemBytes = bytes;
        config.stream = stream;
        config.attrs = &cluster;
        config.numAttrs = 1;
        FLASH_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, p));
        return true;
    }
    return false;
}

template <typename Tile, bool kCausal>
void run_bwd_tiles(const BwdParams& p, cudaStream_t stream) {
    const int64_t row_tiles = ceil_div<int64_t>(p.seqlen_q, Tile::kRows);
    const int64_t key_tiles = ceil_div<int64_t>(p.seqlen_k, Tile::kKeys);
    const int64_t blocks = key_tiles * p.kv_heads * p.batch;
    const bool sums_dbias = p.bias.kind == BiasKind::kDense && p.dbias.present() && !dbias_in_main_kernel(p) &&
                            key_tiles > 0;
    const auto launch_main = [&](auto kind) {
        constexpr BiasKind kBias = decltype(kind)::value;
        launch<Tile>(bwd_kernel<Tile, kBias, kCausal>, blocks, sizeof(BwdSmem<Tile, kBias>), p, stream);
    };
    bool dbias_is_summed = false;
    switch (p.bias.kind) {
        case BiasKind::kNone: launch_main(std::integral_constant<BiasKind, BiasKind::kNone>()); break;
        case BiasKind::kKey: launch_main(std::integral_constant<BiasKind, BiasKind::kKey>()); break;
        case BiasKind::kDense:
            dbias_is_summed = sums_dbias && launch_exchanging_dx<Tile, kCausal>(blocks, p, stream);
            if (!dbias_is_summed) launch_main(std::integral_constant<BiasKind, BiasKind::kDense>());
            break;
    }
    if (sums_dbias && !dbias_is_summed) {
        using DbiasTile = BwdTile<Tile::kHeadDim, typename Tile::T, true>;
        const int64_t dbias_key_tiles = ceil_div<int64_t>(p.seqlen_k, DbiasTile::kKeys);
        const int64_t runs = p.dbias_tiles / dbias_key_tiles * ceil_div<int64_t>(dbias_key_tiles, p.dbias_run);
        launch<DbiasTile>(bwd_dbias_kernel<DbiasTile, kCausal>, runs * p.dbias_splits, sizeof(BwdDbiasSmem<DbiasTile>),
                          p, stream);
        if (p.dbias_splits > 1) launch<DbiasTile>(sum_dbias_parts_kernel<DbiasTile>, p.dbias_tiles, 0, p, stream);
    }
    launch<Tile>(convert_dquery_kernel<Tile>, row_tiles * p.heads * p.batch, sizeof(typename Tile::RowsTile), p,
                 stream);
}

template <typename T, int kHeadDim>
void run_bwd(const BwdParams& p, cudaStream_t stream) {
    using Tile = BwdTile<kHeadDim, T>;
    const int64_t tiles = dquery_tiles_total(p);
    FLASH_CUDA_CHECK(cudaMemsetAsync(p.dquery_accum, 0, tiles * Tile::kRows * kHeadDim * sizeof(float), stream));
    if (p.deterministic) FLASH_CUDA_CHECK(cudaMemsetAsync(p.dquery_turns, 0, (tiles + 1) * sizeof(int32_t), stream));
    p.is_causal ? run_bwd_tiles<Tile, true>(p, stream) : run_bwd_tiles<Tile, false>(p, stream);
}

}  // namespace flash_dmattn::cuda
