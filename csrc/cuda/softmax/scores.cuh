// Score arithmetic on accumulators (fragment.cuh): scale, softcap, bias, and the derivative. Shared by forward and
// backward, dense and gathered kernels, sm80 and sm90.
#pragma once

#include <cfloat>
#include <type_traits>

#include "cuda/arch/math.cuh"
#include "params.h"
#include "cuda/arch/fragment.cuh"
#include "cuda/mask/visibility.cuh"

namespace flash_dmattn::cuda {

// tanh with an absolute error of a few 1e-7; tanh.approx has 5e-4.
__device__ __forceinline__ float fast_tanh(float x) {
    // 1 - 2 / (e^2x + 1): both ends saturate to 1 and -1.
    return 1.f - __fdividef(2.f, fast_exp2(x * (2 * kLog2E)) + 1.f);
}

// x = scale * x; with a softcap, x = softcap * tanh(scale * x / softcap).
template <int kMFragments, int kNFragments>
__device__ __forceinline__ void scale_and_cap(float (&acc)[kMFragments][kNFragments][4], float scale, float softcap) {
    const float inner = softcap > 0 ? scale / softcap : scale;
#pragma unroll
    for (int m = 0; m < kMFragments; ++m)
#pragma unroll
        for (int n = 0; n < kNFragments; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[m][n][i] *= inner;
    if (softcap > 0) {
#pragma unroll
        for (int m = 0; m < kMFragments; ++m)
#pragma unroll
            for (int n = 0; n < kNFragments; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) acc[m][n][i] = softcap * fast_tanh(acc[m][n][i]);
    }
}

// A key bias as loaded: the halves of 32 bits; of 16 bits both are the bias. Two loads without a branch: predicated
// loads of either size to one register would wait for each other.
struct KeyBiasBits {
    uint32_t low = 0, high = 0;
};

// Loads a key bias of any dtype. key_bias_of converts it later, so that the load does not stall here.
__device__ __forceinline__ KeyBiasBits load_key_bias(const BiasView& view, const char* bias, int64_t at) {
    const bool is_float = view.dtype == DataType::kFloat32;
    const auto* const halves = reinterpret_cast<const uint16_t*>(bias + at * (is_float ? 4 : 2));
    return {__ldg(halves), __ldg(halves + (is_float ? 1 : 0))};
}
// Converts the bits; -inf if the bias masks the key.
template <typename T, typename View>
__device__ __forceinline__ float key_bias_of(const View& view, uint32_t bits) {
    const bool is_float = view.dtype == DataType::kFloat32;
    const float bias = is_float ? __uint_as_float(bits) : unpack<T>(bits).x;
    return bias <= (is_float ? kLowest<float> : kLowest<T>) ? -kInfinity : bias;
}
template <typename T, typename View>
__device__ __forceinline__ float key_bias_of(const View& view, const KeyBiasBits& bits) {
    return key_bias_of<T>(view, view.dtype == DataType::kFloat32 ? bits.high << 16 | bits.low : bits.low);
}
// Address of the bias of one sequence and head, in bytes.
__device__ __forceinline__ const char* bias_data(const BiasView& view, int64_t offset) {
    return static_cast<const char*>(view.data) + offset * (view.dtype == DataType::kFloat32 ? 4 : 2);
}

// The bias of a key of the sequence, times log2(e): -inf where it masks the key, 0 beyond the sequence.
template <typename T>
__device__ __forceinline__ float key_bias_log2(const AttentionParams& p, const Sequence& s, int head, int key) {
    if (key >= s.keys) return 0;
    const char* bias = bias_data(p.bias, score_offset(p.bias, s, head, p.heads));
    return key_bias_of<T>(p.bias, load_key_bias(p.bias, bias, key * p.bias.col_stride)) * kLog2E;
}

// x = scale * x + key bias. `bias` is in shared memory and starts at the accumulator's first key.
template <int kMFragments, int kNFragments>
__device__ __forceinline__ void scale_and_add_bias(float (&acc)[kMFragments][kNFragments][4], float scale,
                                                   const float* bias) {
#pragma unroll
    for (int n = 0; n < kNFragments; ++n) {
        const float2 b = *reinterpret_cast<const float2*>(bias + n * 8 + fragment_col());
#pragma unroll
        for (int m = 0; m < kMFragments; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float* x = acc[m][n] + 2 * h;
                x[0] = fmaf(x[0], scale, b.x);
                x[1] = fmaf(x[1], scale, b.y);
            }
    }
}

// x = scale * x + dense bias, of two neighbouring fragments. The bias of both is an A operand.
template <typename T>
__device__ __forceinline__ void scale_and_add_bias(float (*acc)[4], float scale, const uint32_t (&bias)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack<T>(bias[i]);
        float* x = acc[i / 2] + i % 2 * 2;
        x[0] = fmaf(x[0], scale, pair.x);
        x[1] = fmaf(x[1], scale, pair.y);
    }
}
// The same of all fragments. The accumulator's origin is (row, col) of the shared-memory tile `bias`, which is read
// kAhead (0 or 1) steps ahead.
template <typename T, int kAhead, int kMFragments, int kNFragments, typename Tile>
__device__ __forceinline__ void scale_and_add_bias(float (&acc)[kMFragments][kNFragments][4], float scale,
                                                   const Tile& bias, int row, int col) {
    static_assert(kNFragments % 2 == 0);
    constexpr int kAcross = kNFragments / 2, kSteps = kMFragments * kAcross;
    const uint32_t lane = bias.ldmatrix_lane_a() + row * Tile::kSlabCols * sizeof(T);
    uint32_t b[2][4];
    const auto load = [&](int step) {
        Tile::load_a(b[step % 2], lane, step / kAcross * 16, col + step % kAcross * 16);
    };
    if (kAhead > 0) load(0);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        if (step + kAhead < kSteps) load(step + kAhead);
        scale_and_add_bias<T>(acc[step / kAcross] + step % kAcross * 2, scale, b[step % 2]);
    }
}

