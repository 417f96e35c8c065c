// The keys of a gathered tile as the lanes of a warp that multiplies hold them, where scores stand keys by rows: P and dS of
// their pairs, the gradient of their bias, and the way of their dK and dV to the sums in global memory.
#pragma once

#include "cuda/arch/mbarrier.cuh"
#include "cuda/arch/memory.cuh"
#include "cuda/arch/tma.cuh"
#include "cuda/arch/atomic_add.cuh"
#include "cuda/softmax/scores.cuh"
#include "cuda/mask/gathered_key.cuh"

namespace flash_dmattn::cuda::sm90 {

// A warp's sums of 8 keys, kCols columns at a time, on their way to global memory; kStages such parts.
template <int kCols_, int kStages_>
struct KeyGradientStages {
    static constexpr int kCols = kCols_, kStages = kStages_;
    alignas(16) float part[kStages][8][kCols + 8];  // rows 8 banks apart: a quarter of a warp writes one
};

// A lane's two.
template <BiasKind kBias>
class KeyFragment {
public:
    // first: the warp's first key of the tile.
    template <int kKeys>
    __device__ __forceinline__ void begin(const GatheredKeys<kKeys>& keys, int first) {
        first_ = first;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            place_[h] = keys.place[key(h)];
            bias_[h] = kBias == BiasKind::kKey ? keys.bias[key(h)] : 0;
            sums_[h] = 0;
        }
    }

    // S and dP to P and dS, of the 32 rows of word w of the list's, whose lse and delta these are. In the accumulators
    // they begin at m.
    template <int kKeys, int kTiles>
    __device__ __forceinline__ void differentiate(const AttentionParams& p, const GatheredKeys<kKeys>& keys, int w,
                                                  float (&s)[1][kTiles][4], float (&dp)[1][kTiles][4], int m,
                                                  const float* lse, const float* delta) {
        const uint32_t seen[2] = {keys.rows[key(0)][w], keys.rows[key(1)][w]};
        if (p.softcap > 0) {
            differentiate<true, true>(p, seen, s, dp, m, lse, delta);
        } else if (__all_sync(~0u, (seen[0] & seen[1]) == ~0u)) {
            differentiate<false, false>(p, seen, s, dp, m, lse, delta);
        } else {
            differentiate<true, false>(p, seen, s, dp, m, lse, delta);
        }
    }

    // The gradient of a key's bias is its sum of dx over the rows.
    __device__ __forceinline__ void add_dbias(const BwdArgs& p, const Sequence& s, int head) const {
        if (kBias != BiasKind::kKey || p.dbias.data == nullptr) return;
        float* to = static_cast<float*>(p.dbias.data) + score_offset(p.dbias, s, head, p.heads);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float sum = row_sum(sums_[h]);
            if (is_row_leader() && place_[h] >= 0) reduce_add(to + place_[h] * p.dbias.col_stride, sum);
        }
    }

    // Keys by columns, to rows of global memory, by way of shared memory. The parts are taken in turn, `part` is the next.
    template <typename Stages, int kTiles>
    __device__ __forceinline__ void add_staged(const float (&sum)[1][kTiles][4], float* to, int64_t row_stride,
                                               Stages& stages, int& part) const {
        constexpr int kCols = Stages::kCols, kStages = Stages::kStages;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int place = __shfl_sync(~0u, place_[h], lane_id() % 8 * 4);  // of key lane_id()
            const bool adds = lane_id() < 8 && place >= 0;
            float* row = to + place * row_stride;
#pragma unroll
            for (int col = 0; col < kTiles * 8; col += kCols) {
                auto& rows = stages.part[part];
                tma_store_wait_group_read<kStages - 1>();
                __syncwarp();
                float* lane = rows[fragment_row()] + fragment_col();
#pragma unroll
                for (int n = 0; n < kCols / 8; ++n) {
                    const float* x = sum[0][col / 8 + n] + 2 * h;
                    *reinterpret_cast<float2*>(lane + n * 8) = {x[0], x[1]};
                }
                fence_proxy_async();
                __syncwarp();
                if (adds) tma_reduce_add(row + col, smem_address(rows[lane_id()]), kCols * sizeof(float));
                tma_store_commit_group();
                part = part == kStages - 1 ? 0 : part + 1;
            }
        }
    }
    // The same from registers, where shared memory has no room. Of two tiles of columns an even lane and the next hold four
    // columns each: one gets those of the first tile, the other those of the second.
    template <int kTiles>
    __device__ __forceinline__ void add(const float (&sum)[1][kTiles][4], float* to, int64_t row_stride) const {
        static_assert(kTiles % 2 == 0);
        const bool is_odd = lane_id() % 2;
        const int col = lane_id() % 4 / 2 * 4 + (is_odd ? 8 : 0);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float* row = to + place_[h] * row_stride + col;
#pragma unroll
            for (int n = 0; n < kTiles; n += 2) {
                const float *first = sum[0][n] + 2 * h, *second = sum[0][n + 1] + 2 * h;
                const float x = __shfl_xor_sync(~0u, is_odd ? first[0] : second[0], 1);
                const float y = __shfl_xor_sync(~0u, is_odd ? first[1] : second[1], 1);
                const float four[4] = {is_odd ? x : first[0], is_odd ? y : first[1], is_odd ? second[0] : x,
                                       is_odd ? second[1] : y};
                if (place_[h] >= 0) reduce_add(row + n * 8, four);
            }
        }
    }

private:
    // Of the tile: key h of this lane's two.
    __device__ int key(int h) const { return first_ + h * 8 + fragment_row(); }

    // `seen` tells which rows see this lane's keys.
    template <bool kMasked, bool kSoftcap, int kTiles>
    __device__ __forceinline__ void differentiate(const AttentionParams& p, const uint32_t (&seen)[2],
                                                  float (&s)[1][kTiles][4], float (&dp)[1][kTiles][4], int m,
                                                  const float* lse, const float* delta) {
        const float scale = static_cast<float>(p.softmax_scale), softcap = static_cast<float>(p.softcap);
        const float scale_log2 = (kSoftcap ? softcap : scale) * kLog2E,
                    scale_of_capped = kSoftcap ? scale / softcap : 0;
        const uint32_t bits[2] = {seen[0] >> fragment_col(), seen[1] >> fragment_col()};
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
                    if (kBias == BiasKind::kKey) sums_[h] += is_visible ? dx : 0.f;
                }
        }
    }

    int first_;
    int place_[2];  // -1 where no row sees the key
    float bias_[2], sums_[2];
};

}  // namespace flash_dmattn::cuda::sm90
