// The scores of an MMA warpgroup of the backward: masks and biases of its keys, P and dS, and the key bias's gradient.
#pragma once

#include <algorithm>
#include <climits>
#include <type_traits>

#include "cuda/arch/memory.cuh"
#include "cuda/arch/mma.cuh"
#include "cuda/mask/intervals.cuh"
#include "cuda/softmax/scores.cuh"
#include "scale.h"
#include "shared_storage.cuh"
#include "tile_scheduler.cuh"

namespace flash_dmattn::cuda::sm90 {

// The part of BwdConsumer between the GEMMs. A lane has two keys, rows of the transposed scores: keys 8 h +
// fragment_row() of the warp's 16.
template <typename Traits, BiasKind kBias>
class BwdScores {
protected:
    using T = typename Traits::T;
    using SharedStorage = BwdSharedStorage<Traits, kBias>;
    using MBlockInfo = typename SharedStorage::MBlockInfo;
    using TiledMma = BwdTiledMma<Traits>;
    using ScoresFragment = typename TiledMma::ScoresFragment;
    using ScoresTile = typename Traits::ScoresTile;
    using RelativeBiasLane = typename SharedStorage::RelativeSegment::Lane;
    static constexpr int kFragments = Traits::kScoreRows / 8;
    // Fragments of P that are computed before the wait for dP: fastest as measured. With a grid and 128 rows the GEMM of
    // dP comes first, and a dense bias leaves too few registers.
    static constexpr bool kHasEarlyFragments =
        kBias == BiasKind::kNone || (kFragments > 8 && (kBias == BiasKind::kKey || kBias == BiasKind::kRelative));
    static constexpr int kEarlyFragments = !Traits::kSharesKeys && kHasEarlyFragments ? 8 : 0;
    // Whether P and dS are converted, and dS stored, in each branch of dispatch(): these instructions then mix with the
    // exponentials. Without a bias that is not faster, and the copies for masks would take registers.
    static constexpr bool kFinishesInBranches = !Traits::kServesMasksAndSoftcap && kBias != BiasKind::kNone;
    // Whether rows beyond the sequence read a bias, which may be NaN.
    static constexpr bool kReadsBiasBeyondRows = kBias == BiasKind::kDense || is_relative(kBias);
    // Whether a bias is added after Q K^T. kUnlessClamped: tests is_clamped() at run time.
    enum class AddsBias { kNo, kYes, kUnlessClamped };
    static constexpr AddsBias kAddsBias =
        kBias == BiasKind::kNone || SharedStorage::kStartsFromBias ? AddsBias::kNo : AddsBias::kYes;

    __device__ BwdScores(const BwdArgs& p, const BwdScale& scale, SharedStorage& smem, const BwdWorkTile& work_tile)
        : p_(p), scale_(scale), smem_(smem), work_tile_(work_tile),
          warpgroup_(warp_uniform(static_cast<int>(threadIdx.x) / kWarpgroupThreads - 1)), tiled_mma_(warpgroup_),
          warp_key_(TiledMma::warp_key()) {
        if constexpr (is_relative(kBias))
            relative_bias_lane_ =
                RelativeBiasLane(p.relative_bias, work_tile.n_block * Traits::kKeys, warp_key_, tiled_mma_.first_row());
    }

    // lse or delta of the rows of this lane's scores. Where registers are free up to 64 rows are read at once, and lse
    // before S is issued: a load that follows wgmmas arrives only when these have read their operands.
    class RowStatsFragment {
    public:
        __device__ __forceinline__ explicit RowStatsFragment(const float* stats) : stats_(stats + fragment_col()) {
#pragma unroll
            for (int m = 0; m < kPrefetched; ++m) prefetched_[m] = load(m);
        }
        __device__ __forceinline__ float2 operator[](int m) const { return m < kPrefetched ? prefetched_[m] : load(m); }

    private:
        static constexpr int kMaxPrefetched = Traits::kIsTall && kBias == BiasKind::kKey ? 4 : 8;
        static constexpr int kPrefetched =
            kFragments < 16 && kBias != BiasKind::kDense ? std::min(kFragments, kMaxPrefetched) : 0;
        __device__ __forceinline__ float2 load(int m) const { return *reinterpret_cast<const float2*>(stats_ + m * 8); }

        const float* stats_;
        float2 prefetched_[kPrefetched > 0 ? kPrefetched : 1];
    };

