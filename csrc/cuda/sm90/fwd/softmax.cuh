// The online softmax of the sm90 forward, which avoids row maxima.
//
// The GEMMs of a warpgroup wait for its softmax and the reverse, so that every instruction here delays the n_block.
// OnlineSoftmax keeps a base while no exponential exceeds 2^kRescaleThreshold (lazy rescaling). So exponentials are
// first computed with the last base. If a lane's part of the sums of its two rows exceeds 2^kRescaleThreshold, they are
// computed again with the row maxima.
#pragma once

#include "cuda/arch/fragment.cuh"
#include "cuda/arch/math.cuh"
#include "cuda/softmax/online_softmax.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename T>
class FwdSoftmax : public OnlineSoftmax<1> {
public:
    FwdSoftmax() = default;
    // Rows that see no key (row_end 0) need no base.
    __device__ explicit FwdSoftmax(const int (&row_end)[2]) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (row_end[i] == 0) max[i] = 0;
    }

    // Computes probs = exp(score - base), as the A operand of the next GEMM. The other parameters are those of
    // OnlineSoftmax::update.
    template <int kFragments, typename MaskExtremes, typename Correct>
    __device__ __forceinline__ void update(float (&scores)[1][kFragments][4], uint32_t (&probs)[kFragments / 2][4],
                                           float scale_log2, float extreme, const MaskExtremes& mask_extremes,
                                           const Correct& correct) {
        const bool tries = skips_ == 0;
        if (tries && try_base(scores, probs, scale_log2)) return;
        OnlineSoftmax<1>::update(scores, scale_log2, extreme, mask_extremes, correct, tries ? 0.f : kRescaleThreshold);
        to_a_operand<T>(scores, probs);
        // Bases that rise often are not tried often.
        if (tries) {
            skips_ = next_skips_;
            next_skips_ *= 2;
        } else {
            --skips_;
        }
        set_shifts(scale_log2);
    }

    // From here on scores are those so far times `scale`.
    __device__ __forceinline__ void scale_base(float scale) {
#pragma unroll
        for (int i = 0; i < 2; ++i) max[i] *= scale;
    }

    // From here on scores are those so far plus `delta`.
    __device__ __forceinline__ void shift_base(float delta, float scale_log2) {
#pragma unroll
        for (int i = 0; i < 2; ++i) max[i] += delta;
        set_shifts(scale_log2);
    }

private:
    // After the bases have changed. Exponentials are not tried with a base that is too large, or that a row lacks.
    __device__ __forceinline__ void set_shifts(float scale_log2) {
        bool needs_max = false;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            shift_[i] = max[i] * scale_log2;
            needs_max |= !(fabsf(shift_[i]) <= kMaxShift);
        }
        if (skips_ == 0 && __any_sync(~0u, needs_max)) skips_ = 1;
    }
    // Returns false, and leaves the sums, if an exponential may exceed 2^kRescaleThreshold.
    template <int kFragments>
    __device__ __forceinline__ bool try_base(const float (&scores)[1][kFragments][4],
                                             uint32_t (&probs)[kFragments / 2][4], float scale_log2) {
        float sums[2] = {0, 0};
#pragma unroll
        for (int k = 0; k < kFragments / 2; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* x = scores[0][2 * k + i / 2] + i % 2 * 2;
                const float shift = shift_[i % 2];
                const float p[2] = {fast_exp2(fmaf(x[0], scale_log2, -shift)),
                                    fast_exp2(fmaf(x[1], scale_log2, -shift))};
                sums[i % 2] += p[0];
                sums[i % 2] += p[1];
                probs[k][i] = pack<T>(p[0], p[1]);
            }
        constexpr float kMaxSum = 1 << static_cast<int>(kRescaleThreshold);
        if (__any_sync(~0u, !(sums[0] + sums[1] <= kMaxSum))) return false;
        sum[0] += sums[0];
        sum[1] += sums[1];
        return true;
    }

    // The same in all lanes: n_blocks whose maximum is computed without trying, and how many after the next failure.
    int skips_ = 1, next_skips_ = 1;
    float shift_[2];  // base times scale_log2
};

}  // namespace flash_dmattn::cuda::sm90
