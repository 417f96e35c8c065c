// Runs the backward over key lists, of one dtype and head dimension.
#pragma once

#include "bwd_launch.cuh"
#include "gather_bwd_kernel.cuh"

namespace flash_dmattn::cuda::sm80 {

template <typename Tile, BiasKind kBias>
void launch_gather_bwd(const BwdArgs& p, cudaStream_t stream) {
    const RowTileChains all(p, Tile::kRows);
    launch<Tile>(gather_bwd_kernel<Tile, kBias>, static_cast<int64_t>(all.chains) * all.length(),
                 sizeof(typename GatherBwd<Tile, kBias>::SharedMemory), p, stream);
}

template <typename Tile>
void run_gather_bwd_with(const BwdArgs& p, cudaStream_t stream) {
    switch (p.bias.kind) {
        case BiasKind::kNone: launch_gather_bwd<Tile, BiasKind::kNone>(p, stream); break;
        case BiasKind::kKey: launch_gather_bwd<Tile, BiasKind::kKey>(p, stream); break;
        case BiasKind::kDense: launch_gather_bwd<Tile, BiasKind::kDense>(p, stream); break;
    }
}

template <typename T, int kHeadDim>
void run_gather_bwd(const BwdArgs& p, const BwdPlan& plan, cudaStream_t stream) {
    plan.small_tiles ? run_gather_bwd_with<BwdTile<kHeadDim, T, true, BwdPass::kGather>>(p, stream)
                     : run_gather_bwd_with<BwdTile<kHeadDim, T, false, BwdPass::kGather>>(p, stream);
}

}  // namespace flash_dmattn::cuda::sm80
