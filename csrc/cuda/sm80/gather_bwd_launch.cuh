// Runs the backward over key lists, of one dtype and head dimension.
#pragma once

#include "../bwd_postprocess.h"
#include "bwd_launch.cuh"
#include "gather_bwd_kernel.cuh"

namespace flash_dmattn::cuda {

template <typename Tile, BiasKind kBias>
void launch_gather_bwd(const BwdParams& p, cudaStream_t stream) {
    const RowTileChains all(p, Tile::kRows);
    launch<Tile>(gather_bwd_kernel<Tile, kBias>, static_cast<int64_t>(all.chains) * all.length(),
                 sizeof(typename GatherBwd<Tile, kBias>::SharedMemory), p, stream);
}

template <typename Tile>
void run_gather_bwd_with(const BwdParams& p, cudaStream_t stream) {
    const auto clear = [&](void* scratch, int64_t elements) {
        if (elements > 0) FLASH_CUDA_CHECK(cudaMemsetAsync(scratch, 0, elements * 4, stream));
    };
    clear(p.dkv_accum, 2 * p.dkv_rows * p.kv_heads * p.dkv_cols);
    clear(p.dbias_accum, p.dbias_accum_size);
    const RowTileChains all(p, Tile::kRows);
    if (p.deterministic) clear(p.watermarks, static_cast<int64_t>(all.chains) * all.length() + 1);
    switch (p.bias.kind) {
        case BiasKind::kNone: launch_gather_bwd<Tile, BiasKind::kNone>(p, stream); break;
        case BiasKind::kKey: launch_gather_bwd<Tile, BiasKind::kKey>(p, stream); break;
        case BiasKind::kDense: launch_gather_bwd<Tile, BiasKind::kDense>(p, stream); break;
    }
    postprocess_bwd(p, stream);
}

template <typename T, int kHeadDim>
void run_gather_bwd(const BwdParams& p, cudaStream_t stream) {
    uses_small_tiles() ? run_gather_bwd_with<BwdTile<kHeadDim, T, true, BwdPass::kGather>>(p, stream)
                       : run_gather_bwd_with<BwdTile<kHeadDim, T, false, BwdPass::kGather>>(p, stream);
}

}  // namespace flash_dmattn::cuda
