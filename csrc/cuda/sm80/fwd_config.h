// Tile sizes of the forward.
#pragma once

namespace flash_dmattn::cuda {

// kRows query rows and kKeys keys at a time. kRowWarps warps share the rows, and for each of them kKeyWarps warps share the
// keys, each with a softmax of its own, merged at the end. kBlocks blocks fit a multiprocessor, as far as registers decide.
// kPacksHeads: the rows may be those of several heads.
template <int kRows_, int kKeys_, int kRowWarps_, int kKeyWarps_, int kBlocks_, bool kPacksHeads_ = false>
struct FwdTile {
    static constexpr int kRows = kRows_;
    static constexpr int kKeys = kKeys_;
    static constexpr int kRowWarps = kRowWarps_;
    static constexpr int kKeyWarps = kKeyWarps_;
    static constexpr int kBlocks = kBlocks_;
    static constexpr bool kPacksHeads = kPacksHeads_;
};

template <typename Tile>
using PackingHeads = FwdTile<Tile::kRows, Tile::kKeys, Tile::kRowWarps, Tile::kKeyWarps, Tile::kBlocks, true>;

// For a head dimension: the usual tile, one for few rows, and one for at most 16, decoding above all. In the latter two the
// query heads that share keys share a tile.
template <int kHeadDim>
struct FwdTiles;
// clang-format off
template <> struct FwdTiles<32>  { using Usual = FwdTile<128, 64, 4, 1, 3>; using Few = FwdTile<64, 64, 4, 1, 3, true>; using Decode = FwdTile<16, 128, 1, 4, 3, true>; };
template <> struct FwdTiles<64>  { using Usual = FwdTile<128, 64, 4, 1, 2>; using Few = FwdTile<64, 64, 4, 1, 3, true>; using Decode = FwdTile<16, 128, 1, 4, 3, true>; };
template <> struct FwdTiles<96>  { using Usual = FwdTile<128, 64, 4, 1, 2>; using Few = FwdTile<64, 64, 4, 1, 2, true>; using Decode = FwdTile<16, 128, 1, 4, 3, true>; };
template <> struct FwdTiles<128> { using Usual = FwdTile<128, 64, 4, 1, 2>; using Few = FwdTile<64, 64, 4, 1, 2, true>; using Decode = FwdTile<16, 128, 1, 4, 3, true>; };
template <> struct FwdTiles<192> { using Usual = FwdTile<128, 64, 8, 1, 1>; using Few = FwdTile<64, 64, 4, 1, 1, true>; using Decode = FwdTile<32,  64, 2, 2, 2, true>; };
template <> struct FwdTiles<256> { using Usual = FwdTile< 64, 64, 4, 1, 1>; using Few = FwdTile<64, 64, 4, 1, 1, true>; using Decode = FwdTile<32,  64, 2, 2, 2, true>; };
// clang-format on

}  // namespace flash_dmattn::cuda
