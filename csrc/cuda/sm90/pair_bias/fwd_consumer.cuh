// An MMA warpgroup of the pair bias forward: 64 query rows, over the batch elements of a work tile.
//
// Fixed-maximum fast path: the softmax uses the largest bias of a row as its maximum, so that it searches no scores and
// rescales nothing. Where a row sum leaves the safe range of float32, the warp continues with the running maximum.
#pragma once

#include "cuda/arch/gemm.cuh"
#include "cuda/arch/math.cuh"
#include "cuda/arch/mma.cuh"
#include "cuda/arch/store_rows.cuh"
#include "cuda/softmax/online_softmax.cuh"
#include "cuda/softmax/scores.cuh"
#include "fwd_producer.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename Traits>
class PairBiasFwdConsumer {
public:
    using SharedStorage = PairBiasFwdSharedStorage<Traits>;
    using T = typename Traits::T;

    __device__ PairBiasFwdConsumer(const FwdArgs& p, const PairBiasSchedule& schedule, SharedStorage& smem,
                                   const PairBiasWorkTile& work_tile)
        : p_(p), schedule_(schedule), smem_(smem), work_tile_(work_tile),
          warpgroup_(static_cast<int>(threadIdx.x) / kWarpgroupThreads - 1), warp_row_(warp_id() % 4 * 16),
          masks_keys_(pair_bias_masks_keys<Traits::kKeys>(p)),
          row_(work_tile.block * Traits::kRows + warpgroup_ * 64 + warp_row_ + fragment_row()),
          out_rows_(static_cast<T*>(p.out.data) + work_tile.batch_begin * p.out.batch_stride +
                    work_tile.head * p.out.head_stride + row_ * p.out.row_stride),
          lse_rows_(static_cast<float*>(p.lse.data) + work_tile.batch_begin * p.lse.batch_stride +
                    work_tile.head * p.lse.head_stride + row_),
          bias_(smem.bias + warpgroup_ * schedule.bias_blocks), bias_reader_(*bias_, warp_row_),
          query_pipeline_(smem.query_pipeline), key_pipeline_(smem.key_pipeline), value_pipeline_(smem.key_pipeline) {}

    __device__ void run() {
        mbarrier_wait(smem_address(&smem_.bias_full), 0);
        find_fixed_max();
        for (int batch = work_tile_.batch_begin; batch < work_tile_.batch_end; ++batch) {
            query_pipeline_.consumer_wait();
            const PairBiasActiveBlocks blocks = smem_.blocks;
            load_query();
            mainloop(blocks);
            epilogue();
            out_rows_ += p_.out.batch_stride;
            lse_rows_ += p_.lse.batch_stride;
        }
    }

private:
    static constexpr int kKeys = Traits::kKeys, kScoreFragments = kKeys / 8, kOutFragments = kPairBiasHeadDim / 8;
    static constexpr int kBiasBlocks = kKeys / 64, kBiasBlockFragments = 64 / 8;  // of an n_block; of a bias block
    static constexpr float kLowestBias = Traits::kLowestBias;
    using QueryTile = typename Traits::QueryTile;
    using KvTile = typename Traits::KvTile;
    using Scores = float[1][kScoreFragments][4];
    using Probs = uint32_t[kKeys / 16][4];

    // Q stays in registers, and its stage is released at once.
    __device__ __forceinline__ void load_query() {
        const uint32_t lane = smem_.query.ldmatrix_lane_a();
#pragma unroll
        for (int d = 0; d < kPairBiasHeadDim; d += 16)
            QueryTile::load_a(query_[d / 16], lane, warpgroup_ * 64 + warp_row_, d);
        fence_proxy_async();
        query_pipeline_.consumer_release();
        query_pipeline_.advance();
    }

