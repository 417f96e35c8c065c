// An MMA warpgroup of the recompute kernel of dbias: 64 rows of the tile.
#pragma once

#include "cuda/arch/gemm.cuh"
#include "cuda/arch/store_rows.cuh"
#include "cuda/softmax/scores.cuh"
#include "cuda/sm90/bwd/scale.h"
#include "contributors.cuh"
#include "shared_storage.cuh"

namespace flash_dmattn::cuda::sm90 {

// The sums of dx of a warpgroup, of kFragments fragments of 8 keys. Without splits they are dbias, else partial sums of
// a split in float32: [splits, tiles, warpgroups, fragments of the tile, threads, 4].
template <typename Traits, int kFragments = Traits::kKeys / 8>
class DbiasSums {
public:
    __device__ DbiasSums(const BwdArgs& p, const DbiasWorkTile<Traits>& work_tile, int warpgroup,
                         int first_fragment = 0)
        : p_(p), work_tile_(work_tile), row_(warpgroup * 64 + warp_id() % 4 * 16), first_key_(first_fragment * 8),
          thread_((warpgroup * (Traits::kKeys / 8) + first_fragment) * kWarpgroupThreads +
                  static_cast<int>(threadIdx.x) % kWarpgroupThreads) {
        clear(sums);
    }

    __device__ void add_partial(int split) {
#pragma unroll
        for (int n = 0; n < kFragments; ++n) {
            const float4 x = *partial(split, n);
            sums[0][n][0] += x.x, sums[0][n][1] += x.y, sums[0][n][2] += x.z, sums[0][n][3] += x.w;
        }
    }
    __device__ void store_partial() const {
#pragma unroll
        for (int n = 0; n < kFragments; ++n)
            *partial(work_tile_.split, n) = {sums[0][n][0], sums[0][n][1], sums[0][n][2], sums[0][n][3]};
    }
    __device__ void store() const {
        using T = typename Traits::T;
        const Sequence& s = work_tile_.sequence;
        T* const to = static_cast<T*>(p_.dbias.data) + shared_batch(p_.dbias, s) * p_.dbias.batch_stride +
                      work_tile_.head * p_.dbias.head_stride + s.first_row * p_.dbias.row_stride +
                      work_tile_.first_key() + first_key_;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = work_tile_.first_row() + row_ + h * 8 + fragment_row();
            store_row(sums, h, 1, to + row * p_.dbias.row_stride, s.keys - work_tile_.first_key() - first_key_,
                      row < s.rows);
        }
    }

    float sums[1][kFragments][4];

private:
    __device__ float4* partial(int split, int n) const {
        const int64_t tile = split * p_.dbias_tiles + work_tile_.tile;
        float* const to = p_.dbias_partials + tile * Traits::kRows * Traits::kKeys;
        return reinterpret_cast<float4*>(to) + thread_ + n * kWarpgroupThreads;
    }

    const BwdArgs& p_;
    const DbiasWorkTile<Traits>& work_tile_;
    const int row_, first_key_;  // this warp's first row and key in the tile
    const int thread_;           // of a partial tile
};

template <typename Traits>
class DbiasConsumer {
public:
    using SharedStorage = DbiasSharedStorage<Traits>;
    using T = typename Traits::T;

    __device__ DbiasConsumer(const BwdArgs& p, const BwdScale& scale, SharedStorage& smem,
                             const DbiasWorkTile<Traits>& work_tile)
        : p_(p), scale_(scale), smem_(smem), work_tile_(work_tile),
          warpgroup_(warp_uniform(static_cast<int>(threadIdx.x) / kWarpgroupThreads - 1)),
          row_(warpgroup_ * 64 + warp_id() % 4 * 16), operands_pipeline_(smem.operands_pipeline),
          contributor_pipeline_(smem.contributor_pipeline), sums_(p, work_tile, warpgroup_) {
        const Sequence& s = work_tile.sequence;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = work_tile.first_row() + row_ + h * 8 + fragment_row();
            row_end_[h] = s.keys_of(row, p.is_causal) - work_tile.first_key();
        }
        is_in_range_ = __all_sync(~0u, min(row_end_[0], row_end_[1]) >= Traits::kKeys);
    }

    __device__ void run() {
        if (work_tile_.has_contributors()) mbarrier_wait(smem_address(&smem_.bias_full), 0);
        while (step()) {}
        p_.dbias_splits > 1 ? sums_.store_partial() : sums_.store();
    }

