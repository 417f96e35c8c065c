// Traits sizes of the backward.
#pragma once

#include <stdexcept>

#include "params.h"
#include "cuda/arch/smem_tile.cuh"

namespace flash_dmattn::cuda::sm90 {

constexpr int kBwdConsumerWarpgroups = 2;  // warp groups that multiply

// A block owns `keys` keys and visits `rows` query rows at a time. Up to head dimension 128 each warp group that multiplies
// has 64 keys of its own: their dK and dV stay in its registers, beside S and dP of all rows. Above that 64 keys are shared:
// a group makes S and dP of its part of the rows, and sums its part of the columns of dK and dV.
struct BwdTileSizes {
    int rows, keys;
};

// A head dimension is rounded up to one of these. exchanges: BwdKernelTraits::kClusterReduces.
constexpr BwdTileSizes bwd_tile_sizes(int head_dim, bool cluster_reduces) {
    switch (head_dim) {
        case 32: return {.rows = 128, .keys = 128};
        case 64: return {.rows = cluster_reduces ? 64 : 128, .keys = 128};
        case 128: return {.rows = 64, .keys = 128};
        case 192: return {.rows = 64, .keys = 64};
        case 256: return {.rows = 64, .keys = 64};
    }
    throw std::logic_error("head dimension");
}

// kClusterReduces: of a dense bias that batch elements share, whose blocks form a cluster and exchange its gradient.
template <typename T_, int kHeadDim_, bool kClusterReduces_ = false>
struct BwdKernelTraits {
    using T = T_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr bool kClusterReduces = kClusterReduces_;
    static constexpr BwdTileSizes kSizes = bwd_tile_sizes(kHeadDim, kClusterReduces);
    static constexpr int kRows = kSizes.rows, kKeys = kSizes.keys, kWords = kKeys / 32;
    static constexpr int kConsumerWarpgroups = kBwdConsumerWarpgroups;
    static constexpr int kThreads = (1 + kConsumerWarpgroups) * 128;
    static constexpr int kStages = 2;
    static constexpr bool kSharesKeys = kKeys == 64;
    static constexpr int kScoreRows = kSharesKeys ? kRows / kConsumerWarpgroups : kRows;  // of a group: of S and dP,
    static constexpr int kSumCols = kSharesKeys ? kHeadDim / kConsumerWarpgroups : kHeadDim;  // of dK and dV
    // Of dQ a group makes 64 rows, or of 64 rows its part of the columns.
    static constexpr bool kSplitsDqRows = kRows == 64 * kConsumerWarpgroups;
    static constexpr int kDqCols = kSplitsDqRows ? kHeadDim : kHeadDim / kConsumerWarpgroups;
    static_assert((kSharesKeys || kKeys == 64 * kConsumerWarpgroups) &&
                  (kSplitsDqRows || (kRows == 64 && kDqCols % 32 == 0)));
    // Whether shared memory has room for dQ on its way to its sums: then the copy engine adds it.
    static constexpr bool kStagesDquery = !kSharesKeys && !(kClusterReduces && kHeadDim == 128);
    static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

    // A group's columns begin with a slab.
    static constexpr int kSlabCols = kHeadDim % 64 == 0 && kSumCols % 64 == 0 ? 64 : 32;
    using RowsTile = SmemTile<T, kRows, kHeadDim, kSlabCols>;  // Q, dO
    using KeysTile = SmemTile<T, kKeys, kHeadDim, kSlabCols>;  // K, V
    using ScoresTile = SmemTile<T, kRows, kKeys>;              // bias, dS, P; a slab for 64 keys
    static_assert(ScoresTile::kSlabCols == 64);
};

}  // namespace flash_dmattn::cuda::sm90