    // Finds each row's fixed maximum, its largest bias, and the n_blocks whose keys its biases all mask. The fast path
    // needs bfloat16, since P may exceed float16's range, and moderate maxima, whose rounding does not show in P.
    __device__ __forceinline__ void find_fixed_max() {
        fixed_max_[0] = fixed_max_[1] = kLowestBias;
        masked_blocks_[0] = masked_blocks_[1] = 0;
        for (int n_block = 0; n_block < schedule_.bias_blocks / kBiasBlocks; ++n_block) {
            float block_max[2] = {kLowestBias, kLowestBias};
#pragma unroll
            for (int n = 0; n < kScoreFragments; n += 2) {
                float2 bias[4];
                load_bias(bias, n_block, n);
#pragma unroll
                for (int i = 0; i < 4; ++i) block_max[i % 2] = fmaxf(block_max[i % 2], fmaxf(bias[i].x, bias[i].y));
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                block_max[h] = row_max(block_max[h]);
                fixed_max_[h] = fmaxf(fixed_max_[h], block_max[h]);
                masked_blocks_[h] |= (block_max[h] == kLowestBias ? 1u : 0u) << n_block;
            }
        }
        constexpr float kLimit = 1 << 10;
        bool fits = std::is_same_v<T, bfloat16_t>;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (fixed_max_[h] == kLowestBias) fixed_max_[h] = 0;
            fits &= fabsf(fixed_max_[h]) <= kLimit;
        }
        has_fixed_max_ = __all_sync(~0u, fits);
    }

    // The biases of fragments n and n + 1 of an n_block.
    __device__ __forceinline__ void load_bias(float2 (&bias)[4], int n_block, int n) const {
        bias_reader_.load(bias, n_block * kBiasBlocks + n / kBiasBlockFragments, n % kBiasBlockFragments);
    }

    __device__ __forceinline__ void mainloop(const PairBiasActiveBlocks& blocks) {
        clear(out_);
        softmax_ = OnlineSoftmax<1>();
        uses_fixed_max_ = has_fixed_max_;
        if (uses_fixed_max_) softmax_.max[0] = fixed_max_[0], softmax_.max[1] = fixed_max_[1];
        if (blocks.active == 0) return;
        Scores scores;
        Probs probs;
        for (uint32_t left = blocks.active; left != 0; left &= left - 1) {
            const int n_block = __ffs(left) - 1;
            const bool is_full = blocks.full >> n_block & 1;
            wait_for_keys();
            gemm_qk(scores);
            wgmma_wait_group<0>();
            warpgroup_fence_operand(scores);
            warpgroup_fence_operand(out_);
            if (left != blocks.active) release_keys();
            float factors[2] = {1, 1};  // that rescale O
            softmax(scores, factors, n_block, is_full);
            if (!uses_fixed_max_ && __any_sync(~0u, factors[0] != 1 || factors[1] != 1)) {
                softmax_.scale(out_, 0, factors[0]);
                softmax_.scale(out_, 1, factors[1]);
            }
            to_a_operand<T>(scores, probs);
            gemm_pv(probs);
            key_pipeline_.advance();
        }
        wgmma_wait_group<0>();
        warpgroup_fence_operand(out_);
        release_keys();
    }
    // Full n_blocks wait for the zeroing warp, too, which must not fall behind by a whole phase.
    __device__ __forceinline__ void wait_for_keys() const {
        key_pipeline_.consumer_wait();
        if (masks_keys_) mbarrier_wait(smem_address(&smem_.keys_zeroed[key_pipeline_.stage()]), key_pipeline_.phase());
    }
    __device__ __forceinline__ void release_keys() {
        value_pipeline_.consumer_release();
        value_pipeline_.advance();
    }

    __device__ __forceinline__ void gemm_qk(Scores& scores) const {
        gemm_rs<true, Major::kK>(scores, query_, SmemDescriptor<KvTile>(smem_.key[key_pipeline_.stage()]));
    }
    __device__ __forceinline__ void gemm_pv(const Probs& probs) {
        gemm_rs<false, Major::kMN>(out_, probs, SmemDescriptor<KvTile>(smem_.value[value_pipeline_.stage()]));
    }

    // S to P, by the fixed maximum while P stays in range; from the first n_block where it does not, by the running
    // one.
    __device__ __forceinline__ void softmax(Scores& scores, float (&factors)[2], int n_block, bool is_full) {
        if (uses_fixed_max_) {
            float sum[2];
            is_full ? fixed_max_softmax<false>(scores, sum, n_block) : fixed_max_softmax<true>(scores, sum, n_block);
            uses_fixed_max_ = is_in_range(sum, n_block);
            if (uses_fixed_max_) {
                softmax_.sum[0] += sum[0], softmax_.sum[1] += sum[1];
                return;
            }
            drop_unused_fixed_max();
            recompute_qk(scores);
        }
        online_softmax(scores, factors, n_block, is_full);
    }
    // `sum` receives this lane's part of the row sums, over visible keys.
    template <bool kMasked>
    __device__ __forceinline__ void fixed_max_softmax(Scores& scores, float (&sum)[2], int n_block) const {
        const float scale_log2 = schedule_.scale * kLog2E;
        const float shift[2] = {fixed_max_[0] * kLog2E, fixed_max_[1] * kLog2E};
        sum[0] = sum[1] = 0;
#pragma unroll
        for (int n = 0; n < kScoreFragments; n += 2) {
            float2 bias[4];
            load_bias(bias, n_block, n);
            float4 visible = {1, 1, 1, 1};
            if (kMasked) visible = smem_.metadata[key_pipeline_.stage()].factors.of(n);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int h = i % 2;
                float* x = scores[0][n + i / 2] + 2 * h;
                x[0] = fast_exp2(fmaf(x[0], scale_log2, fmaf(bias[i].x, kLog2E, -shift[h])));
                x[1] = fast_exp2(fmaf(x[1], scale_log2, fmaf(bias[i].y, kLog2E, -shift[h])));
                sum[h] = fmaf(x[0], i < 2 ? visible.x : visible.z, sum[h]);
                sum[h] = fmaf(x[1], i < 2 ? visible.y : visible.w, sum[h]);
            }
        }
    }
    // Whether the row sums of all rows of the warp are far from the limits of float32. A row that biases mask in the
    // whole n_block may have any small sum.
    __device__ __forceinline__ bool is_in_range(const float (&sum)[2], int n_block) const {
        constexpr float kMin = 0x1p-80f, kMax = 0x1p40f;
        const bool lane_in_range = fminf(sum[0], sum[1]) >= kMin && sum[0] + sum[1] <= kMax;  // false for NaN
        if (__all_sync(~0u, lane_in_range)) return true;
        bool in_range = true;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float total = row_sum(sum[h]);
            in_range &= total <= kMax && (total >= kMin || masked_blocks_[h] >> n_block & 1);
        }
        return __all_sync(~0u, in_range);
    }
    // Rows without a visible key so far restart with an empty running maximum; the others continue from the fixed one.
    __device__ __forceinline__ void drop_unused_fixed_max() {
#pragma unroll
        for (int h = 0; h < 2; ++h)
            if (row_sum(softmax_.sum[h]) == 0) softmax_.max[h] = -kInfinity;
    }
    // S = Q K^T of this warp alone, by mma.sync: the other warps of the warpgroup do not take part.
    __device__ __forceinline__ void recompute_qk(Scores& scores) const {
        clear(scores);
        const auto& key = smem_.key[key_pipeline_.stage()];
        const uint32_t lane = key.ldmatrix_lane_b();
#pragma unroll
        for (int n = 0; n < kScoreFragments; n += 2)
#pragma unroll
            for (int d = 0; d < kPairBiasHeadDim; d += 16) {
                uint32_t b[4];
                KvTile::load_b(b, lane, n * 8, d);
                mma_m16n8k16<T>(scores[0][n], query_[d / 16], b[0], b[1]);
                mma_m16n8k16<T>(scores[0][n + 1], query_[d / 16], b[2], b[3]);
            }
        fence_proxy_async();  // orders these reads before the next TMA load of the stage
    }
    __device__ __forceinline__ void online_softmax(Scores& scores, float (&factors)[2], int n_block, bool is_full) {
        apply_mask_and_bias(scores, n_block, is_full);
        const auto mask = [&] {
            apply_bias_mask<typename Traits::Bias>(scores, [&](int r, int key) {
                return &bias_[n_block * kBiasBlocks + key / 64].tiles[0].at(warp_row_ + r, key % 64);
            });
        };
        softmax_.update(scores, kLog2E, kLowestBias / 2, mask, [&](int i, float factor) { factors[i] = factor; });
    }

    __device__ __forceinline__ void apply_mask_and_bias(Scores& scores, int n_block, bool is_full) const {
#pragma unroll
        for (int n = 0; n < kScoreFragments; n += 2) {
            float2 bias[4];
            load_bias(bias, n_block, n);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float* x = scores[0][n + i / 2] + i % 2 * 2;
                x[0] = fmaf(x[0], schedule_.scale, bias[i].x);
                x[1] = fmaf(x[1], schedule_.scale, bias[i].y);
            }
        }
        if (is_full) return;
        VisibleKeys<1, kScoreFragments> visible;