private:
    static constexpr int kFragments = Traits::kKeys / 8;
    using RowsTile = typename Traits::RowsTile;
    using KvTile = typename Traits::KvTile;
    using BiasTile = typename Traits::BiasTile;
    using ContributorInfo = typename SharedStorage::ContributorInfo;
    using Scores = float[1][kFragments][4];
    using Visible = VisibleKeys<1, kFragments>;

    // One contributor. Returns false after the last one.
    __device__ __forceinline__ bool step() {
        contributor_pipeline_.consumer_wait();
        const ContributorInfo& info = contributor_info();
        if (info.head == ContributorInfo::kEnd) return false;
        float lse[2], delta[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            lse[h] = info.lse[row_ + h * 8 + fragment_row()];
            delta[h] = info.delta[row_ + h * 8 + fragment_row()];
        }
        const bool is_full = info.is_full && is_in_range_;

        Visible visible;
        if (!is_full) find_visible_keys(visible, lse);  // before the GEMMs: loads behind wgmmas wait for their operands

        Scores scores, dprobs;
        gemm(scores);  // S = Q K^T
        operands_pipeline_.advance();
        gemm(dprobs);  // dP = dO V^T
        contributor_pipeline_.consumer_release();
        contributor_pipeline_.advance();
        wgmma_wait_group<1>();
        warpgroup_fence_operand(scores);
        operands_pipeline_.consumer_release_previous();
        compute_p(scores, lse);
        wgmma_wait_group<0>();
        warpgroup_fence_operand(dprobs);
        operands_pipeline_.consumer_release();
        operands_pipeline_.advance();
        is_full ? add_dx<false>(scores, dprobs, delta, visible) : add_dx<true>(scores, dprobs, delta, visible);
        return true;
    }
    __device__ __forceinline__ void gemm(Scores& acc) const {
        operands_pipeline_.consumer_wait();
        const auto& operands = smem_.operands[operands_pipeline_.stage()];
        gemm_ss<true, Major::kK, Major::kK>(acc, SmemDescriptor<RowsTile>(operands.rows, warpgroup_ * 64),
                                            SmemDescriptor<KvTile>(operands.keys));
    }

    // S to P.
    __device__ __forceinline__ void compute_p(Scores& scores, const float (&lse)[2]) const {
        constexpr bool kClamps = needs_clamp<T>(BiasKind::kDense);
        float scale_log2 = scale_.scale_log2;
        if (scale_.softcap > 0) {
            scale_and_cap(scores, scale_.scale, scale_.softcap);
            scale_log2 = kLog2E;
        }
        const uint32_t lane = smem_.bias.ldmatrix_lane_a() + row_ * BiasTile::kSlabCols * sizeof(T);
#pragma unroll
        for (int n = 0; n < kFragments; n += 2) {
            uint32_t packed[4];  // of fragment n + i / 2 and row half i % 2
            BiasTile::load_a(packed, lane, 0, n * 8);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 bias = unpack<T>(packed[i]);
                float* x = scores[0][n + i / 2] + i % 2 * 2;
                x[0] = probability<kClamps>(x[0], scale_log2, fmaf(bias.x, kLog2E, -lse[i % 2]));
                x[1] = probability<kClamps>(x[1], scale_log2, fmaf(bias.y, kLog2E, -lse[i % 2]));
            }
        }
    }
    // Rows that see no key are masked, too.
    __device__ __forceinline__ void find_visible_keys(Visible& visible, const float (&lse)[2]) const {
        const uint32_t* const words = contributor_info().mask_words;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = row_ + h * 8 + fragment_row();
            const bool is_empty = lse[h] == kInfinity;
            const bool is_masked = words != nullptr && !is_empty;
            const uint2* const mask = reinterpret_cast<const uint2*>(words + row * p_.packed_mask.bits_row_stride);
#pragma unroll
            for (int w = 0; w < kFragments / 4; w += 2) {
                const uint2 bits = is_masked ? __ldg(mask + w / 2) : uint2{~0u, ~0u};
                visible[h][w] = is_empty ? 0 : bits.x & bits_below(row_end_[h], w);
                visible[h][w + 1] = is_empty ? 0 : bits.y & bits_below(row_end_[h], w + 1);
            }
        }
        if (p_.interval_summaries.present()) mask_by_intervals(visible);
    }
    // Reads the intervals from global memory: shared memory has no room for them.
    __device__ __forceinline__ void mask_by_intervals(Visible& visible) const {
        Sequence s = work_tile_.sequence;
        s.batch = contributor_info().batch;
        const int64_t offset = interval_offset(p_.intervals, s, contributor_info().head, p_.heads);
        const int row = work_tile_.first_row() + row_ + fragment_row();
#pragma unroll
        for (int w = 0; w < kFragments / 4; ++w) {
            uint32_t seen[2] = {0, 0};  // by this lane's rows; of its keys
#pragma unroll 1
            for (int i = fragment_col(); i < 32; i += i % 2 ? 7 : 1) {
                const int key = work_tile_.first_key() + w * 32 + i;
                if (key >= s.keys) break;
                const RowRange rows = rows_of_key(p_, s, offset, key);
                if (row >= rows.begin && row < rows.end) seen[0] |= 1u << i;
                if (row + 8 >= rows.begin && row + 8 < rows.end) seen[1] |= 1u << i;
            }
            visible[0][w] &= seen[0];
            visible[1][w] &= seen[1];
        }
    }
    // P and dP of masked scores are undefined.
    template <bool kMasked>
    __device__ __forceinline__ void add_dx(const Scores& probs, const Scores& dprobs, const float (&delta)[2],
                                           const Visible& visible) {
#pragma unroll
        for (int n = 0; n < kFragments; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint32_t bit = 1u << (n % 4 * 8 + i % 2);
                if (kMasked && !(visible[i / 2][n / 4] >> fragment_col() & bit)) continue;
                sums_.sums[0][n][i] = fmaf(probs[0][n][i], dprobs[0][n][i] - delta[i / 2], sums_.sums[0][n][i]);
            }
    }

    __device__ const ContributorInfo& contributor_info() const {
        return smem_.contributors[contributor_pipeline_.stage()];
    }

    const BwdArgs& p_;
    const BwdScale& scale_;
    SharedStorage& smem_;
    const DbiasWorkTile<Traits>& work_tile_;
    const int warpgroup_;
    const int row_;     // this warp's first row in the tile
    int row_end_[2];    // this lane's rows see the keys [0, row_end) of the tile by causality and lengths
    bool is_in_range_;  // these mask no score of the warp's rows
    Pipeline<Traits::kStages> operands_pipeline_;
    Pipeline<SharedStorage::kContributorStages> contributor_pipeline_;
    DbiasSums<Traits> sums_;
};

}  // namespace flash_dmattn::cuda::sm90
