// How the warps of a backward kernel split the five GEMMs of a tile.
#pragma once

#include "params.h"
#include "cuda/arch/smem_tile.cuh"
#include "cuda/sm80/tile_sizes.h"

namespace flash_dmattn::cuda::sm80 {

// A warp's part of each GEMM, in 16x8 accumulator fragments: k..M of 16 rows, k..N of 8 columns. Warps take columns of
// the head dimension 16 at a time, so that each warp's columns keep the swizzle's period.
template <int kHeadDim_, typename T_, bool kIsSmall_, BwdPass kPass = BwdPass::kMain>
struct BwdKernelTraits {
    using T = T_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr bool kIsSmall = kIsSmall_;
    // Kernels of tiles that an architecture does not use compile to nothing.
#ifdef __CUDA_ARCH__
    static constexpr bool kIsUsed = kIsSmall == uses_small_tiles(__CUDA_ARCH__);
#else
    static constexpr bool kIsUsed = true;
#endif
    static constexpr BwdTileSizes kSizes = tile_sizes(kPass, kHeadDim, kIsSmall);
    static constexpr int kRows = kSizes.rows;
    static constexpr int kKeys = kSizes.keys;
    static constexpr int kThreads = kSizes.warps * 32;
    static constexpr int kWords = kKeys / 32;  // 32-key mask words per row

    static constexpr int kScoreKeyWarps = kSizes.warps / kSizes.score_row_warps;
    static constexpr int kScoreRows = kRows / kSizes.score_row_warps;
    static constexpr int kScoreKeys = kKeys / kScoreKeyWarps;
    static constexpr int kScoreM = kScoreRows / 16, kScoreN = kScoreKeys / 8;
    static constexpr int kPasses = kSizes.score_passes, kPassN = kScoreN / kPasses;
    // The gradient of a key bias needs registers, too; a warp with 32x64 scores has none left in one pass.
    template <BiasKind kBias>
    static constexpr int kPassesWith = kPasses == 1 && kBias == BiasKind::kKey && kScoreM * kScoreN > 8 ? 2 : kPasses;

    static constexpr int kDkvColWarps = kSizes.warps / kSizes.dkv_key_warps;
    static constexpr int kDkvKeys = kKeys / kSizes.dkv_key_warps;
    static constexpr int kDkvM = kDkvKeys / 16, kDkvN = kHeadDim / kDkvColWarps / 8;

    static constexpr int kDqColWarps = kSizes.warps / kSizes.dq_row_warps;
    static constexpr int kDqRows = kRows / kSizes.dq_row_warps;
    static constexpr int kDqM = kDqRows / 16, kDqN = kHeadDim / kDqColWarps / 8;

    static_assert(kScoreN % kPasses == 0 && kPassN % 2 == 0 && kHeadDim % (16 * kDkvColWarps) == 0 &&
                  kHeadDim % (16 * kDqColWarps) == 0);

    using RowsTile = SmemTile<T, kRows, kHeadDim>;  // Q, dO
    using KvTile = SmemTile<T, kKeys, kHeadDim>;    // K, V
    using ScoresTile = SmemTile<T, kRows, kKeys>;   // bias, P, dS
};

}  // namespace flash_dmattn::cuda::sm80