    __device__ const MBlockInfo& m_block_info() const { return smem_.m_blocks[state_.stage()]; }
    __device__ ScoresTile& bias_dscores() const { return smem_.bias_dscores[state_.stage()]; }
    // The lane's address for ldmatrix.trans and stmatrix.trans of 16 rows, from `row` of the warpgroup on, and the
    // warp's 16 keys: they transpose between the tile and two neighbouring fragments of an accumulator.
    __device__ __forceinline__ uint32_t scores_address(const ScoresTile& tile, int row) const {
        const int lane = lane_id();
        return smem_address(tile.data + ScoresTile::offset(tiled_mma_.first_row() + row + lane % 8 + lane / 16 * 8,
                                                           warp_key_ / 8 + lane / 8 % 2));
    }
    // Key h of the sequence.
    __device__ int key(int h) const { return work_tile_.n_block * Traits::kKeys + warp_key_ + h * 8 + fragment_row(); }

    // Reads the keys' bias and the rows that may see them.
    __device__ void begin_head(int head) {
        const Sequence& s = smem_.sequence;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int k = key(h);
            const int begin = p_.is_causal ? s.causal_begin(k) : 0;
            if constexpr (Traits::kServesMasksAndSoftcap || kReadsBiasBeyondRows) {
                rows_[h] = {begin, k < s.keys ? s.rows : 0};
                if (Traits::kServesMasksAndSoftcap && k < s.keys && p_.interval_summaries.present())
                    rows_[h] = rows_of_key(p_, s, interval_offset(p_.intervals, s, head, p_.heads), k);
                // Beyond the sequence P is 0 without a test, unless the bias there may be NaN or infinite: an entry of
                // a relative bias, or the dense bias of the next packed sequence.
                const bool may_be_nan = kReadsBiasBeyondRows && (is_relative(kBias) || p_.cu_seqlens_q != nullptr);
                if (!may_be_nan && rows_[h].end == s.rows) rows_[h].end = INT_MAX;
            } else {
                rows_[h] = {k < s.keys ? begin : INT_MAX, INT_MAX};  // a constant end takes no register
            }
            if constexpr (kBias == BiasKind::kKey) bias_[h] = key_bias_log2<T>(p_, s, head, k);
        }
        if (kBias == BiasKind::kDense && p_.packed_mask.present() && !masks_scores<Traits, kBias>(p_)) {
            const uint32_t* words = mask_words(p_, s, head) + work_tile_.n_block * Traits::kWords;
            visible_keys_ = words[warp_key_ / 32] >> (warp_key_ % 32 + fragment_row());
            has_masked_keys_ = __any_sync(~0u, (visible_keys_ & 0x101) != 0x101);
        }
    }

    // Zeros P or dS, in 16 bits, of keys that a key mask masks. One select covers two scores.
    __device__ __forceinline__ void zero_masked_keys(typename TiledMma::ScoresOperand& scores) const {
#pragma unroll
        for (int k = 0; k < Traits::kScoreRows / 16; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (!(visible_keys_ >> i % 2 * 8 & 1)) scores[k][i] = 0;
    }

    __device__ bool has_key_dbias() const { return kBias == BiasKind::kKey && p_.dbias.data != nullptr; }
    // Stores the key bias's gradient, the sum of dS over the rows. Shared keys have a part of it in each warpgroup: two
    // additions commute, so the result is deterministic.
    __device__ void store_key_dbias(int head) {
        const Sequence& s = smem_.sequence;
        float* to = static_cast<float*>(p_.dbias.data) + score_offset(p_.dbias, s, head, p_.heads);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float sum = row_sum(key_dbias_[h]);
            if (is_row_leader() && key(h) < s.keys) {
                float* to_key = to + key(h) * p_.dbias.col_stride;
                if (Traits::kSharesKeys) {
                    reduce_add(to_key, sum);
                } else {
                    *to_key = sum;
                }
            }
            key_dbias_[h] = 0;
        }
    }

