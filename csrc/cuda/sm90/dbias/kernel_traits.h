// Tiles of the recompute kernel of dbias.
#pragma once

#include "params.h"
#include "cuda/arch/smem_tile.cuh"

namespace flash_dmattn::cuda::sm90 {

constexpr int kDbiasRows = 128;  // of a tile
constexpr int kMinDbiasKeys = 64;
// The keys of a tile, for a compiled head dimension.
constexpr int dbias_keys(int head_dim) { return head_dim <= 128 ? 128 : kMinDbiasKeys; }

template <typename T_, int kHeadDim_>
struct DbiasKernelTraits {
    using T = T_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kRows = kDbiasRows, kKeys = dbias_keys(kHeadDim);
    static constexpr int kConsumerWarpgroups = 2;  // MMA warpgroups of 64 rows each
    static constexpr int kThreads = (1 + kConsumerWarpgroups) * kWarpgroupThreads;
    static constexpr int kStages = kHeadDim <= 64 ? 5 : kHeadDim == 128 ? 3 : 2;  // each has Q and K, or dO and V
    static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
    using RowsTile = SmemTile<T, kRows, kHeadDim>;  // Q, dO
    using KvTile = SmemTile<T, kKeys, kHeadDim>;    // K, V
    using BiasTile = SmemTile<T, kRows, kKeys>;
};

}  // namespace flash_dmattn::cuda::sm90
