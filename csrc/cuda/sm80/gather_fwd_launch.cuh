// Chooses the tile and the bias of the gathered forward of one head dimension and dtype, and launches.
#pragma once

#include "fwd_launch.cuh"
#include "gather_fwd_kernel.cuh"

namespace flash_dmattn::cuda {

template <typename T, int kHeadDim, BiasKind kBias>
void run_gather_fwd_bias(const FwdParams& p, cudaStream_t stream) {
    using Tiles = FwdTiles<kHeadDim>;
    using Usual = GatherFwdKernel<T, kHeadDim, kBias, PackingHeads<typename Tiles::Usual>>;
    using Decode = GatherFwdKernel<T, kHeadDim, kBias, typename Tiles::Decode>;
    const FwdPacking packing = fwd_packing(p);
    if (packing.rows <= Decode::kRows || !fits_shared_memory<typename Usual::SharedMemory>()) {
        launch_fwd<Decode>(p, packing.heads, stream);
    } else {
        launch_fwd<Usual>(p, packing.heads, stream);
    }
}

template <typename T, int kHeadDim>
void run_gather_fwd(const FwdParams& p, cudaStream_t stream) {
    switch (bias_kind(p)) {
        case BiasKind::kNone: return run_gather_fwd_bias<T, kHeadDim, BiasKind::kNone>(p, stream);
        case BiasKind::kKey: return run_gather_fwd_bias<T, kHeadDim, BiasKind::kKey>(p, stream);
        case BiasKind::kDense: return run_gather_fwd_bias<T, kHeadDim, BiasKind::kDense>(p, stream);
    }
}

}  // namespace flash_dmattn::cuda
