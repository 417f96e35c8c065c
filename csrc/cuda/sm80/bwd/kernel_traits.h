// The backward's tile sizes, and how its warps split the five GEMMs of a tile.
#pragma once

#include <stdexcept>

#include "params.h"
#include "cuda/arch/smem_tile.cuh"

namespace flash_dmattn::cuda::sm80 {

// The functions below list these in order.
struct BwdTileSizes {
    int rows, keys;  // of an m_block and an n_block
    int warps;
    int score_row_warps;  // warps along the rows of S and dP; the others split the keys
    int score_passes;     // a warp computes its keys of S and dP in this many passes, to save registers
    int dkv_key_warps;    // warps along the keys of dK and dV; the others split the head dimension
    int dq_row_warps;     // warps along the rows of dQ; the others split the head dimension
    int ctas_per_sm;
};

// Whether code for an architecture, numbered as __CUDA_ARCH__, uses the small tiles. A CTA can have 163 KiB of shared
// memory on compute capability 8.0 and 8.7, 99 KiB on 8.6, 8.9 and 12.x, and 227 KiB on 9.0 to 11.x.
constexpr bool uses_small_tiles(int architecture) { return architecture < 900 || architecture >= 1200; }

// Fits 99 KiB of shared memory up to head dimension 128, and 163 KiB above.
constexpr BwdTileSizes small_bwd_tile_sizes(int head_dim) {
    switch (head_dim) {
        case 32: return {64, 64, 4, 2, 1, 2, 2, 3};
        case 64: return {64, 64, 4, 2, 1, 2, 2, 2};
        case 96:
        case 128: return {32, 64, 4, 2, 1, 2, 2, 2};
        case 192:
        case 256: return {32, 64, 8, 2, 1, 2, 2, 1};
    }
    throw std::logic_error("head dimension");
}

constexpr BwdTileSizes bwd_tile_sizes(int head_dim, bool is_small) {
    if (is_small) return small_bwd_tile_sizes(head_dim);
    switch (head_dim) {
        case 32: return {64, 64, 4, 2, 1, 2, 2, 3};
        case 64: return {128, 128, 8, 4, 1, 4, 4, 1};
        case 96: return {64, 128, 8, 2, 1, 4, 4, 1};
        case 128: return {64, 128, 8, 2, 1, 4, 2, 1};
        case 192:
        case 256: return {64, 64, 8, 4, 1, 2, 2, 1};
    }
    throw std::logic_error("head dimension");
}

// The recompute kernel of dbias has S and dP only: several small CTAs per SM hide each other's latency.
constexpr BwdTileSizes dbias_tile_sizes(int head_dim) {
    switch (head_dim) {
        case 32: return {64, 64, 4, 2, 2, 2, 2, 4};
        case 64:
        case 96:
        case 128: return {64, 64, 4, 2, 1, 2, 2, 3};
        case 192: return {64, 64, 4, 2, 1, 2, 2, 2};
        case 256: return {64, 64, 4, 2, 1, 2, 2, 1};
    }
    throw std::logic_error("head dimension");
}

// The kernel over key lists adds dK and dV to global memory once per m_block: its m_blocks are large.
constexpr BwdTileSizes gather_tile_sizes(int head_dim, bool is_small) {
    if (is_small) {
        switch (head_dim) {
            case 32:
            case 64: return {64, 64, 4, 2, 1, 2, 2, 1};
            case 96:
            case 128: return {32, 64, 4, 2, 1, 2, 2, 1};
            case 192: return {64, 64, 8, 4, 1, 2, 2, 1};
            case 256: return {32, 64, 8, 2, 1, 2, 2, 1};
        }
        throw std::logic_error("head dimension");
    }
    switch (head_dim) {
        case 32: return {128, 64, 8, 4, 2, 4, 4, 2};
        case 64: return {128, 64, 8, 4, 1, 2, 4, 1};
        case 96: return {128, 64, 8, 4, 1, 4, 4, 1};
        case 128: return {128, 64, 8, 4, 1, 2, 4, 1};
        case 192:
        case 256: return {64, 64, 8, 4, 1, 2, 2, 1};
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
    using KeysTile = SmemTile<T, kKeys, kHeadDim>;  // K, V
    using ScoresTile = SmemTile<T, kRows, kKeys>;   // bias, P, dS
};

}  // namespace flash_dmattn::cuda::sm80
