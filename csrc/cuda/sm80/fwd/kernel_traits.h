// Tile sizes of the forward.
#pragma once

#include <stdexcept>

#include "plan.h"

namespace flash_dmattn::cuda::sm80 {

// row_warps warps split the rows. For each of them key_warps warps split the keys, each with a softmax of its own; the
// epilogue merges them.
struct FwdTileSizes {
    int rows, keys;  // of an m_block and an n_block
    int row_warps;
    int key_warps;
    int blocks;  // CTAs per SM that registers allow
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

// At most 64 rows.
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

// At most 16 or 32 rows, as in decoding.
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

// kPackGqa: query heads of one KV head may share a tile.
template <int kHeadDim_, FwdTileKind kKind, bool kPackGqa_ = kKind != FwdTileKind::kPrefill>
struct FwdKernelTraits {
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr FwdTileSizes kSizes = fwd_tile_sizes(kKind, kHeadDim);
    static constexpr int kRows = kSizes.rows;
    static constexpr int kKeys = kSizes.keys;
    static constexpr int kRowWarps = kSizes.row_warps;
    static constexpr int kKeyWarps = kSizes.key_warps;
    static constexpr int kCtasPerSm = kSizes.blocks;
    static constexpr bool kPackGqa = kPackGqa_;
    static constexpr bool kMaySplit = kKind != FwdTileKind::kPrefill;  // split-KV
};

}  // namespace flash_dmattn::cuda::sm80
