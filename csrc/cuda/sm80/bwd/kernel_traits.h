// The backward's tile sizes, and how its warps share the five products of a tile.
#pragma once

#include <stdexcept>

#include "params.h"
#include "cuda/arch/smem_tile.cuh"

namespace flash_dmattn::cuda::sm80 {

struct BwdTileSizes {
    int rows, keys;  // of a tile
    int warps;
    int score_row_warps;  // warps along the rows of S = Q K^T and dP = dO V^T; the others lie along the keys
    int score_passes;     // a warp's keys of S and dP are computed in so many parts, where registers are short
    int key_warps;        // warps along the keys of dK and dV; the others lie along the head dimension
    int row_warps;        // warps along the rows of dQ; the others lie along the head dimension
    int blocks_per_sm;
};

// Whether code for an architecture, as __CUDA_ARCH__ numbers it, has to do with little shared memory: a block has at most
// 163 KiB with compute capability 8.0 and 8.7, 99 KiB with 8.6, 8.9 and 12.x, and 227 KiB with what lies between.
constexpr bool has_little_shared_memory(int architecture) { return architecture < 900 || architecture >= 1200; }

// For little shared memory: 99 KiB up to head dimension 128, above that 163 KiB.
constexpr BwdTileSizes small_bwd_tile_sizes(int head_dim) {
    switch (head_dim) {
        case 32:
            return {.rows = 64,
                    .keys = 64,
                    .warps = 4,
                    .score_row_warps = 2,
                    .score_passes = 1,
                    .key_warps = 2,
                    .row_warps = 2,
                    .blocks_per_sm = 3};
        case 64:
            return {.rows = 64,
                    .keys = 64,
                    .warps = 4,
                    .score_row_warps = 2,
                    .score_passes = 1,
                    .key_warps = 2,
                    .row_warps = 2,
                    .blocks_per_sm = 2};
        case 96:
        case 128:
            return {.rows = 32,
                    .keys = 64,
                    .warps = 4,
                    .score_row_warps = 2,
                    .score_passes = 1,
                    .key_warps = 2,
                    .row_warps = 2,
                    .blocks_per_sm = 2};
        case 192:
        case 256:
            return {.rows = 32,
                    .keys = 64,
                    .warps = 8,
                    .score_row_warps = 2,
                    .score_passes = 1,
                    .key_warps = 2,
                    .row_warps = 2,
                    .blocks_per_sm = 1};
    }
    throw std::logic_error("head dimension");
}

// A head dimension is rounded up to one of these.
constexpr BwdTileSizes bwd_tile_sizes(int head_dim, bool is_small) {
    if (is_small) return small_bwd_tile_sizes(head_dim);
    switch (head_dim) {
        case 32:
            return {.rows = 64,
                    .keys = 64,
                    .warps = 4,
                    .score_row_warps = 2,
                    .score_passes = 1,
                    .key_warps = 2,
                    .row_warps = 2,
                    .blocks_per_sm = 3};
        case 64:
            return {.rows = 128,
                    .keys = 128,
                    .warps = 8,
                    .score_row_warps = 4,
                    .score_passes = 1,
                    .key_warps = 4,
                    .row_warps = 4,
                    .blocks_per_sm = 1};
        case 96:
            return {.rows = 64,
                    .keys = 128,
                    .warps = 8,
                    .score_row_warps = 2,
                    .score_passes = 1,
                    .key_warps = 4,
                    .row_warps = 4,
                    .blocks_per_sm = 1};
        case 128:
            return {.rows = 64,
                    .keys = 128,
                    .warps = 8,
                    .score_row_warps = 2,
                    .score_passes = 1,
                    .key_warps = 4,
                    .row_warps = 2,
                    .blocks_per_sm = 1};
        case 192:
        case 256:
            return {.rows = 64,
                    .keys = 64,
                    .warps = 8,
                    .score_row_warps = 4,
                    .score_passes = 1,
                    .key_warps = 2,
                    .row_warps = 2,
                    .blocks_per_sm = 1};
    }
    throw std::logic_error("head dimension");
}

// Of the kernel that sums the gradient of a shared bias, which computes S and dP alone: several small blocks hide each
// other's latency.
constexpr BwdTileSizes dbias_tile_sizes(int head_dim) {
    switch (head_dim) {
        case 32:
            return {.rows = 64,
                    .keys = 64,
                    .warps = 4,
                    .score_row_warps = 2,
                    .score_passes = 2,
                    .key_warps = 2,
                    .row_warps = 2,
                    .blocks_per_sm = 4};
        case 64:
        case 96:
        case 128:
            return {.rows = 64,
                    .keys = 64,
                    .warps = 4,
                    .score_row_warps = 2,
                    .score_passes = 1,
                    .key_warps = 2,
                    .row_warps = 2,
                    .blocks_per_sm = 3};
        case 192:
            return {.rows = 64,
                    .keys = 64,
                    .warps = 4,
                    .score_row_warps = 2,
                    .score_passes = 1,
                    .key_warps = 2,
                    .row_warps = 2,
                    .blocks_per_sm = 2};
        case 256:
            return {.rows = 64,
                    .keys = 64,
                    .warps = 4,
                    .score_row_warps = 2,
                    .score_passes = 1,
                    .key_warps = 2,
                    .row_warps = 2,
                    .blocks_per_sm = 1};
    }
    throw std::logic_error("head dimension");
}

// Of the kernel over key lists, whose blocks own rows: many rows to a key, since for each of them the key's dK and dV are
// added to global memory.
constexpr BwdTileSizes gather_tile_sizes(int head_dim, bool is_small) {
    if (is_small) {
        switch (head_dim) {
            case 32:
            case 64:
                return {.rows = 64,
                        .keys = 64,
                        .warps = 4,
                        .score_row_warps = 2,
                        .score_passes = 1,
                        .key_warps = 2,
                        .row_warps = 2,
                        .blocks_per_sm = 1};
            case 96:
            case 128:
                return {.rows = 32,
                        .keys = 64,
                        .warps = 4,
                        .score_row_warps = 2,
                        .score_passes = 1,
                        .key_warps = 2,
                        .row_warps = 2,
                        .blocks_per_sm = 1};
            case 192:
                return {.rows = 64,
                        .keys = 64,
                        .warps = 8,
                        .score_row_warps = 4,
                        .score_passes = 1,
                        .key_warps = 2,
                        .row_warps = 2,
                        .blocks_per_sm = 1};
            case 256:
                return {.rows = 32,
                        .keys = 64,
                        .warps = 8,
                        .score_row_warps = 2,
                        .score_passes = 1,
                        .key_warps = 2,
                        .row_warps = 2,
                        .blocks_per_sm = 1};
        }
        throw std::logic_error("head dimension");
    }
    switch (head_dim) {
        case 32:
            return {.rows = 128,
                    .keys = 64,
                    .warps = 8,
                    .score_row_warps = 4,
                    .score_passes = 2,
                    .key_warps = 4,
                    .row_warps = 4,
                    .blocks_per_sm = 2};
        case 64:
            return {.rows = 128,
                    .keys = 64,
                    .warps = 8,
                    .score_row_warps = 4,
                    .score_passes = 1,
                    .key_warps = 2,
                    .row_warps = 4,
                    .blocks_per_sm = 1};
        case 96:
            return {.rows = 128,
                    .keys = 64,
                    .warps = 8,
                    .score_row_warps = 4,
                    .score_passes = 1,
                    .key_warps = 4,
                    .row_warps = 4,
                    .blocks_per_sm = 1};
        case 128:
            return {.rows = 128,
                    .keys = 64,
                    .warps = 8,
                    .score_row_warps = 4,
                    .score_passes = 1,
                    .key_warps = 2,
                    .row_warps = 4,
                    .blocks_per_sm = 1};
        case 192:
        case 256:
            return {.rows = 64,
                    .keys = 64,
                    .warps = 8,
                    .score_row_warps = 4,
                    .score_passes = 1,
                    .key_warps = 2,
                    .row_warps = 2,
                    .blocks_per_sm = 1};
    }
    throw std::logic_error("head dimension");
}

enum class BwdPass { kMain, kDbias, kGather };

constexpr BwdTileSizes tile_sizes(BwdPass pass, int head_dim, bool is_small) {
    switch (pass) {
        case BwdPass::kMain: return bwd_tile_sizes(head_dim, is_small);
        case BwdPass::kDbias: return dbias_tile_sizes(head_dim);
        case BwdPass::kGather: return gather_tile_sizes(head_dim, is_small);
    }
    throw std::logic_error("pass of the backward");
}

// One warp's share of a product, in tiles of 16 x 8. Columns of the head dimension are dealt to warps 16 at a time, so
// that every warp's columns keep to the swizzle's period whatever the head dimension.
template <int kHeadDim_, typename T_, bool kIsSmall_, BwdPass kPass = BwdPass::kMain>
struct BwdKernelTraits {
    using T = T_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr bool kIsSmall = kIsSmall_;
    // Code for an architecture is made of the tiles that it uses; its kernels of other tiles are empty.
#ifdef __CUDA_ARCH__
    static constexpr bool kIsUsed = kIsSmall == has_little_shared_memory(__CUDA_ARCH__);
#else
    static constexpr bool kIsUsed = true;
#endif
    static constexpr BwdTileSizes kSizes = tile_sizes(kPass, kHeadDim, kIsSmall);
    static constexpr int kRows = kSizes.rows;
    static constexpr int kKeys = kSizes.keys;
    static constexpr int kThreads = kSizes.warps * 32;
    static constexpr int kWords = kKeys / 32;  // of packed visibility a row

