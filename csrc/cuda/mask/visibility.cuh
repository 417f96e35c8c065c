// Which pairs are visible: mask, causality, lengths and biases that hide.
#pragma once

#include <cfloat>

#include "bits.cuh"
#include "cuda/arch/fragment.cuh"
#include "intervals.cuh"
#include "cuda/common/sequence.cuh"

namespace flash_dmattn::cuda {

// A bias hides a pair unless it is above the least finite number of its dtype: additive masks are full of it.
template <typename T>
constexpr float kLeastFinite = std::is_same_v<T, half_t>       ? -65504.f
                               : std::is_same_v<T, bfloat16_t> ? -0x1.fep127f
                                                               : -FLT_MAX;

// The keys that this lane's rows of an accumulator may see, 32 keys a word, the first key in the lowest bit; index [2 m + h]
// is row 16 m + 8 h + fragment_row().
template <int kMTiles, int kNTiles>
using VisibleKeys = uint32_t[kMTiles * 2][kNTiles / 4];

// x = -inf where a pair is invisible: here alone masks, causality, lengths and keys hidden by their bias take effect.
template <int kMTiles, int kNTiles>
__device__ __forceinline__ void apply_mask(float (&acc)[kMTiles][kNTiles][4],
                                           const VisibleKeys<kMTiles, kNTiles>& visible) {
    static_assert(kNTiles % 4 == 0);
#pragma unroll
    for (int i = 0; i < kMTiles * 2; ++i)
#pragma unroll
        for (int word = 0; word < kNTiles / 4; ++word) {
            const uint32_t bits = visible[i][word] >> (fragment_col());
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
// row_bits[2 m + h] selects row 16 m + 8 h + fragment_row() in it.
template <int kMTiles, int kNTiles>
__device__ __forceinline__ void apply_mask(float (&acc)[kMTiles][kNTiles][4], const uint32_t* rows,
                                           const uint32_t (&row_bits)[kMTiles * 2]) {
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
        const uint2 seeing = *reinterpret_cast<const uint2*>(rows + n * 8 + fragment_col());
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
__device__ __forceinline__ void apply_bias_mask(float (&acc)[kMTiles][kNTiles][4], const At& at) {
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
                    const T bias = *at(m * 16 + i / 2 * 8 + fragment_row(), n * 8 + fragment_col() + i % 2);
                    if (to_float(bias) <= kLeastFinite<T>) x = -kInfinity;
                }
            }
}

// Which pairs of a tile are visible, 32 keys of a row in a word: mask, causality and lengths.
template <int kRows, int kKeys, bool kCausal>
struct BlockVisibility {
    const uint32_t (*mask)[kKeys / 32];  // null where there is none
    const int2* intervals;               // null where there are none
    int first_row;
    int limit;       // of the tile's keys, without causality
    int diagonal;    // row r of the tile sees its keys below diagonal + r
    bool mask_full;  // the mask hides nothing of the tile

    template <typename Stage>
    __device__ BlockVisibility(const AttentionParams& p, const Sequence& s, const Stage& stage, int m_block,
                               int n_block, bool mask_full)
        : mask(p.packed_mask.bits != nullptr ? stage.mask : nullptr),
          intervals(p.interval_summaries.tiles != nullptr ? stage.intervals : nullptr),
          first_row(m_block * kRows),
          limit(s.keys - n_block * kKeys),
          diagonal(m_block * kRows + 1 + s.keys - s.rows - n_block * kKeys),
          mask_full(mask_full) {}

    // Whether every pair is visible.
    __device__ bool full() const { return mask_full && limit >= kKeys && (!kCausal || diagonal >= kKeys); }
    __device__ uint32_t word(int row, int w) const {
        const uint32_t visible = bits_below(kCausal ? min(limit, diagonal + row) : limit, w);
        if (mask != nullptr) return visible & mask[row][w];
        return intervals == nullptr ? visible : visible & keys_seen(intervals + w * 32, first_row + row);
    }
};

// The same of gathered keys, whose rows stand by key; (row, key) is where the warp's part of the tile begins.
template <typename Stage>
struct GatheredVisibility {
    const Stage& stage;
    int row, key;

    __device__ bool full() const { return stage.seen_by_all[row / 32][key / 32] == ~0u; }
    // 32 keys of a row, of which only this lane's are told.
    __device__ __forceinline__ uint32_t word(int r, int w) const {
        const int lane_key = fragment_col();
        uint32_t bits = 0;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const uint2 rows = *reinterpret_cast<const uint2*>(&stage.rows[r / 32][w * 32 + n * 8 + lane_key]);
            bits |= (rows.x >> r % 32 & 1) << n * 8 | (rows.y >> r % 32 & 1) << (n * 8 + 1);
        }
        return bits << lane_key;
    }
};

}  // namespace flash_dmattn::cuda
