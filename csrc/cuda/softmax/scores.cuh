// x_ij from q_i k_j: scale, softcap, bias and visibility, applied to accumulators in registers (fragment.cuh), and the
// derivative of all that. Forward and backward, tiles and lists ask here.
#pragma once

#include <cfloat>

#include "cuda/arch/math.cuh"
#include "params.h"
#include "cuda/arch/fragment.cuh"
#include "cuda/mask/visibility.cuh"

namespace flash_dmattn::cuda {

// tanh within a few units of 1e-7 of the right value, where the hardware's own is off by 5e-4.
__device__ __forceinline__ float fast_tanh(float x) {
    // 1 - 2 / (e^2x + 1): both ends saturate to 1 and -1.
    return 1.f - __fdividef(2.f, fast_exp2(x * (2 * kLog2E)) + 1.f);
}

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

// The bits of a key bias whatever its dtype. What they say is asked later, so that nothing waits for memory here.
__device__ __forceinline__ uint32_t load_key_bias(const BiasView& view, const char* bias, int64_t at) {
    return view.dtype == DataType::kFloat32 ? __ldg(reinterpret_cast<const uint32_t*>(bias) + at)
                                            : __ldg(reinterpret_cast<const uint16_t*>(bias) + at);
}
// -inf where it hides the key.
template <typename T>
__device__ __forceinline__ float key_bias_of(const BiasView& view, uint32_t bits) {
    const bool is_float = view.dtype == DataType::kFloat32;
    const float bias = is_float ? __uint_as_float(bits) : unpack<T>(bits).x;
    return bias <= (is_float ? kLeastFinite<float> : kLeastFinite<T>) ? -kInfinity : bias;
}
// Of one sequence and head; of any dtype.
__device__ __forceinline__ const char* bias_data(const BiasView& view, int64_t offset) {
    return static_cast<const char*>(view.data) + offset * (view.dtype == DataType::kFloat32 ? 4 : 2);
}

// x = scale * x + bias, one number a key; `bias` is in shared memory, its first key that of the accumulator.
template <int kMTiles, int kNTiles>
__device__ __forceinline__ void scale_and_add_bias(float (&acc)[kMTiles][kNTiles][4], float scale, const float* bias) {
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
        const float2 b = *reinterpret_cast<const float2*>(bias + n * 8 + fragment_col());
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

// x = scale * x + bias, one number a pair; the accumulator lies at (row, col) of the tile `bias`, which is
// read kAhead (0 or 1) steps before it is added.
template <typename T, int kAhead, int kMTiles, int kNTiles, typename Tile>
__device__ __forceinline__ void scale_and_add_bias(float (&acc)[kMTiles][kNTiles][4], float scale, const Tile& bias,
                                                   int row, int col) {
    static_assert(kNTiles % 2 == 0);
    constexpr int kAcross = kNTiles / 2, kSteps = kMTiles * kAcross;
    const uint32_t lane = bias.lane_down() + row * Tile::kSlabCols * sizeof(T);
    uint32_t b[2][4];  // the 8x8 blocks of an A operand are those of two accumulator tiles
    const auto load = [&](int step) {
        Tile::load_a(b[step % 2], lane, step / kAcross * 16, col + step % kAcross * 16);
    };
    if (kAhead > 0) load(0);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        const int m = step / kAcross, n = step % kAcross * 2;
        if (step + kAhead < kSteps) load(step + kAhead);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 pair = unpack<T>(b[step % 2][i]);
            float* x = acc[m][n + i / 2] + i % 2 * 2;
            x[0] = fmaf(x[0], scale, pair.x);
            x[1] = fmaf(x[1], scale, pair.y);
        }
    }
}

// lse of a row in units of log2(e), for the exponents of its pairs. exp2(x - inf) = 0: an empty row, and one beyond the
// sequence, has no p. Nor has a pair that its bias hides, since lse is larger by far: of float16 by 32 at the least, the
// distance to the next visible bias. Nor has a row whose lse times log2(e) is no number of float32; it must not become -inf
// here.
__device__ __forceinline__ float lse_to_log2(float lse, bool exists) {
    return exists && lse != -kInfinity ? max_or_nan(lse * kLog2E, -FLT_MAX) : kInfinity;
}