    // S and dP to P and dS without a softcap, in two parts. The first needs S alone: its exponentials overlap the GEMM
    // of dP, those of the second the arithmetic of dS and finish().
    __device__ __forceinline__ void compute_early_p(ScoresFragment& s, const RowStatsFragment& lse) const {
        dispatch([&](auto has_ranges, auto has_bits, auto adds_bias) {
            compute_p<has_ranges.value, has_bits.value, adds_bias.value, 0, early_fragments(adds_bias.value)>(s, lse);
        });
    }
    template <typename Finish>
    __device__ __forceinline__ void compute_late_p_ds(ScoresFragment& s, ScoresFragment& dp,
                                                      const RowStatsFragment& lse, const Finish& finish) {
        dispatch([&](auto has_ranges, auto has_bits, auto adds_bias) {
            constexpr int kFirst = early_fragments(adds_bias.value);
            compute_p<has_ranges.value, has_bits.value, adds_bias.value, kFirst, kFragments>(s, lse);
            constexpr bool kSumsClamped = kBias == BiasKind::kRelative && adds_bias.value != AddsBias::kYes;
            compute_ds<has_ranges.value || has_bits.value, kSumsClamped>(s, dp);
            if constexpr (kFinishesInBranches) finish();
        });
    }
    // S and dP to P and dS with a softcap.
    __device__ __forceinline__ void compute_p_ds_softcap(ScoresFragment& s, ScoresFragment& dp,
                                                         const RowStatsFragment& lse) {
        const float* deltas = m_block_info().delta + tiled_mma_.first_row() + fragment_col();
        const auto take = [&](int m, int h, int e, float shift, bool is_visible) {
            const float dx = score_gradient<true, needs_clamp<T>(kBias)>(s[0][m][2 * h + e], dp[0][m][2 * h + e], shift,
                                                                         deltas[m * 8 + e], scale_.softcap * kLog2E,
                                                                         scale_.scale / scale_.softcap, is_visible);
            if (kBias == BiasKind::kKey) key_dbias_[h] += is_visible ? dx : 0.f;
        };
        for_each_score<true, true, kAddsBias, 0, kFragments>(lse, has_bits(), take);
    }

    // Whether all scores read the same entry of a relative bias, which the producer has subtracted from lse.
    __device__ bool is_clamped() const {
        if constexpr (kBias != BiasKind::kRelative) return false;
        return __any_sync(~0u, header_.clamped_end != 0);
    }
    // The sum of dS over this lane's scores, of a clamped block.
    __device__ float clamped_sum() const { return clamped_sum_[0] + clamped_sum_[1]; }

private:
    __device__ bool has_bits() const { return masks_scores<Traits, kBias>(p_) && !header_.is_full_block; }
    // With a relative bias only clamped blocks without a mask have early fragments.
    static constexpr __host__ __device__ int early_fragments(AddsBias adds_bias) {
        return kBias == BiasKind::kRelative && adds_bias != AddsBias::kNo ? 0 : kEarlyFragments;
    }
    // Calls compute(has_ranges, has_bits, adds_bias), std::integral_constants. has_ranges: some rows are out of a key's
    // range by causality, lengths or intervals. has_bits: the packed mask has some 0. adds_bias: an AddsBias.
    template <typename Compute>
    __device__ __forceinline__ void dispatch(const Compute& compute) const {
        const int first_row = header_.m_block * Traits::kRows + tiled_mma_.first_row();
        const auto covers = [&](const RowRange& rows) {
            return rows.begin <= first_row && rows.end >= first_row + Traits::kScoreRows;
        };
        const bool in_range = __all_sync(~0u, covers(rows_[0]) && covers(rows_[1]));
        constexpr std::true_type kTrue;
        constexpr std::false_type kFalse;
        // Masked blocks may be clamped, so they test it at run time. With 128 rows those without a mask do, too: the
        // compiler would move unconditional loads of the bias ahead, and spill registers.
        constexpr AddsBias kMasked = kBias == BiasKind::kRelative ? AddsBias::kUnlessClamped : kAddsBias;
        constexpr std::integral_constant<AddsBias, kMasked> kMaskedAdds;
        constexpr std::integral_constant<AddsBias, kFragments <= 8 ? kAddsBias : kMasked> kUnmaskedAdds;
        if (__builtin_expect(in_range && !has_bits(), 1)) {
            if (is_clamped()) {
                compute(kFalse, kFalse, std::integral_constant<AddsBias, AddsBias::kNo>());
            } else {
                compute(kFalse, kFalse, kUnmaskedAdds);
            }
        } else if (has_bits()) {
            in_range ? compute(kFalse, kTrue, kMaskedAdds) : compute(kTrue, kTrue, kMaskedAdds);
        } else {
            compute(kTrue, kFalse, kMaskedAdds);
        }
    }

