// Online softmax: running maximum and sum per row, and the rescaling of the output accumulator.
#pragma once

#include "cuda/arch/math.cuh"
#include "cuda/arch/fragment.cuh"

namespace flash_dmattn::cuda {

// State of a warp's 16 * kMFragments rows in the accumulator layout of fragment.cuh: element [2 m + h] belongs to row
// 16 m + 8 h + fragment_row(). Scores times `scale_log2` are exponents of 2.
template <int kMFragments>
struct OnlineSoftmax {
    // Lazy rescaling: the base stays below the row maximum while no exponential exceeds 2^kRescaleThreshold.
    static constexpr float kRescaleThreshold = 8;
    // Above this shift, the rounding error of score * scale_log2 - shift is visible, so the base is subtracted first.
    static constexpr float kMaxShift = 1 << 20;

    float max[kMFragments * 2];
    float sum[kMFragments * 2];  // over this lane's columns

    __device__ OnlineSoftmax() {
#pragma unroll
        for (int i = 0; i < kMFragments * 2; ++i) {
            max[i] = -kInfinity;
            sum[i] = 0;
        }
    }

    // Replaces scores by exp(score - base). correct(i, factor) rescales row i of the output accumulator to the new
    // base. mask_extremes() is called before a row maximum becomes a finite number below `extreme`, and may set
    // scores to -inf.
    template <int kNFragments, typename MaskExtremes, typename Correct>
    __device__ __forceinline__ void update(float (&scores)[kMFragments][kNFragments][4], float scale_log2,
                                           float extreme, const MaskExtremes& mask_extremes, const Correct& correct,
                                           float rescale_threshold = kRescaleThreshold) {
        float largest[kMFragments * 2];
        const auto compute_max = [&] {
            float odd[kMFragments * 2];  // odd columns: a second, independent dependency chain
#pragma unroll
            for (int i = 0; i < kMFragments * 2; ++i) largest[i] = odd[i] = max[i];
#pragma unroll
            for (int n = 0; n < kNFragments; ++n)
#pragma unroll
                for (int i = 0; i < kMFragments * 2; ++i) {
                    largest[i] = fmaxf(largest[i], scores[i / 2][n][i % 2 * 2]);
                    odd[i] = fmaxf(odd[i], scores[i / 2][n][i % 2 * 2 + 1]);
                }
#pragma unroll
            for (int i = 0; i < kMFragments * 2; ++i) largest[i] = row_max(fmaxf(largest[i], odd[i]));
        };
        float shift[kMFragments * 2];
        const auto compute_shift = [&](int i) {
            shift[i] = (max[i] == -kInfinity ? 0.f : max[i]) * scale_log2;
            return fabsf(shift[i]) > kMaxShift;
        };
        bool changes = false, is_large = false;
#pragma unroll
        for (int i = 0; i < kMFragments * 2; ++i) is_large |= compute_shift(i);
        compute_max();
#pragma unroll
        for (int i = 0; i < kMFragments * 2; ++i) {
            if ((largest[i] - max[i]) * scale_log2 <= rescale_threshold) largest[i] = max[i];
            changes |= largest[i] != max[i];
        }
        if (__any_sync(~0u, changes || is_large)) {  // rare
            bool is_extreme = false;
#pragma unroll
            for (int i = 0; i < kMFragments * 2; ++i) is_extreme |= largest[i] < extreme && largest[i] != -kInfinity;
            if (extreme > -kInfinity && __any_sync(~0u, is_extreme)) {
                mask_extremes();
                compute_max();
            }
            is_large = false;
#pragma unroll
            for (int i = 0; i < kMFragments * 2; ++i) {
                const float base = largest[i] == -kInfinity ? 0.f : largest[i];  // no -inf - -inf
                const float correction = fast_exp2((max[i] - base) * scale_log2);
                max[i] = largest[i];
                sum[i] *= correction;
                correct(i, correction);
                is_large |= compute_shift(i);
            }
            // Large scores are exact after the base is subtracted.
            if (__any_sync(~0u, is_large)) {
#pragma unroll
                for (int i = 0; i < kMFragments * 2; ++i) {
                    const float base = fabsf(shift[i]) > kMaxShift ? max[i] : 0.f;
                    if (base != 0) shift[i] = 0;
#pragma unroll
                    for (int n = 0; n < kNFragments; ++n) {
                        scores[i / 2][n][i % 2 * 2] -= base;
                        scores[i / 2][n][i % 2 * 2 + 1] -= base;
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < kMFragments * 2; ++i)
#pragma unroll
            for (int n = 0; n < kNFragments; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& x = scores[i / 2][n][i % 2 * 2 + e];
                    x = fast_exp2(fmaf(x, scale_log2, -shift[i]));
                    sum[i] += x;
                }
    }

    // Multiplies row i of `out` by a factor.
    template <int kOutTiles>
    static __device__ __forceinline__ void scale(float (&out)[kMFragments][kOutTiles][4], int i, float factor) {
#pragma unroll
        for (int n = 0; n < kOutTiles; ++n) {
            out[i / 2][n][i % 2 * 2] *= factor;
            out[i / 2][n][i % 2 * 2 + 1] *= factor;
        }
    }

    // Returns 1 / sum of row i and writes its lse (scores times `unit` are natural exponents); 0 and -inf for an
    // empty row.
    __device__ __forceinline__ float finish(int i, float unit, float& lse) {
        const float total = row_sum(sum[i]);
        const bool empty = total == 0;
        lse = empty ? -kInfinity : fmaf(max[i], unit, logf(total));
        return empty ? 0.f : 1.f / total;
    }
};

}  // namespace flash_dmattn::cuda
