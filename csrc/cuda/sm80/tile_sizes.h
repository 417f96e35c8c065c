// The tile sizes of the sm80 kernels, for each compiled head dimension.
#pragma once

#include <cstdint>
#include <stdexcept>

namespace flash_dmattn::cuda::sm80 {

// The tile of a CTA: many query rows; at most 64; at most 16 or 32, as in decoding.
enum class FwdTileKind : int32_t { kPrefill, kSmall, kDecode };

// The functions of the forward list these in order.
struct FwdTileSizes {
    int rows, keys;  // of an m_block and an n_block
    int row_warps;   // warps along the rows
    int key_warps;   // for each of them warps along the keys, whose softmaxes the epilogue merges
    int ctas_per_sm;
};

constexpr FwdTileSizes prefill_fwd_tile_sizes(int head_dim) {
    switch (head_dim) {
        case 32: return {128, 64, 4, 1, 3};
        case 64:
        case 96:
        case 128: return {128, 64, 4, 1, 2};
        case 192: return {128, 64, 8, 1, 1};
        case 256: return {64, 64, 4, 1, 1};
    }
    throw std::logic_error("head dimension");
}

// At most 64 rows.
constexpr FwdTileSizes small_fwd_tile_sizes(int head_dim) {
    switch (head_dim) {
        case 32:
        case 64: return {64, 64, 4, 1, 3};
        case 96:
        case 128: return {64, 64, 4, 1, 2};
        case 192:
        case 256: return {64, 64, 4, 1, 1};
    }
    throw std::logic_error("head dimension");
}

// At most 16 or 32 rows, as in decoding.
constexpr FwdTileSizes decode_fwd_tile_sizes(int head_dim) {
    switch (head_dim) {
        case 32:
        case 64:
        case 96:
        case 128: return {16, 128, 1, 4, 3};
        case 192:
        case 256: return {32, 64, 2, 2, 2};
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

// The functions of the backward list these in order.
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

}  // namespace flash_dmattn::cuda::sm80
