// x_ij from q_i k_j: softcap, bias and visibility, applied to accumulators in registers. Forward and backward ask here.
//
// An accumulator is acc[kMTiles][kNTiles][4], tiles of 16 rows by 8 keys as mma_m16n8k16 lays them out: this lane's rows
// are 16 m + 8 h + lane / 4 for h in {0, 1}, its keys 8 n + 2 (lane % 4) + {0, 1}, and acc[m][n][2 h + e] is one pair.
#pragma once

#include "ptx.cuh"
#include "tile_scan.cuh"

namespace flash_dmattn::cuda {

// x = scale * x, and where there is a softcap, softcap * tanh(scale * x / softcap).
template <int kMTiles, int kNTiles>
__device__ __forceinline__ void scale_and_cap(float (&acc)[kMTiles][kNTiles][4], float scale, float softcap) {
    const float inner = softcap > 0 ? scale / softcap : scale;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int n = 0; n < kNTiles; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[m][n][i] *= inner;
    if (softcap > 0) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int n = 0; n < kNTiles; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) acc[m][n][i] = softcap * fast_tanh(acc[m][n][i]);
    }
}

// x = scale * x + bias, one number a key; `bias` is in shared memory, its first key that of the accumulator.
template <int kMTiles, int kNTiles>
__device__ __forceinline__ void scale_and_add_bias(float (&acc)[kMTiles][kNTiles][4], float scale, const float* bias) {
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
        const float2 b = *reinterpret_cast<const float2*>(bias + n * 8 + lane_id() % 4 * 2);
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float* x = acc[m][n] + 2 * h;
                x[0] = fmaf(x[0], scale, b.x);
                x[1] = fmaf(x[1], scale, b.y);
            }
    }
}

// x = scale * x + bias, one number a pair; the accumulator lies at (row, col) of the tile `bias`.
template <typename T, int kMTiles, int kNTiles, typename Tile>
__device__ __forceinline__ void scale_and_add_bias(float (&acc)[kMTiles][kNTiles][4], float scale, const Tile& bias,
                                                   int row, int col) {
    static_assert(kNTiles % 2 == 0);
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int n = 0; n < kNTiles; n += 2) {
            uint32_t b[4];  // the 8x8 blocks of an A operand are those of two accumulator tiles
            bias.load_a(b, row + m * 16, col + n * 8);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 pair = unpack<T>(b[i]);
                float* x = acc[m][n + i / 2] + i % 2 * 2;
                x[0] = fmaf(x[0], scale, pair.x);
                x[1] = fmaf(x[1], scale, pair.y);
            }
        }
}

// x = -inf where a pair is invisible: the one place where masks, causality, lengths and keys hidden by their bias take
// effect. visible_keys(row, word) gives 32 keys of a row of the accumulator, the first key in the lowest bit.
template <int kMTiles, int kNTiles, typename VisibleKeys>
__device__ __forceinline__ void hide_invisible(float (&acc)[kMTiles][kNTiles][4], const VisibleKeys& visible_keys) {
    static_assert(kNTiles % 4 == 0);
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int word = 0; word < kNTiles / 4; ++word) {
                const uint32_t visible = visible_keys(m * 16 + h * 8 + lane_id() / 4, word) >> (lane_id() % 4 * 2);
#pragma unroll
                for (int n = 0; n < 4; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float& x = acc[m][word * 4 + n][2 * h + e];
                        x = visible & (1u << (n * 8 + e)) ? x : -kInfinity;
                    }
            }
}

}  // namespace flash_dmattn::cuda