// lse times log2(e), +inf for empty rows and rows beyond the sequence, so that exp2(x - lse) is 0. It is 0 for scores
// that a bias masks as well, because lse is larger by at least the spacing of biases near finfo.min (32 for float16).
// The product must not overflow to -inf.
__device__ __forceinline__ float lse_to_log2(float lse, bool exists) {
    return exists && lse != -kInfinity ? max_or_nan(lse * kLog2E, -FLT_MAX) : kInfinity;
}
// The same for the sm90 kernels, most of which do not clamp p. Because lse is rounded, p = exp2(x - lse) may exceed 1: a
// little where lse is small, without limit where it is large. There it is increased by about as much as rounding may
// change x - lse.
__device__ __forceinline__ float increased_lse_to_log2(float lse, bool exists) {
    const float x = lse_to_log2(lse, exists);
    return fabsf(x) < 0x1p15f ? x : fmaf(fabsf(x), 0x1p-22f, x);
}

// lse by increased_lse_to_log2, and D_i of a query row. D_i is 0 where the row sees no key.
struct RowStats {
    float lse, delta;

    __device__ bool is_empty() const { return lse == kInfinity; }
};

__device__ __forceinline__ RowStats load_row_stats(const BwdParams& p, const Sequence& s, int head, int row) {
    const bool exists = row < s.rows;
    const auto load = [&](const RowStatView& view) {
        return exists ? static_cast<const float*>(view.data)[stat_offset(view, s, head) + row] : 0;
    };
    const float delta = load(p.delta), lse = increased_lse_to_log2(load(p.lse), exists);
    return {lse, lse == kInfinity ? 0 : delta};
}

// p from s = q k, or from the tanh of the softcap. shift is (bias - lse) * log2(e); scale_log2 is the scale, or the
// softcap, times log2(e). kClamps: clamps p to 1.
template <bool kClamps>
__device__ __forceinline__ float probability(float s, float scale_log2, float shift) {
    const float x = fmaf(s, scale_log2, shift);
    return fast_exp2(kClamps ? min_or_nan(x, 0.f) : x);
}

// Whether a score may round so differently in forward and backward that p needs a clamp. A relative bias that is not
// left out of the scores: the forward of sm90 accumulates them onto it, as onto a key bias of at most 2^14, for which p
// may be 1.1. A dense bias in float16: beside biases near finfo.min the forward masks finfo.min, the backward does not.
template <typename T>
constexpr __host__ __device__ bool needs_clamp(BiasKind bias) {
    return is_relative(bias) || (bias == BiasKind::kDense && std::is_same_v<T, half_t>);
}

// Replaces s = q k by p and dp = do v by ds, 0 for masked scores. Returns dx, which is undefined for masked scores.
template <bool kSoftcap, bool kClamps = false>
__device__ __forceinline__ float score_gradient(float& s, float& dp, float shift, float delta, float scale_log2,
                                                float scale_of_capped, bool is_visible) {
    float capped = 0;
    if (kSoftcap) s = capped = fast_tanh(s * scale_of_capped);
    const float prob = probability<kClamps>(s, scale_log2, shift);
    const float dx = prob * (dp - delta);
    s = is_visible ? prob : 0;
    dp = !is_visible ? 0 : kSoftcap ? dx * (1 - capped * capped) : dx;
    return dx;
}

}  // namespace flash_dmattn::cuda
