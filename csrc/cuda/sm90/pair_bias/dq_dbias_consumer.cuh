// An MMA warpgroup of the pair bias kernel for dQ and dbias: all rows of the m_block by half of the keys.
//
// dbias stays in registers over the batch elements of a work tile. dQ is the sum of both warpgroups' parts.
#pragma once

#include "cuda/arch/gemm.cuh"
#include "cuda/arch/math.cuh"
#include "cuda/arch/named_barrier.cuh"
#include "cuda/arch/store_rows.cuh"
#include "dq_dbias_producer.cuh"

namespace flash_dmattn::cuda::sm90 {

template <typename Traits>
class PairBiasDqDbiasConsumer {
public:
    using SharedStorage = PairBiasDqDbiasSharedStorage<Traits>;
    using T = typename Traits::T;

    __device__ PairBiasDqDbiasConsumer(const BwdArgs& p, const PairBiasSchedule& schedule, SharedStorage& smem,
                                       const PairBiasWorkTile& work_tile)
        : p_(p), schedule_(schedule), smem_(smem), work_tile_(work_tile),
          warpgroup_(warp_uniform(static_cast<int>(threadIdx.x) / kWarpgroupThreads - 1)),
          warp_row_(warp_id() % 4 * 16), masks_keys_(pair_bias_masks_keys<64>(p)),
          row_(work_tile.block * kPairBiasRows + warp_row_ + fragment_row()),
          dquery_rows_(static_cast<T*>(p.dquery.data) + work_tile.head * p.dquery.head_stride +
                       row_ * p.dquery.row_stride),
          row_pipeline_(smem.row_pipeline), key_pipeline_(smem.key_pipelines[warpgroup_]),
          released_keys_(smem.key_pipelines[warpgroup_]), bias_reader_(smem.bias[first_n_block()], warp_row_) {
        clear(dbias_);
    }

    __device__ void run() {
        mbarrier_wait(smem_address(&smem_.bias_full), 0);
        for (int batch = work_tile_.batch_begin; batch < work_tile_.batch_end; ++batch) {
            row_pipeline_.consumer_wait();
            mbarrier_wait(smem_address(&smem_.rows_ready[row_pipeline_.stage()]), row_pipeline_.phase());
            mainloop();
            row_pipeline_.consumer_release();
            row_pipeline_.advance();
            if (batch > work_tile_.batch_begin) store_dq(batch - 1);
            write_partial_dq(batch);
        }
        store_dq(work_tile_.batch_end - 1);
        store_dbias();
    }

private:
    static constexpr int kNBlocks = Traits::kNBlocks, kScoreFragments = 64 / 8, kDimFragments = kPairBiasHeadDim / 8;
    using RowsTile = typename Traits::RowsTile;
    using KvTile = typename Traits::KvTile;
    using Scores = float[1][kScoreFragments][4];
    using Accumulator = float[1][kDimFragments][4];  // [rows, D]
    using AOperand = uint32_t[64 / 16][4];

    __device__ int first_n_block() const { return warpgroup_ * kNBlocks; }

    __device__ __forceinline__ void mainloop() {
        const auto& rows = smem_.rows[row_pipeline_.stage()];
        auto& metadata = smem_.row_metadata[row_pipeline_.stage()];
        const PairBiasActiveBlocks blocks = metadata.blocks;
        float lse[2], delta[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            lse[h] = metadata.stats.lse(warp_row_ + h * 8 + fragment_row());
            delta[h] = metadata.stats.delta(warp_row_ + h * 8 + fragment_row());
        }
        const SmemDescriptor<RowsTile> query(rows.query), dout(rows.dout);
        clear(dquery_);
        AOperand dscores;
        bool is_first = true;
#pragma unroll
        for (int i = 0; i < kNBlocks; ++i) {
            const int n_block = first_n_block() + i, stage = key_pipeline_.stage();
            if (!(blocks.active >> n_block & 1)) continue;
            const bool is_full = blocks.full >> n_block & 1;
            key_pipeline_.consumer_wait();
            if (masks_keys_) mbarrier_wait(smem_address(&smem_.keys_zeroed[warpgroup_][stage]), key_pipeline_.phase());
            const auto& keys = smem_.keys[warpgroup_][stage];
            const SmemDescriptor<KvTile> key(keys.key), value(keys.value);
            Scores scores, dprobs;
            gemm_ss<true, Major::kK, Major::kK>(scores, query, key);   // S = Q K^T
            gemm_ss<true, Major::kK, Major::kK>(dprobs, dout, value);  // dP = dO V^T
            wgmma_wait_group<0>();
            warpgroup_fence_operand(scores);
            warpgroup_fence_operand(dprobs);
            warpgroup_fence_operand(dquery_);
            if (!is_first) release_keys();
            is_first = false;
            if (is_full) {
                compute_dscores<false>(scores, dprobs, lse, delta, i);
                add_dbias(i, dprobs);
            } else {
                compute_dscores<true>(scores, dprobs, lse, delta, i);
                add_dbias(i, dprobs, smem_.factors[warpgroup_][stage]);
            }
            to_a_operand<T>(dprobs, dscores);
            gemm_rs<false, Major::kMN>(dquery_, dscores, key);  // dQ += dS K
            key_pipeline_.advance();
        }
        wgmma_wait_group<0>();
        warpgroup_fence_operand(dquery_);
        if (!is_first) release_keys();
    }
    __device__ __forceinline__ void release_keys() {
        released_keys_.consumer_release();
        released_keys_.advance();
    }
    __device__ __forceinline__ void add_dbias(int block, const Scores& dscores) {
#pragma unroll
        for (int n = 0; n < kScoreFragments; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) dbias_[block][n][i] += dscores[0][n][i];
    }
    // For n_blocks with masked keys. Their dS times the zeros of K adds nothing to dQ, unless float16 rounds it to
    // infinity.
    __device__ __forceinline__ void add_dbias(int block, Scores& dscores, const PairBiasKeyFactors<64>& factors) {
#pragma unroll
        for (int n = 0; n < kScoreFragments; n += 2) {
            const float4 x = factors.of(n);
            const float visible[2][2] = {{x.x, x.y}, {x.z, x.w}};
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float dscore = dscores[0][n + m][i] * visible[m][i % 2];
                    dbias_[block][n + m][i] += dscore;
                    if constexpr (std::is_same_v<T, half_t>) dscores[0][n + m][i] = dscore;
                }
        }
    }

