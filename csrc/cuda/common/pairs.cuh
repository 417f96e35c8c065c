// x_ij from q_i k_j: softcap, bias and visibility, applied to accumulators in registers. Forward and backward ask here.
//
// An accumulator is acc[kMTiles][kNTiles][4], tiles of 16 rows by 8 keys as mma_m16n8k16 lays them out: this lane's rows
// are 16 m + 8 h + lane / 4 for h in {0, 1}, its keys 8 n + 2 (lane % 4) + {0, 1}, and acc[m][n][2 h + e] is one pair.
#pragma once

#include <cfloat>

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

// A bias hides a pair unless it is above the least finite number of its dtype: additive masks are full of it.
template <typename T>
constexpr float kLeastFinite = std::is_same_v<T, half_t> ? -65504.f : std::is_same_v<T, bfloat16_t> ? -0x1.fep127f : -FLT_MAX;

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

// x = scale * x + bias, one number a pair; the accumulator lies at (row, col) of the tile `bias`, which is
// read kAhead (0 or 1) steps before it is added.
template <typename T, int kAhead, int kMTiles, int kNTiles, typename Tile>
__device__ __forceinline__ void scale_and_add_bias(float (&acc)[kMTiles][kNTiles][4], float scale, const Tile& bias,
                                                   int row, int col) {
    static_assert(kNTiles % 2 == 0);
    constexpr int kAcross = kNTiles / 2, kSteps = kMTiles * kAcross;
    const uint32_t lane = bias.lane_down() + row * Tile::kPanelCols * sizeof(T);
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

// The keys that this lane's rows of an accumulator may see, 32 keys a word, the first key in the lowest bit; index [2 m + h]
// is row 16 m + 8 h + lane / 4.
template <int kMTiles, int kNTiles>
using VisibleKeys = uint32_t[kMTiles * 2][kNTiles / 4];

// x = -inf where a pair is invisible: here alone masks, causality, lengths and keys hidden by their bias take effect.
template <int kMTiles, int kNTiles>
__device__ __forceinline__ void hide_invisible(float (&acc)[kMTiles][kNTiles][4],
                                               const VisibleKeys<kMTiles, kNTiles>& visible) {
    static_assert(kNTiles % 4 == 0);
#pragma unroll
    for (int i = 0; i < kMTiles * 2; ++i)
#pragma unroll
        for (int word = 0; word < kNTiles / 4; ++word) {
            const uint32_t bits = visible[i][word] >> (lane_id() % 4 * 2);
#pragma unroll
            for (int n = 0; n < 4; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& x = acc[i / 2][word * 4 + n][i % 2 * 2 + e];
                    x = bits & (1u << (n * 8 + e)) ? x : -kInfinity;
                }
        }
}

// The same where visibility stands by keys: `rows` in shared memory has a word for each key of the accumulator, and
// row_bits[2 m + h] selects row 16 m + 8 h + lane / 4 in it.
template <int kMTiles, int kNTiles>
__device__ __forceinline__ void hide_invisible(float (&acc)[kMTiles][kNTiles][4], const uint32_t* rows,
                                               const uint32_t (&row_bits)[kMTiles * 2]) {
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
        const uint2 seeing = *reinterpret_cast<const uint2*>(rows + n * 8 + lane_id() % 4 * 2);
#pragma unroll
        for (int i = 0; i < kMTiles * 2; ++i) {
            float* x = acc[i / 2][n] + i % 2 * 2;
            x[0] = seeing.x & row_bits[i] ? x[0] : -kInfinity;
            x[1] = seeing.y & row_bits[i] ? x[1] : -kInfinity;
        }
    }
}

// x = -inf where a dense bias hides a pair, for rows that may see nothing else. at(row, key) is where the bias of a pair of
// the accumulator stands.
template <typename T, int kMTiles, int kNTiles, typename At>
__device__ __forceinline__ void hide_where_bias_hides(float (&acc)[kMTiles][kNTiles][4], const At& at) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int n = 0; n < kNTiles; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& x = acc[m][n][i];
                if constexpr (std::is_same_v<T, bfloat16_t>) {
                    // The least finite bfloat16 is so large that nothing that was added to it is seen.
                    x = x <= kLeastFinite<T> ? -kInfinity : x;
                } else if (x < kLeastFinite<T> / 2 && x != -kInfinity) {
                    const T bias = *at(m * 16 + i / 2 * 8 + lane_id() / 4, n * 8 + lane_id() % 4 * 2 + i % 2);
                    if (to_float(bias) <= kLeastFinite<T>) x = -kInfinity;
                }
            }
}

}  // namespace flash_dmattn::cuda