    template <bool kRanges, bool kBits, AddsBias kAdds, int kFirst, int kLast>
    __device__ __forceinline__ void compute_p(ScoresFragment& s, const RowStatsFragment& lse) const {
        constexpr bool kClamps = needs_clamp<T>(kBias) && (kAdds != AddsBias::kNo || SharedStorage::kStartsFromBias);
        for_each_score<kRanges, kBits, kAdds, kFirst, kLast>(lse, kBits,
                                                             [&](int m, int h, int e, float shift, bool is_visible) {
                                                                 float& x = s[0][m][2 * h + e];
                                                                 x = probability<kClamps>(x, scale_.scale_log2, shift);
                                                                 if (!is_visible) x = 0;
                                                             });
    }
    // P and dP to dS. Where a score is masked P is 0 and dP may be anything.
    template <bool kMasked, bool kSumsClamped>
    __device__ __forceinline__ void compute_ds(const ScoresFragment& prob, ScoresFragment& dp) {
        const RowStatsFragment deltas(m_block_info().delta + tiled_mma_.first_row());
        if (kSumsClamped) clamped_sum_[0] = clamped_sum_[1] = 0;
#pragma unroll
        for (int m = 0; m < kFragments; ++m) {
            const float2 delta = deltas[m];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& x = dp[0][m][i];
                x = prob[0][m][i] * (x - (i % 2 ? delta.y : delta.x));
                if (kMasked && prob[0][m][i] == 0) x = 0;
                if (kBias == BiasKind::kKey) key_dbias_[i / 2] += x;
                if (kSumsClamped) clamped_sum_[i / 2] += x;
            }
        }
    }

    // Calls take(m, h, e, bias - lse, is_visible) for each score [0][m][2 h + e] of this lane, m in [kFirst, kLast).
    template <bool kRanges, bool kBits, AddsBias kAdds, int kFirst, int kLast, typename Take>
    __device__ __forceinline__ void for_each_score(const RowStatsFragment& lses, bool has_bits,
                                                   const Take& take) const {
        const auto& info = m_block_info();
        const int block_row = tiled_mma_.first_row() + fragment_col(),
                  first_row = header_.m_block * Traits::kRows + block_row;
        const int bit = warp_key_ % 32 + fragment_row();
        const bool adds_bias = kAdds == AddsBias::kYes || (kAdds == AddsBias::kUnlessClamped && !is_clamped());
#pragma unroll
        for (int n = kFirst; n < kLast; n += 2) {
            uint32_t dense[4];
            if (kBias == BiasKind::kDense) ldmatrix_x4_trans(dense, scores_address(bias_dscores(), n * 8));
#pragma unroll
            for (int m = n; m < n + 2; ++m) {
                const float2 lse = lses[m];
                uint2 bits = {~0u, ~0u};
                if constexpr (Traits::kServesMasksAndSoftcap && kBits) {
                    if (has_bits) bits = *reinterpret_cast<const uint2*>(info.mask[warp_key_ / 32] + block_row + m * 8);
                }
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float2 bias = {0, 0};
                    if (kBias == BiasKind::kDense) {
                        bias = unpack<T>(dense[m % 2 * 2 + h]);
                        bias = {bias.x * kLog2E, bias.y * kLog2E};
                    } else if (kBias == BiasKind::kKey) {
                        bias = {bias_[h], bias_[h]};
                    } else if constexpr (kAdds != AddsBias::kNo && is_relative(kBias)) {
                        if (adds_bias) bias = info.relative_bias.entries.at(relative_bias_lane_, h, m);
                    }
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int row = first_row + m * 8 + e;
                        bool is_visible = true;
                        if (kRanges) is_visible = row >= rows_[h].begin && row < rows_[h].end;
                        if (kBits) is_visible = is_visible && (e ? bits.y : bits.x) >> (bit + h * 8) & 1;
                        const float minus_lse = -(e ? lse.y : lse.x), x = e ? bias.y : bias.x;
                        take(m, h, e, kAdds == AddsBias::kNo ? minus_lse : x + minus_lse, is_visible);
                    }
                }
            }
        }
    }

protected:
    const BwdArgs& p_;
    const BwdScale& scale_;
    SharedStorage& smem_;
    const BwdWorkTile& work_tile_;
    const int warpgroup_;
    const TiledMma tiled_mma_;
    const int warp_key_;                    // the warp's first key of the n_block
    PipelineState<Traits::kStages> state_;  // of the pipelines of Q, dO and the bias: a step uses a stage of each
    typename MBlockInfo::Header header_;    // of the current m_block
    RelativeBiasLane relative_bias_lane_;
    RowRange rows_[2];              // that may see each key
    bool has_masked_keys_ = false;  // of the warp, for zero_masked_keys
    uint32_t visible_keys_;         // of this lane, bits 0 and 8
    float bias_[2] = {};            // times log2(e)
    float key_dbias_[2] = {};
    float clamped_sum_[2];  // of dS, of a clamped block
};

}  // namespace flash_dmattn::cuda::sm90
