// An MMA warpgroup of the recompute kernel of dbias: 64 rows of the tile.
#pragma once

#include "cuda/arch/gemm.cuh"
#include "cuda/arch/store_rows.cuh"
#include "cuda/softmax/scores.cuh"
#include "cuda/sm90/bwd/scale.h"
#include "shared_storage.cuh"

namespace flash_dmattn::cuda::sm90 {

// The sums of dx of a warpgroup. Without splits they are dbias, else partial sums of a split in float32:
// [splits, tiles, warpgroups, fragments, threads, 4].
template <typename Traits>
class DbiasSums {
public:
    static constexpr int kFragments = Traits::kKeys / 8;

    __device__ DbiasSums(const BwdArgs& p, const DbiasWorkTile<Traits>& work_tile, int warpgroup)
        : p_(p), work_tile_(work_tile), row_(warpgroup * 64 + warp_id() % 4 * 16),
          thread_(warpgroup * kFragments * kWarpgroupThreads + static_cast<int>(threadIdx.x) % kWarpgroupThreads) {
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
        const Sequence s(p_, work_tile_.first_batch);
        T* const to = static_cast<T*>(p_.dbias.data) + shared_batch(p_.dbias, s) * p_.dbias.batch_stride +
                      work_tile_.head * p_.dbias.head_stride + s.first_row * p_.dbias.row_stride +
                      work_tile_.first_key();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = work_tile_.first_row() + row_ + h * 8 + fragment_row();
            store_row(sums, h, 1, to + row * p_.dbias.row_stride, s.keys - work_tile_.first_key(), row < s.rows);
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
    const int row_;     // this warp's first row in the tile
    const int thread_;  // of a partial tile
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
          row_pipeline_(smem.row_pipeline), sums_(p, work_tile, warpgroup_) {
        const Sequence s(p, work_tile.first_batch);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = work_tile.first_row() + row_ + h * 8 + fragment_row();
            row_end_[h] = s.keys_of(row, p.is_causal) - work_tile.first_key();
        }
        is_in_range_ = __all_sync(~0u, min(row_end_[0], row_end_[1]) >= Traits::kKeys);
    }

    __device__ void run() {
        mbarrier_wait(smem_address(&smem_.bias_full), 0);
        while (step()) {}
        p_.dbias_splits > 1 ? sums_.store_partial() : sums_.store();
    }

private:
    static constexpr int kFragments = Traits::kKeys / 8;
    using RowsTile = typename Traits::RowsTile;
    using KeysTile = typename Traits::KeysTile;
    using BiasTile = typename Traits::BiasTile;
    using RowData = typename SharedStorage::RowData;
    using Scores = float[1][kFragments][4];
    using Visible = VisibleKeys<1, kFragments>;

    // One contributor. Returns false after the last one.
    __device__ __forceinline__ bool step() {
        row_pipeline_.consumer_wait();
        const RowData& data = row_data();
        if (data.head == RowData::kEnd) return false;
        float lse[2], delta[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            lse[h] = data.lse[row_ + h * 8 + fragment_row()];
            delta[h] = data.delta[row_ + h * 8 + fragment_row()];
        }
        const bool is_full = data.is_full && is_in_range_;

        Visible visible;
        if (!is_full) find_visible_keys(visible, lse);  // before the GEMMs: loads behind wgmmas wait for their operands

        Scores scores, dprobs;
        gemm(scores);  // S = Q K^T
        operands_pipeline_.advance();
        gemm(dprobs);  // dP = dO V^T
        row_pipeline_.consumer_release();
        row_pipeline_.advance();
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
                                            SmemDescriptor<KeysTile>(operands.keys));
    }
    // S to P.
    __device__ __forceinline__ void compute_p(Scores& scores, const float (&lse)[2]) const {
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
                x[0] = probability(x[0], scale_log2, fmaf(bias.x, kLog2E, -lse[i % 2]));
                x[1] = probability(x[1], scale_log2, fmaf(bias.y, kLog2E, -lse[i % 2]));
            }
        }
    }
    // Rows that see no key are masked, too.
    __device__ __forceinline__ void find_visible_keys(Visible& visible, const float (&lse)[2]) const {
        const uint32_t* const words = row_data().mask_words;
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
    __device__ __forceinline__ void mask_by_intervals(Visible& visible) const {
        Sequence s(p_, work_tile_.first_batch);
        s.batch = row_data().batch;
        const int64_t offset = interval_offset(p_.intervals, s, row_data().head, p_.heads);
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int w = 0; w < kFragments / 4; ++w)
                visible[h][w] &= visible_by_intervals(s, offset, work_tile_.first_key() + w * 32,
                                                      work_tile_.first_row() + row_ + h * 8 + fragment_row());
    }
    // Which of the 32 keys from first_key on a row sees by their intervals: this lane's keys; other bits are 0.
    __device__ __forceinline__ uint32_t visible_by_intervals(const Sequence& s, int64_t offset, int first_key,
                                                             int row) const {
        uint32_t seen = 0;
#pragma unroll 1
        for (int i = fragment_col(); i < 32; i += i % 2 ? 7 : 1) {
            if (first_key + i >= s.keys) break;
            const RowRange rows = rows_of_key(p_, s, offset, first_key + i);
            if (row >= rows.begin && row < rows.end) seen |= 1u << i;
        }
        return seen;
    }
    // Where a score is masked P and dP may be anything.
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

    __device__ const RowData& row_data() const { return smem_.row_data[row_pipeline_.stage()]; }

    const BwdArgs& p_;
    const BwdScale& scale_;
    SharedStorage& smem_;
    const DbiasWorkTile<Traits>& work_tile_;
    const int warpgroup_;
    const int row_;     // this warp's first row in the tile
    int row_end_[2];    // causality and lengths leave this lane's rows the keys [0, row_end) of the tile
    bool is_in_range_;  // they mask no score of the warp's rows
    Pipeline<Traits::kStages> operands_pipeline_;
    Pipeline<SharedStorage::kRowStages> row_pipeline_;
    DbiasSums<Traits> sums_;
};

}  // namespace flash_dmattn::cuda::sm90