// p of a pair from its product s = q k, or from tanh. shift: bias - lse, times log2(e). scale_log2: the scale, or the softcap,
// times log2(e). p is not above 1, as in the forward, where lse is a sum of rounded numbers.
__device__ __forceinline__ float probability(float s, float scale_log2, float shift) {
    return fast_exp2(min_or_nan(fmaf(s, scale_log2, shift), 0.f));
}

// From the products s = q k and dp = do v of a pair to p and ds, 0 where it is not visible; gives dx, which then may be
// anything. shift, scale_log2: as above.
template <bool kSoftcap>
__device__ __forceinline__ float score_gradient(float& s, float& dp, float shift, float delta, float scale_log2,
                                                float scale_of_capped, bool is_visible) {
    float capped = 0;
    if (kSoftcap) s = capped = fast_tanh(s * scale_of_capped);
    const float prob = probability(s, scale_log2, shift);
    const float dx = prob * (dp - delta);
    s = is_visible ? prob : 0;
    dp = !is_visible ? 0 : kSoftcap ? dx * (1 - capped * capped) : dx;
    return dx;
}

// S and dP to P and dS of some of a tile's pairs; they begin at (row, key) of it. `stage` has the rows' lse
// and delta and, of a key bias, key_bias; visibility.word(row, w) is asked for this lane's keys alone.
// dense_bias(to, m, n) gives the bias of a block of 16 x 16 pairs as load_a does. take(m, h, n, dx, is_visible) is given
// dx of two neighbouring pairs, of row m, h and the keys of n, before it becomes ds; where one is not visible its dx may
// be anything.
template <typename T, BiasKind kBias, bool kMasked, bool kSoftcap, int kMTiles, int kNTiles, typename Stage,
          typename Visibility, typename DenseBias, typename Take>
__device__ __forceinline__ void differentiate(float (&s)[kMTiles][kNTiles][4], float (&dp)[kMTiles][kNTiles][4],
                                              const Stage& stage, const DenseBias& dense_bias,
                                              const Visibility& visibility, int row, int key, int rows, float scale,
                                              float softcap, const Take& take) {
    const int lane = lane_id();
    const float scale_log2 = (kSoftcap ? softcap : scale) * kLog2E;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
        float lse[2], delta[2];
        constexpr int kKeys = kNTiles * 8, kWords = ceil_div(kKeys, 32);
        uint32_t visible[2][kWords];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int r = row + m * 16 + h * 8 + fragment_row(lane);
            lse[h] = lse_to_log2(stage.lse[r], r < rows);
            delta[h] = lse[h] != kInfinity ? stage.delta[r] : 0;
            if (kMasked) {
#pragma unroll
                for (int w = 0; w < kWords; ++w)
                    visible[h][w] =
                        visibility.word(r, key / 32 + w) >> (kKeys % 32 ? key % 32 : 0) >> (fragment_col(lane));
            }
        }
#pragma unroll
        for (int n = 0; n < kNTiles; n += 2) {
            uint32_t bias[4];
            if (kBias == BiasKind::kDense) dense_bias(bias, m, n);
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // in the order of the 8x8 blocks
                const int h = i % 2, k = n + i / 2;
                float2 b = {0, 0};
                if (kBias == BiasKind::kDense) {
                    b = unpack<T>(bias[i]);
                    b = {b.x * kLog2E, b.y * kLog2E};
                } else if (kBias == BiasKind::kKey) {
                    b = *reinterpret_cast<const float2*>(stage.key_bias + key + k * 8 + fragment_col(lane));
                }
                const float shift[2] = {b.x - lse[h], b.y - lse[h]};
                float dx[2];
                bool is_visible[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    is_visible[e] = !kMasked || visible[h][k / 4] & (1u << (k % 4 * 8 + e));
                    dx[e] = score_gradient<kSoftcap>(s[m][k][2 * h + e], dp[m][k][2 * h + e], shift[e], delta[h],
                                                     scale_log2, scale / softcap, is_visible[e]);
                }
                take(m, h, k, dx, is_visible);
            }
        }
    }
}

}  // namespace flash_dmattn::cuda
