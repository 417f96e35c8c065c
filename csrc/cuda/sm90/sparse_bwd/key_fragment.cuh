// The gathered keys that a lane of an MMA warpgroup holds: P and dS of their scores, the key bias's gradient, and the
// addition of dK and dV to their sums in global memory.
#pragma once

#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/memory.cuh"
#include "cuda/arch/tma.cuh"
#include "cuda/arch/atomic_add.cuh"
#include "cuda/softmax/scores.cuh"
#include "cuda/mask/gathered_key.cuh"
#include "cuda/sm90/bwd/scale.h"

namespace flash_dmattn::cuda::sm90 {

// A warp's staging buffers for TMA additions of dK and dV: 8 keys by kCols columns each.
template <int kCols_, int kStages_>
struct KeyGradientStages {
    static constexpr int kCols = kCols_, kStages = kStages_;
    alignas(16) float stage[kStages][8][kCols + 8];  // rows are 8 banks apart: a quarter of a warp writes one
};

// A lane has two keys, rows of the transposed scores: keys 8 h + fragment_row() of the warp's 16.
template <BiasKind kBias>
class KeyFragment {
public:
    // The rows that see the lane's two keys: a bit for each of 32 rows.
    using VisibleRowBits = uint32_t[2];

    // warp_key: the warp's first key of the n_block.
    template <int kKeys>
    __device__ __forceinline__ void begin(const GatheredKeyMetadata<kKeys>& keys, int warp_key) {
        warp_key_ = warp_key;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            position_[h] = keys.position[key(h)];
            bias_[h] = kBias == BiasKind::kKey ? keys.bias[key(h)] : 0;
            dbias_[h] = 0;
        }
    }

    // Rows [32 w, 32 w + 32).
    template <int kKeys>
    __device__ __forceinline__ void load_visible_rows(const GatheredKeyMetadata<kKeys>& keys, int w,
                                                      VisibleRowBits& rows) const {
        rows[0] = keys.rows[key(0)][w], rows[1] = keys.rows[key(1)][w];
    }

    // S and dP to P and dS of 32 rows, fragments [m, m + 4) of the accumulators. lse and delta begin at these rows.
    template <int kFragments>
    __device__ __forceinline__ void compute_p_ds_gathered(const BwdScale& scale, const VisibleRowBits& visible_rows,
                                                          float (&s)[1][kFragments][4], float (&dp)[1][kFragments][4],
                                                          int m, const float* lse, const float* delta) {
        if (scale.softcap > 0) {
            compute_p_ds_gathered<true, true>(scale, visible_rows, s, dp, m, lse, delta);
        } else if (__all_sync(~0u, (visible_rows[0] & visible_rows[1]) == ~0u)) {
            compute_p_ds_gathered<false, false>(scale, visible_rows, s, dp, m, lse, delta);
        } else {
            compute_p_ds_gathered<true, false>(scale, visible_rows, s, dp, m, lse, delta);
        }
    }