    static constexpr int kScoreKeyWarps = kSizes.warps / kSizes.score_row_warps;
    static constexpr int kScoreRows = kRows / kSizes.score_row_warps;
    static constexpr int kScoreKeys = kKeys / kScoreKeyWarps;
    static constexpr int kScoreM = kScoreRows / 16, kScoreN = kScoreKeys / 8;
    static constexpr int kPasses = kSizes.score_passes, kPassN = kScoreN / kPasses;
    // The column sums of a key bias take registers, too, of which a warp with 32 x 64 pairs has none left.
    template <BiasKind kBias>
    static constexpr int kPassesWith = kPasses == 1 && kBias == BiasKind::kKey && kScoreM * kScoreN > 8 ? 2 : kPasses;

    static constexpr int kDkvColWarps = kSizes.warps / kSizes.key_warps;
    static constexpr int kDkvKeys = kKeys / kSizes.key_warps;
    static constexpr int kDkvM = kDkvKeys / 16, kDkvN = kHeadDim / kDkvColWarps / 8;

    static constexpr int kDqColWarps = kSizes.warps / kSizes.row_warps;
    static constexpr int kDqRows = kRows / kSizes.row_warps;
    static constexpr int kDqM = kDqRows / 16, kDqN = kHeadDim / kDqColWarps / 8;

    static_assert(kScoreN % kPasses == 0 && kPassN % 2 == 0 && kHeadDim % (16 * kDkvColWarps) == 0 &&
                  kHeadDim % (16 * kDqColWarps) == 0);

    using RowsTile = SmemTile<T, kRows, kHeadDim>;  // Q, dO
    using KeysTile = SmemTile<T, kKeys, kHeadDim>;  // K, V
    using ScoresTile = SmemTile<T, kRows, kKeys>;   // bias, P, dS
};

}  // namespace flash_dmattn::cuda::sm80
