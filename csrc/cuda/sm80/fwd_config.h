// Tile sizes of the forward: kRows query rows and kKeys keys at a time, 16 or 32 of the rows a warp; kBlocks blocks a
// multiprocessor, as far as registers decide.
#pragma once

namespace flash_dmattn::cuda {

template <int kRows_, int kKeys_, int kWarps_, int kBlocks_>
struct FwdTile {
    static constexpr int kRows = kRows_;
    static constexpr int kKeys = kKeys_;
    static constexpr int kWarps = kWarps_;
    static constexpr int kBlocks = kBlocks_;
};

template <int kHeadDim>
struct FwdTileOf;
// clang-format off
template <> struct FwdTileOf<32>  { using Type = FwdTile<128,  64, 4, 4>; };
template <> struct FwdTileOf<64>  { using Type = FwdTile<128,  64, 4, 3>; };
template <> struct FwdTileOf<96>  { using Type = FwdTile<128,  64, 4, 2>; };
template <> struct FwdTileOf<128> { using Type = FwdTile<128,  64, 4, 2>; };
template <> struct FwdTileOf<192> { using Type = FwdTile<128,  64, 8, 1>; };
template <> struct FwdTileOf<256> { using Type = FwdTile< 64,  64, 4, 2>; };
// clang-format on

// Where there are few rows, decoding above all: the heads that share keys are packed into one tile.
using FwdTileOfFewRows = FwdTile<64, 64, 4, 2>;

}  // namespace flash_dmattn::cuda