    // Adds the key bias's gradient, the sum of dS over the rows.
    __device__ __forceinline__ void add_dbias(const BwdArgs& p, const Sequence& s, int head) const {
        if (kBias != BiasKind::kKey || p.dbias.data == nullptr) return;
        float* to = static_cast<float*>(p.dbias.data) + score_offset(p.dbias, s, head, p.heads);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float sum = row_sum(dbias_[h]);
            if (is_row_leader() && position_[h] >= 0) reduce_add(to + position_[h] * p.dbias.col_stride, sum);
        }
    }

    // Adds dK or dV to rows of global memory by TMA. `stage`: the next staging buffer.
    template <typename Stages, int kFragments>
    __device__ __forceinline__ void tma_reduce_add_dkv(const float (&acc)[1][kFragments][4], float* to,
                                                       int64_t row_stride, Stages& stages, int& stage) const {
        constexpr int kCols = Stages::kCols, kStages = Stages::kStages;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int position = __shfl_sync(~0u, position_[h], lane_id() % 8 * 4);  // of key lane_id()
            const bool adds = lane_id() < 8 && position >= 0;
            float* row = to + position * row_stride;
#pragma unroll
            for (int col = 0; col < kFragments * 8; col += kCols) {
                auto& rows = stages.stage[stage];
                tma_store_wait_group_read<kStages - 1>();
                __syncwarp();
                float* lane = rows[fragment_row()] + fragment_col();
#pragma unroll
                for (int n = 0; n < kCols / 8; ++n) {
                    const float* x = acc[0][col / 8 + n] + 2 * h;
                    *reinterpret_cast<float2*>(lane + n * 8) = {x[0], x[1]};
                }
                fence_proxy_async();
                __syncwarp();
                if (adds) tma_reduce_add(row + col, smem_address(rows[lane_id()]), kCols * sizeof(float));
                tma_store_commit_group();
                stage = stage == kStages - 1 ? 0 : stage + 1;
            }
        }
    }
    // The same from registers, where shared memory has no room. An even lane and the next exchange halves of two
    // fragments: each then adds four columns of one of them.
    template <int kFragments>
    __device__ __forceinline__ void reduce_add_dkv(const float (&acc)[1][kFragments][4], float* to,
                                                   int64_t row_stride) const {
        static_assert(kFragments % 2 == 0);
        const bool is_odd = lane_id() % 2;
        const int col = lane_id() % 4 / 2 * 4 + (is_odd ? 8 : 0);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float* row = to + position_[h] * row_stride + col;
#pragma unroll
            for (int n = 0; n < kFragments; n += 2) {
                const float *first = acc[0][n] + 2 * h, *second = acc[0][n + 1] + 2 * h;
                const float x = __shfl_xor_sync(~0u, is_odd ? first[0] : second[0], 1);
                const float y = __shfl_xor_sync(~0u, is_odd ? first[1] : second[1], 1);
                const float four[4] = {is_odd ? x : first[0], is_odd ? y : first[1], is_odd ? second[0] : x,
                                       is_odd ? second[1] : y};
                if (position_[h] >= 0) reduce_add(row + n * 8, four);
            }
        }
    }

private:
    // Key h of the n_block.
    __device__ int key(int h) const { return warp_key_ + h * 8 + fragment_row(); }

    template <bool kMasked, bool kSoftcap, int kFragments>
    __device__ __forceinline__ void compute_p_ds_gathered(const BwdScale& scale, const VisibleRowBits& visible_rows,
                                                          float (&s)[1][kFragments][4], float (&dp)[1][kFragments][4],
                                                          int m, const float* lse, const float* delta) {
        const float scale_log2 = kSoftcap ? scale.softcap * kLog2E : scale.scale_log2,
                    scale_of_capped = kSoftcap ? scale.scale / scale.softcap : 0;
        const uint32_t bits[2] = {visible_rows[0] >> fragment_col(), visible_rows[1] >> fragment_col()};
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const float2 row_lse = *reinterpret_cast<const float2*>(lse + n * 8 + fragment_col());
            const float2 row_delta = *reinterpret_cast<const float2*>(delta + n * 8 + fragment_col());
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const bool is_visible = !kMasked || bits[h] & (1u << (n * 8 + e));
                    const float dx = score_gradient<kSoftcap>(
                        s[0][m + n][2 * h + e], dp[0][m + n][2 * h + e], bias_[h] - (e ? row_lse.y : row_lse.x),
                        e ? row_delta.y : row_delta.x, scale_log2, scale_of_capped, is_visible);
                    if (kBias == BiasKind::kKey) dbias_[h] += is_visible ? dx : 0.f;
                }
        }
    }

    int warp_key_;
    int position_[2];  // in the sequence; -1 where no row sees the key
    float bias_[2], dbias_[2];
};

}  // namespace flash_dmattn::cuda::sm90
