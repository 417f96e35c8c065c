// Traits sizes of the forward.
#pragma once

#include <stdexcept>

#include "plan.h"

namespace flash_dmattn::cuda::sm80 {

// `rows` query rows and `keys` keys at a time. row_warps warps share the rows, and for each of them key_warps warps share
// the keys, each with a softmax of its own, merged at the end. `blocks` fit a multiprocessor, as far as registers decide.
struct FwdTileSizes {
    int rows, keys;
    int row_warps;
    int key_warps;
    int blocks;
};

constexpr FwdTileSizes prefill_fwd_tile_sizes(int head_dim) {
    switch (head_dim) {
        case 32: return {.rows = 128, .keys = 64, .row_warps = 4, .key_warps = 1, .blocks = 3};
        case 64:
        case 96:
        case 128: return {.rows = 128, .keys = 64, .row_warps = 4, .key_warps = 1, .blocks = 2};
        case 192: return {.rows = 128, .keys = 64, .row_warps = 8, .key_warps = 1, .blocks = 1};
        case 256: return {.rows = 64, .keys = 64, .row_warps = 4, .key_warps = 1, .blocks = 1};
    }
    throw std::logic_error("head dimension");
}

// For few rows.
constexpr FwdTileSizes small_fwd_tile_sizes(int head_dim) {
    switch (head_dim) {
        case 32:
        case 64: return {.rows = 64, .keys = 64, .row_warps = 4, .key_warps = 1, .blocks = 3};
        case 96:
        case 128: return {.rows = 64, .keys = 64, .row_warps = 4, .key_warps = 1, .blocks = 2};
        case 192:
        case 256: return {.rows = 64, .keys = 64, .row_warps = 4, .key_warps = 1, .blocks = 1};
    }
    throw std::logic_error("head dimension");
}

// For at most 16 or 32, decoding above all.
constexpr FwdTileSizes decode_fwd_tile_sizes(int head_dim) {
    switch (head_dim) {
        case 32:
        case 64:
        case 96:
        case 128: return {.rows = 16, .keys = 128, .row_warps = 1, .key_warps = 4, .blocks = 3};
        case 192:
        case 256: return {.rows = 32, .keys = 64, .row_warps = 2, .key_warps = 2, .blocks = 2};
    }
    throw std::logic_error("head dimension");
}

constexpr FwdTileSizes fwd_tile_sizes(FwdTileKind kind, int head_dim) {
    switch (kind) {
        case FwdTileKind::kPrefill: return prefill_fwd_tile_sizes(head_dim);
        case FwdTileKind::kSmall: return small_fwd_tile_sizes(head_dim);
        case FwdTileKind::kDecode: return decode_fwd_tile_sizes(head_dim);
    }
    throw std::logic_error("tile of the forward");
}

// kPackGqa: the query heads that share keys may share a tile.
template <int kHeadDim_, FwdTileKind kKind, bool kPackGqa_ = kKind != FwdTileKind::kPrefill>
struct FwdKernelTraits {
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr FwdTileSizes kSizes = fwd_tile_sizes(kKind, kHeadDim);
    static constexpr int kRows = kSizes.rows;
    static constexpr int kKeys = kSizes.keys;
    static constexpr int kRowWarps = kSizes.row_warps;
    static constexpr int kKeyWarps = kSizes.key_warps;
    static constexpr int kBlocks = kSizes.blocks;
    static constexpr bool kPackGqa = kPackGqa_;
    static constexpr bool kMaySplit = kKind != FwdTileKind::kPrefill;  // the keys, among blocks
};

}  // namespace flash_dmattn::cuda::sm80