    // dS replaces dP. With kMasked it is finite for masked keys, too, even if their bias is infinite or NaN: fminf drops
    // NaN.
    template <bool kMasked>
    __device__ __forceinline__ void compute_dscores(const Scores& s, Scores& dp, const float (&lse)[2],
                                                    const float (&delta)[2], int block) const {
        constexpr bool kClamps = kMasked || needs_clamp<T>(BiasKind::kDense);
        const float scale_log2 = schedule_.scale * kLog2E;
#pragma unroll
        for (int n = 0; n < kScoreFragments; n += 2) {
            float2 bias[4];
            bias_reader_.load(bias, block, n);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int h = i % 2, m = n + i / 2;
                const float shift[2] = {fmaf(bias[i].x, kLog2E, -lse[h]), fmaf(bias[i].y, kLog2E, -lse[h])};
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float x = fmaf(s[0][m][2 * h + e], scale_log2, shift[e]);
                    const float prob = fast_exp2(kClamps ? fminf(x, 0.f) : x);
                    dp[0][m][2 * h + e] = prob * (dp[0][m][2 * h + e] - delta[h]);
                }
            }
        }
    }

    // The warpgroups alternate in adding up both partial sums of a batch element and storing dQ: one batch element
    // later, so that neither waits for the other.
    __device__ __forceinline__ void write_partial_dq(int batch) {
        const int owner = batch & 1;
#pragma unroll
        for (int n = 0; n < kDimFragments; ++n) {
            const float* x = dquery_[0][n];
            smem_.dquery[owner][warpgroup_][n][threadIdx.x % kWarpgroupThreads] = {x[0], x[1], x[2], x[3]};
        }
        if (warpgroup_ != owner) named_barrier_arrive(PairBiasDqDbiasNamedBarriers::kDqueryPartialWG1 + owner, 256);
    }
    __device__ __forceinline__ void store_dq(int batch) {
        const int owner = batch & 1;
        if (warpgroup_ != owner) return;
        named_barrier_sync(PairBiasDqDbiasNamedBarriers::kDqueryPartialWG1 + owner, 256);
        Accumulator sum;
#pragma unroll
        for (int n = 0; n < kDimFragments; ++n) {
            const float4 x = smem_.dquery[owner][0][n][threadIdx.x % kWarpgroupThreads];
            const float4 y = smem_.dquery[owner][1][n][threadIdx.x % kWarpgroupThreads];
            sum[0][n][0] = x.x + y.x, sum[0][n][1] = x.y + y.y, sum[0][n][2] = x.z + y.z, sum[0][n][3] = x.w + y.w;
        }
#pragma unroll
        for (int h = 0; h < 2; ++h)
            store_row(sum, h, schedule_.scale,
                      dquery_rows_ + batch * p_.dquery.batch_stride + h * 8 * p_.dquery.row_stride,
                      static_cast<int>(p_.head_dim), row_ + h * 8 < p_.seqlen_q);
    }

    __device__ __forceinline__ void store_dbias() const {
        if (p_.dbias_partials == nullptr) return;
        const int64_t head = work_tile_.bias_batch * p_.heads + work_tile_.head;
        const int64_t m_block = head * schedule_.num_blocks + work_tile_.block;
        float* to = pair_bias_dbias_partial<Traits>(p_, work_tile_.split, m_block, first_n_block());
#pragma unroll
        for (int i = 0; i < kNBlocks; ++i)
#pragma unroll
            for (int n = 0; n < kScoreFragments; ++n) {
                const float* x = dbias_[i][n];
                reinterpret_cast<float4*>(
                    to)[(i * kScoreFragments + n) * kWarpgroupThreads + threadIdx.x % kWarpgroupThreads] = {x[0], x[1],
                                                                                                            x[2], x[3]};
            }
    }

    const BwdArgs& p_;
    const PairBiasSchedule& schedule_;
    SharedStorage& smem_;
    const PairBiasWorkTile& work_tile_;
    const int warpgroup_;
    const int warp_row_;  // this warp's first row in the m_block
    const bool masks_keys_;
    const int row_;         // this lane's first row of two, in the sequence
    T* const dquery_rows_;  // at row_, in batch element 0
    Pipeline<Traits::kRowStages> row_pipeline_;
    Pipeline<Traits::kKeyStages> key_pipeline_, released_keys_;  // released_keys_: the stage of the GEMM in flight
    const typename Traits::BiasReader bias_reader_;
    Accumulator dquery_;
    float dbias_[kNBlocks][kScoreFragments][4];
};

}  // namespace flash_dmattn::cuda::sm90
