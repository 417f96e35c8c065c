// Runs the backward's kernels of one dtype and head dimension, one after the other on a stream.
#pragma once

#include "../common/check.h"
#include "../common/shared_memory.h"
#include "bwd.h"
#include "bwd_convert.cuh"
#include "bwd_dbias_kernel.cuh"
#include "bwd_kernel.cuh"

namespace flash_dmattn::cuda {

template <typename Tile>
void launch(void (*kernel)(BwdParams), int64_t blocks, size_t shared_bytes, const BwdParams& p, cudaStream_t stream) {
    if (blocks == 0) return;
    allow_shared_memory("the backward", p.head_dim, kernel, shared_bytes);
    kernel<<<static_cast<unsigned>(blocks), Tile::kThreads, shared_bytes, stream>>>(p);
    FLASH_CUDA_CHECK(cudaGetLastError());
}

template <typename Tile, bool kCausal>
void run_bwd_tiles(const BwdParams& p, cudaStream_t stream) {
    const int64_t row_tiles = ceil_div<int64_t>(p.seqlen_q, Tile::kRows);
    const int64_t key_tiles = ceil_div<int64_t>(p.seqlen_k, Tile::kKeys);
    const int64_t blocks = key_tiles * p.kv_heads * p.batch;
    switch (p.bias.kind) {
        case BiasKind::kNone:
            launch<Tile>(bwd_kernel<Tile, BiasKind::kNone, kCausal>, blocks, sizeof(BwdSmem<Tile, BiasKind::kNone>), p,
                         stream);
            break;
        case BiasKind::kKey:
            launch<Tile>(bwd_kernel<Tile, BiasKind::kKey, kCausal>, blocks, sizeof(BwdSmem<Tile, BiasKind::kKey>), p,
                         stream);
            break;
        case BiasKind::kDense:
            launch<Tile>(bwd_kernel<Tile, BiasKind::kDense, kCausal>, blocks, sizeof(BwdSmem<Tile, BiasKind::kDense>),
                         p, stream);
            break;
    }
    if (p.bias.kind == BiasKind::kDense && p.dbias.present() && !dbias_in_main_kernel(p) && key_tiles > 0) {
        using DbiasTile = BwdTile<Tile::kHeadDim, typename Tile::T, Tile::kIsSmall, BwdPass::kDbias>;
        const int64_t dbias_key_tiles = ceil_div<int64_t>(p.seqlen_k, DbiasTile::kKeys);
        const int64_t runs = p.dbias_tiles / dbias_key_tiles * ceil_div<int64_t>(dbias_key_tiles, p.dbias_run);
        launch<DbiasTile>(bwd_dbias_kernel<DbiasTile, kCausal>, runs * p.dbias_splits, sizeof(BwdDbiasSmem<DbiasTile>),
                          p, stream);
        if (p.dbias_splits > 1) launch<DbiasTile>(sum_dbias_parts_kernel<DbiasTile>, p.dbias_tiles, 0, p, stream);
    }
    launch<Tile>(convert_dquery_kernel<Tile>, row_tiles * p.heads * p.batch, sizeof(typename Tile::RowsTile), p,
                 stream);
}

template <typename Tile>
void run_bwd_with(const BwdParams& p, cudaStream_t stream) {
    const int64_t tiles = dquery_tiles_total(p);
    FLASH_CUDA_CHECK(cudaMemsetAsync(p.dquery_accum, 0, tiles * Tile::kRows * Tile::kHeadDim * sizeof(float), stream));
    if (p.deterministic) FLASH_CUDA_CHECK(cudaMemsetAsync(p.dquery_turns, 0, (tiles + 1) * sizeof(int32_t), stream));
    p.is_causal ? run_bwd_tiles<Tile, true>(p, stream) : run_bwd_tiles<Tile, false>(p, stream);
}

template <typename T, int kHeadDim>
void run_bwd(const BwdParams& p, cudaStream_t stream) {
    uses_small_tiles() ? run_bwd_with<BwdTile<kHeadDim, T, true>>(p, stream)
                       : run_bwd_with<BwdTile<kHeadDim, T, false>>(p, stream);
}

}  // namespace flash_dmattn::cuda
