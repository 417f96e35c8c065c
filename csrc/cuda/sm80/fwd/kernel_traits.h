// Compile-time parameters of a forward kernel.
#pragma once

#include "cuda/sm80/tile_sizes.h"

namespace flash_dmattn::cuda::sm80 {

// kPackGqa: query heads of one KV head may share a tile.
template <int kHeadDim_, FwdTileKind kKind, bool kPackGqa_ = kKind != FwdTileKind::kPrefill>
struct FwdKernelTraits {
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr FwdTileSizes kSizes = fwd_tile_sizes(kKind, kHeadDim);
    static constexpr int kRows = kSizes.rows;
    static constexpr int kKeys = kSizes.keys;
    static constexpr int kRowWarps = kSizes.row_warps;
    static constexpr int kKeyWarps = kSizes.key_warps;
    static constexpr int kCtasPerSm = kSizes.ctas_per_sm;
    static constexpr bool kPackGqa = kPackGqa_;
    static constexpr bool kMaySplit = kKind != FwdTileKind::kPrefill;  // split-KV
};

}  // namespace flash_dmattn::cuda::sm80
