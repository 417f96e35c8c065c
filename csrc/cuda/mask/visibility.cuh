// Applies masks to scores: bool masks, intervals, causality, sequence lengths, and biases that mask.
#pragma once

#include <cfloat>

#include "bits.cuh"
#include "cuda/arch/fragment.cuh"
#include "intervals.cuh"
#include "cuda/common/sequence.cuh"

namespace flash_dmattn::cuda {

// A bias masks a score unless it is above finfo(dtype).min, which additive masks use for masked keys.
template <typename T>
constexpr float kLowest = std::is_same_v<T, half_t>       ? -65504.f
                          : std::is_same_v<T, bfloat16_t> ? -0x1.fep127f
                                                          : -FLT_MAX;

// Visible keys of this lane's accumulator rows, 32 keys per word, first key in the lowest bit. Element [2 m + h]
// belongs to row 16 m + 8 h + fragment_row().
template <int kMFragments, int kNFragments>
using VisibleKeys = uint32_t[kMFragments * 2][kNFragments / 4];

// x = -inf where a score is masked. Masks, causality, lengths and key biases that mask take effect only here.
template <int kMFragments, int kNFragments>
__device__ __forceinline__ void apply_mask(float (&acc)[kMFragments][kNFragments][4],
                                           const VisibleKeys<kMFragments, kNFragments>& visible) {
    static_assert(kNFragments % 4 == 0);
#pragma unroll
    for (int i = 0; i < kMFragments * 2; ++i)
#pragma unroll
        for (int word = 0; word < kNFragments / 4; ++word) {
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

// The same with visible rows per key: `rows` in shared memory has a word for each key of the accumulator, and
// row_bits[2 m + h] selects the bit of row 16 m + 8 h + fragment_row().
template <int kMFragments, int kNFragments>
__device__ __forceinline__ void apply_mask(float (&acc)[kMFragments][kNFragments][4], const uint32_t* rows,
                                           const uint32_t (&row_bits)[kMFragments * 2]) {
#pragma unroll
    for (int n = 0; n < kNFragments; ++n) {
        const uint2 visible_rows = *reinterpret_cast<const uint2*>(rows + n * 8 + fragment_col());
#pragma unroll
        for (int i = 0; i < kMFragments * 2; ++i) {
            float* x = acc[i / 2][n] + i % 2 * 2;
            x[0] = visible_rows.x & row_bits[i] ? x[0] : -kInfinity;
            x[1] = visible_rows.y & row_bits[i] ? x[1] : -kInfinity;
        }
    }
}

// x = -inf where a dense bias masks a score. Only needed for rows whose other scores are masked too. at(row, key)
// returns the address of the bias.
template <typename T, int kMFragments, int kNFragments, typename At>
__device__ __forceinline__ void apply_bias_mask(float (&acc)[kMFragments][kNFragments][4], const At& at) {
#pragma unroll
    for (int m = 0; m < kMFragments; ++m)
#pragma unroll
        for (int n = 0; n < kNFragments; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& x = acc[m][n][i];
                if constexpr (!std::is_same_v<T, half_t>) {
                    // Adding a score to finfo(bfloat16).min or finfo(float32).min does not change it in float32.
                    x = x <= kLowest<T> ? -kInfinity : x;
                } else if (x < kLowest<T> / 2 && x != -kInfinity) {
                    const T bias = *at(m * 16 + i / 2 * 8 + fragment_row(), n * 8 + fragment_col() + i % 2);
                    if (to_float(bias) <= kLowest<T>) x = -kInfinity;
                }
            }
}

// Visible keys of the rows of a block by mask, causality and lengths, 32 keys per word.
template <int kRows, int kKeys>
struct BlockVisibility {
    const uint32_t (*mask)[kKeys / 32];  // or null
    const int2* intervals;               // or null
    int first_row;
    int limit;       // keys of the block inside the sequence
    int diagonal;    // by causality, row r of the block sees its keys below diagonal + r; without, kKeys
    bool mask_full;  // no score of the block is masked

    template <typename Stage>
    __device__ BlockVisibility(const AttentionParams& p, const Sequence& s, const Stage& stage, int m_block,
                               int n_block, bool mask_full)
        : mask(p.packed_mask.present() ? stage.mask : nullptr),
          intervals(p.interval_summaries.present() ? stage.intervals : nullptr), first_row(m_block * kRows),
          limit(s.keys - n_block * kKeys),
          diagonal(p.is_causal ? m_block * kRows + 1 + s.keys - s.rows - n_block * kKeys : kKeys),
          mask_full(mask_full) {}

    // Whether every score is visible.
    __device__ bool full() const { return mask_full && limit >= kKeys && diagonal >= kKeys; }
    __device__ uint32_t word(int row, int w) const {
        const uint32_t visible = bits_below(min(limit, diagonal + row), w);
        if (mask != nullptr) return visible & mask[row][w];
        return intervals == nullptr ? visible : visible & visible_key_bits(intervals + w * 32, first_row + row);
    }
};

// The same for gathered keys, whose mask is stored per key; (row, key) is the origin of the warp's part of the block.
template <typename Stage>
struct GatheredVisibility {
    const Stage& stage;
    int row, key;

    __device__ bool full() const { return stage.seen_by_all[row / 32][key / 32] == ~0u; }
    // Visible keys of a row; only this lane's bits are valid.
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