#pragma unroll
        for (int w = 0; w < Traits::kWords; ++w)
            visible[0][w] = visible[1][w] = smem_.metadata[key_pipeline_.stage()].visible_keys[w];
        apply_mask(scores, visible);
    }

    __device__ __forceinline__ void epilogue() const {
        float sums[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            sums[h] = row_sum(softmax_.sum[h]);
            const float inverse = sums[h] == 0 ? 0.f : fast_inverse(sums[h]);
            store_row(out_, h, inverse, out_rows_ + h * 8 * p_.out.row_stride, static_cast<int>(p_.head_dim),
                      row_ + h * 8 < p_.seqlen_q);
        }
        // Four lanes hold both rows; each of the first two stores the lse of one.
        const int h = lane_id() % 4;
        const float sum = h == 0 ? sums[0] : sums[1], max = h == 0 ? softmax_.max[0] : softmax_.max[1];
        if (h < 2 && row_ + h * 8 < p_.seqlen_q) lse_rows_[h * 8] = sum == 0 ? -kInfinity : max + logf(sum);
    }

    const FwdArgs& p_;
    const PairBiasSchedule& schedule_;
    SharedStorage& smem_;
    const PairBiasWorkTile& work_tile_;
    const int warpgroup_;
    const int warp_row_;  // this warp's first row in the warpgroup
    const bool masks_keys_;
    const int row_;  // this lane's first row of two, in the sequence
    T* out_rows_;    // at row_, in the current batch element
    float* lse_rows_;
    typename Traits::BiasBlock* const bias_;  // of the warpgroup's rows
    const typename Traits::BiasReader bias_reader_;
    Pipeline<1> query_pipeline_;
    Pipeline<Traits::kStages> key_pipeline_, value_pipeline_;  // value_pipeline_: the stage of the P V in flight
    float fixed_max_[2];
    uint32_t masked_blocks_[2];            // n_blocks whose keys the biases of a row all mask
    bool has_fixed_max_, uses_fixed_max_;  // of all rows of the warp
    OnlineSoftmax<1> softmax_;
    uint32_t query_[kPairBiasHeadDim / 16][4];
    float out_[1][kOutFragments][4];
};

}  // namespace flash_dmattn::cuda::sm90
